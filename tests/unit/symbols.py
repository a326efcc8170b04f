"""Symbols in place of numbers: what the simulations of simulate.py and adversary.py compute with.

An element is a symbol: which expression over the ranks' inputs it holds, and which index of those
inputs. Expressions are trees, hash-consed to small numbers, so comparing two elements compares the
trees and with them the bits that any dtype would give. An expression that holds a rank's term twice
cannot be built, nor can one over elements of different index, nor one with a completed operand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mpidp import schedules

# An element is expression << 32 | index. Expression r < world_size is rank r's input.
INDEX_BITS = 32
INDEX_MASK = (1 << INDEX_BITS) - 1
UNDEFINED = -1

REDUCING = ("all_reduce", "reduce_scatter", "reduce")


class SimulationError(AssertionError):
    """A schedule that is wrong, and where."""


@dataclass(frozen=True)
class Case:
    """One collective call, on all ranks."""

    collective: str
    algorithm: str
    world_size: int
    count: int
    root: int = 0
    segment_count: int = 0
    in_place: bool = False

    @property
    def input_count(self) -> int:
        blocks = self.collective in ("reduce_scatter", "all_to_all")
        return self.count * (self.world_size if blocks else 1)

    @property
    def output_count(self) -> int:
        blocks = self.collective in ("all_gather", "all_to_all")
        return self.count * (self.world_size if blocks else 1)

    def has_output(self, rank: int) -> bool:
        return self.collective != "reduce" or rank == self.root


class Step(NamedTuple):
    """A step, its fields in the order of csrc/schedule/schedule.h."""

    kind: str
    source_buffer: str
    destination_buffer: str
    final: int
    received_first: int
    peer: int
    source_offset: int
    destination_offset: int
    count: int
    stride: int


@dataclass
class Program:
    """What one rank runs."""

    steps: list[Step]
    scratch_count: int


def load(case: Case) -> list[Program]:
    """The schedules of all ranks."""
    programs = []
    for rank in range(case.world_size):
        records, scratch_count = schedules.steps(
            case.collective,
            case.algorithm,
            case.world_size,
            rank,
            case.count,
            case.root,
            case.segment_count,
        )
        programs.append(Program([Step(*record) for record in records.tolist()], scratch_count))
    return programs


@dataclass
class Expressions:
    """Hash-consed trees: (first operand, second operand, completed) -> number."""

    world_size: int
    numbers: dict[tuple[int, int, bool], int] = field(default_factory=dict)
    ranks: list[int] = field(default_factory=list)  # bit mask of the terms, by number
    final: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ranks = [1 << rank for rank in range(self.world_size)]
        self.final = [False] * self.world_size

    def combine(self, first: int, second: int, final: bool) -> int:
        number = self.numbers.get((first, second, final))
        if number is not None:
            return number
        if first < 0 or second < 0:
            raise SimulationError("memory is added that nothing was written to")
        if self.ranks[first] & self.ranks[second]:
            raise SimulationError("a rank's term is added twice")
        if self.final[first] or self.final[second]:
            raise SimulationError("a completed sum is added to")
        number = len(self.ranks)
        self.numbers[first, second, final] = number
        self.ranks.append(self.ranks[first] | self.ranks[second])
        self.final.append(final)
        return number

    def combine_arrays(self, first: np.ndarray, second: np.ndarray, final: bool) -> np.ndarray:
        if len(first) == 1:
            head, tail = int(first[0]), int(second[0])
            if (head ^ tail) & INDEX_MASK:
                raise SimulationError("elements of different index are added")
            number = self.combine(head >> INDEX_BITS, tail >> INDEX_BITS, final)
            return (number << INDEX_BITS) | (first & INDEX_MASK)
        # One expression all over, as in nearly every message: a single look-up will do.
        head, difference = int(first[0]), int(first[0] ^ second[0])
        differences = first ^ second
        uniform = (first >> INDEX_BITS == head >> INDEX_BITS).all()
        uniform = uniform and (differences == difference).all()
        if difference & INDEX_MASK or (not uniform and (differences & INDEX_MASK).any()):
            raise SimulationError("elements of different index are added")
        if uniform:
            number = self.combine(head >> INDEX_BITS, int(second[0]) >> INDEX_BITS, final)
            return (first & INDEX_MASK) | (number << INDEX_BITS)
        heads, tails = first >> INDEX_BITS, second >> INDEX_BITS
        pairs = zip(heads.tolist(), tails.tolist(), strict=True)
        numbers = np.array([self.combine(a, b, final) for a, b in pairs], dtype=np.int64)
        return (first & INDEX_MASK) | (numbers << INDEX_BITS)


class Memory:
    """The buffers of one rank. In place, input and output share their elements."""

    def __init__(self, case: Case, rank: int, scratch_count: int) -> None:
        symbols = (np.int64(rank) << INDEX_BITS) | np.arange(case.input_count, dtype=np.int64)
        # Every buffer is a range of one array, so that addresses tell what overlaps.
        inside = 0
        if case.in_place and case.collective == "all_gather":
            inside = rank * case.count
        shared = case.in_place and case.has_output(rank)
        output_count = case.output_count if case.has_output(rank) else 0
        output_base = 0 if shared else case.input_count
        scratch_base = output_base + output_count
        self.base = {"input": inside, "output": output_base, "scratch": scratch_base}
        self.size = {
            "input": case.input_count,
            "output": output_count,
            "scratch": scratch_count,
        }
        self.elements = np.full(scratch_base + scratch_count, UNDEFINED, dtype=np.int64)
        self.elements[inside : inside + case.input_count] = symbols

    def span(self, buffer: str, offset: int, count: int) -> tuple[int, int]:
        """(begin, end) of a range of a buffer in `elements`."""
        if count < 1 or offset < 0 or offset + count > self.size[buffer]:
            raise SimulationError(
                f"{buffer}[{offset}:{offset + count}] is empty or out of its {self.size[buffer]}"
            )
        begin = self.base[buffer] + offset
        return begin, begin + count

    def read(self, span: tuple[int, int]) -> np.ndarray:
        """A view. What was never written is undefined, and may be moved but not added."""
        return self.elements[span[0] : span[1]]

    def output(self) -> np.ndarray:
        begin = self.base["output"]
        return self.elements[begin : begin + self.size["output"]]


@dataclass
class Outcome:
    """What a run left behind."""

    outputs: list[np.ndarray | None]  # one symbol per element; None where a rank has no output
    expressions: Expressions
    messages: list[dict[int, int]]  # elements sent, by sender and receiver
    rounds: int  # messages on the longest chain of messages that need each other's data


@dataclass
class Spans:
    """What a step touches, as (begin, end) of the rank's memory; empty ranges are (0, 0)."""

    source: tuple[int, int] = (0, 0)
    terms: tuple[int, int] = (0, 0)  # scratch of reduce_ordered
    destination: tuple[int, int] = (0, 0)

    def conflicts(self, earlier: Spans) -> bool:
        mine, theirs = self.destination, earlier.destination
        return (
            _overlap(theirs, self.source)
            or _overlap(theirs, self.terms)
            or _overlap(theirs, mine)
            or _overlap(earlier.source, mine)
            or _overlap(earlier.terms, mine)
        )


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def spans_of(step: Step, memory: Memory, rank: int, world_size: int) -> Spans:
    """Where the step reads and writes; raises where it may not."""
    kind, count = step.kind, step.count
    spans = Spans()
    if kind != "receive":
        spans.source = memory.span(step.source_buffer, step.source_offset, count)
    if kind != "send":
        if step.destination_buffer == "input":
            raise SimulationError(f"rank {rank} writes its input: {step}")
        spans.destination = memory.span(step.destination_buffer, step.destination_offset, count)
    if kind == "reduce_ordered":
        if step.peer != rank or step.stride < count:
            raise SimulationError(f"rank {rank}: terms overlap, or peer is not the rank: {step}")
        spans.terms = memory.span("scratch", 0, (world_size - 2) * step.stride + count)
        if _overlap(spans.terms, spans.destination):
            raise SimulationError(f"rank {rank}: the sum overwrites its terms: {step}")
    return spans


def received_sum(
    step: Step, own: np.ndarray, received: np.ndarray, expressions: Expressions
) -> np.ndarray:
    operands = (received, own) if step.received_first else (own, received)
    return expressions.combine_arrays(*operands, bool(step.final))


def ordered_sum(
    step: Step, memory: Memory, spans: Spans, rank: int, expressions: Expressions
) -> np.ndarray:
    total: np.ndarray | None = None
    slot = spans.terms[0]
    for term in range(expressions.world_size):
        begin = spans.source[0] if term == rank else slot
        slot += 0 if term == rank else step.stride
        values = memory.read((begin, begin + step.count))
        last = term == expressions.world_size - 1
        total = (
            values
            if total is None
            else expressions.combine_arrays(total, values, last and bool(step.final))
        )
    assert total is not None
    return total
