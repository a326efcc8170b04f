"""Runs schedules on symbols, one step after another, and proves that they do what they should.

`run_in_order` gives the steps the meaning that csrc/schedule/schedule.h gives them: each rank's one
after another, with sends buffered. `verify` compares what a run left behind with the collective's
definition. adversary.py runs them in other orders.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from symbols import (
    INDEX_BITS,
    INDEX_MASK,
    REDUCING,
    Case,
    Expressions,
    Memory,
    Outcome,
    Program,
    SimulationError,
    ordered_sum,
    received_sum,
    spans_of,
)


def run_in_order(case: Case, programs: list[Program], count_rounds: bool = False) -> Outcome:
    """Each rank's steps one after another; raises `SimulationError` where a rank waits for ever."""
    world_size = case.world_size
    expressions = Expressions(world_size)
    memories = [Memory(case, rank, programs[rank].scratch_count) for rank in range(world_size)]
    rounds = [np.zeros(len(memory.elements), dtype=np.int64) for memory in memories]
    wires: dict[tuple[int, int], deque[tuple[int, np.ndarray]]] = {}
    messages: list[dict[int, int]] = [{} for _ in range(world_size)]
    position = [0] * world_size
    progress = True
    while progress:
        progress = False
        for rank, program in enumerate(programs):
            memory, steps = memories[rank], program.steps
            elements, reached = memory.elements, rounds[rank]
            number = position[rank]
            while number < len(steps):
                step = steps[number]
                kind, peer = step.kind, step.peer
                receives = kind in ("receive", "receive_reduce")
                if receives and not wires.get((peer, rank)):
                    break
                spans = spans_of(step, memory, rank, world_size)
                begin, end = spans.destination
                depth = 0
                if count_rounds:
                    touched = (spans.source, spans.terms)
                    depth = max(int(reached[a:b].max(initial=0)) for a, b in touched)
                if kind == "send":
                    if peer == rank or not 0 <= peer < world_size:
                        raise SimulationError(f"rank {rank} sends to {peer}")
                    values = memory.read(spans.source).copy()
                    wires.setdefault((rank, peer), deque()).append((depth + 1, values))
                    messages[rank][peer] = messages[rank].get(peer, 0) + step.count
                elif receives:
                    sent_depth, received = wires[peer, rank].popleft()
                    depth = max(depth, sent_depth)
                    if len(received) != step.count:
                        raise SimulationError(
                            f"rank {peer} sends {len(received)}, rank {rank} expects {step.count}"
                        )
                    if kind == "receive_reduce":
                        own = memory.read(spans.source)
                        received = received_sum(step, own, received, expressions)
                    elements[begin:end] = received
                elif kind == "reduce_ordered":
                    elements[begin:end] = ordered_sum(step, memory, spans, rank, expressions)
                else:
                    elements[begin:end] = memory.read(spans.source).copy()
                if count_rounds:
                    reached[begin:end] = depth
                number += 1
                progress = True
            position[rank] = number
    for rank, program in enumerate(programs):
        if position[rank] < len(program.steps):
            raise SimulationError(f"rank {rank} waits for ever: {program.steps[position[rank]]}")
    left = [pair for pair, queue in wires.items() if queue]
    if left:
        raise SimulationError(f"messages nobody receives, by (sender, receiver): {left}")
    outputs = [
        memory.output() if case.has_output(rank) else None for rank, memory in enumerate(memories)
    ]
    longest = max(int(reached.max(initial=0)) for reached in rounds)
    return Outcome(outputs, expressions, messages, longest)


def verify(case: Case, outcome: Outcome) -> None:
    """Raises `SimulationError` unless every rank ends with what the collective promises."""
    world_size, count = case.world_size, case.count
    expressions = outcome.expressions
    indices = np.arange(count, dtype=np.int64)
    sums: dict[int, list[np.ndarray]] = {}  # by index range: who else computed it, and how
    for rank, output in enumerate(outcome.outputs):
        if output is None:
            continue
        if (output < 0).any():
            raise SimulationError(f"rank {rank}: {case} leaves elements unwritten")
        found_index, found = output & INDEX_MASK, output >> INDEX_BITS
        if case.collective in REDUCING:
            first = rank * count if case.collective == "reduce_scatter" else 0
            expected_index = indices + first
            for number in np.unique(found).tolist():
                if expressions.ranks[number] != (1 << world_size) - 1:
                    missing = f"{expressions.ranks[number]:b}".rjust(world_size, "0")[::-1]
                    raise SimulationError(f"rank {rank}: {case} has only the terms {missing}")
                if expressions.final[number] != (world_size > 1):
                    raise SimulationError(f"rank {rank}: {case} has a sum never completed")
            sums.setdefault(first, []).append(found)
        else:
            expected_index, sources = _expected_copies(case, rank)
            if not np.array_equal(found, sources):
                raise SimulationError(f"rank {rank}: {case} has elements of the wrong rank")
        if not np.array_equal(found_index, expected_index):
            raise SimulationError(f"rank {rank}: {case} has elements at the wrong place")
    for trees in sums.values():
        if not all(np.array_equal(tree, trees[0]) for tree in trees[1:]):
            raise SimulationError(f"{case}: ranks compute different trees, so different bits")
    if case.collective in REDUCING and case.algorithm == "direct" and world_size > 1:
        canonical = 0
        for rank in range(1, world_size):
            canonical = expressions.combine(canonical, rank, rank == world_size - 1)
        if any((tree != canonical).any() for trees in sums.values() for tree in trees):
            raise SimulationError(f"{case}: not the sum in rank order")


def _expected_copies(case: Case, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """(index, source rank) of every output element of a collective that only moves data."""
    indices = np.arange(case.count, dtype=np.int64)
    if case.collective == "broadcast":
        return indices, np.full(case.count, case.root, dtype=np.int64)
    shift = rank * case.count if case.collective == "all_to_all" else 0
    sources = np.repeat(np.arange(case.world_size, dtype=np.int64), case.count)
    return np.tile(indices + shift, case.world_size), sources
