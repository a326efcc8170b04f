"""Runs schedules on symbols as an adversary could within the executor's rules.

Any order that memory conflicts allow in a window of unfinished steps; sends that wait until their
receive is posted, and read their memory only then; few temporaries for messages to be reduced. What
is right here needs no buffering in the transport and no luck in the order (csrc/core/executor.cc).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from symbols import (
    Case,
    Expressions,
    Memory,
    Outcome,
    Program,
    SimulationError,
    Spans,
    Step,
    ordered_sum,
    received_sum,
    spans_of,
)

from mpidp import schedules


@dataclass
class _Active:
    """A step in the window."""

    step: Step
    spans: Spans
    number: int  # of the message between its two ranks
    posted: bool = False
    received: np.ndarray | None = None  # of receive_reduce, in its temporary
    done: bool = False


class _Overlapped:
    """The executor with an adversary choosing what happens next."""

    def __init__(
        self, case: Case, programs: list[Program], rng: random.Random, window: int, temporaries: int
    ) -> None:
        self.case, self.programs, self.rng = case, programs, rng
        self.window_size, self.temporaries = window, temporaries
        self.expressions = Expressions(case.world_size)
        ranks = range(case.world_size)
        self.memories = [Memory(case, rank, programs[rank].scratch_count) for rank in ranks]
        self.windows: list[list[_Active]] = [[] for _ in ranks]
        self.next_step = [0 for _ in ranks]
        self.counters: dict[tuple[str, int, int], int] = {}
        # Posted and not completed, by (sender, receiver, number).
        self.sends: dict[tuple[int, int, int], _Active] = {}
        self.receives: dict[tuple[int, int, int], _Active] = {}

    def run(self) -> Outcome:
        ranks = list(range(self.case.world_size))
        for rank in ranks:
            self._fill(rank)
        while any(self.windows):
            self.rng.shuffle(ranks)
            if not any(self._turn(rank) for rank in ranks):
                stuck = [f"rank {r}: {w[0].step}" for r, w in enumerate(self.windows) if w]
                raise SimulationError("nothing can go on: " + "; ".join(stuck))
        outputs = [
            memory.output() if self.case.has_output(rank) else None
            for rank, memory in enumerate(self.memories)
        ]
        return Outcome(outputs, self.expressions, [], 0)

    def _fill(self, rank: int) -> None:
        window, steps = self.windows[rank], self.programs[rank].steps
        while len(window) < self.window_size and self.next_step[rank] < len(steps):
            step = steps[self.next_step[rank]]
            self.next_step[rank] += 1
            spans = spans_of(step, self.memories[rank], rank, self.case.world_size)
            number = 0
            if step.peer >= 0:
                key = ("send" if step.kind == "send" else "receive", rank, step.peer)
                number = self.counters[key] = self.counters.get(key, -1) + 1
            window.append(_Active(step, spans, number))

    def _turn(self, rank: int) -> bool:
        """Advances some steps of a rank's window, in random order; True if anything happened."""
        done = sum(active.done for active in self.windows[rank])
        self.windows[rank] = [active for active in self.windows[rank] if not active.done]
        self._fill(rank)
        order = list(range(len(self.windows[rank])))
        self.rng.shuffle(order)
        happened = False
        for index in order[: self.rng.randint(1, len(order))] if order else []:
            happened |= self._advance(rank, index)
        # An unlucky choice is no deadlock: try all before saying that nothing can go on.
        if not happened:
            happened = any(self._advance(rank, index) for index in order)
        return happened or done > 0

    def _blocked(self, rank: int, index: int) -> bool:
        window = self.windows[rank]
        return any(
            not earlier.done and window[index].spans.conflicts(earlier.spans)
            for earlier in window[:index]
        )

    def _advance(self, rank: int, index: int) -> bool:
        active = self.windows[rank][index]
        if active.done:
            return False
        kind, peer = active.step.kind, active.step.peer
        if kind == "send":
            return self._post(rank, index, self.sends, (rank, peer, active.number))
        if kind == "receive":
            return self._post(rank, index, self.receives, (peer, rank, active.number))
        if kind == "receive_reduce":
            return self._receive_reduce(rank, index, (peer, rank, active.number))
        if self._blocked(rank, index):
            return False
        memory, spans = self.memories[rank], active.spans
        if kind == "reduce_ordered":
            values = ordered_sum(active.step, memory, spans, rank, self.expressions)
        else:
            values = memory.read(spans.source).copy()
        memory.elements[slice(*spans.destination)] = values
        active.done = True
        return True

    def _post(
        self,
        rank: int,
        index: int,
        posted: dict[tuple[int, int, int], _Active],
        key: tuple[int, int, int],
    ) -> bool:
        active = self.windows[rank][index]
        if active.posted:
            return self._complete(key)
        if self._blocked(rank, index):
            return False
        posted[key] = active
        active.posted = True
        return True

    def _receive_reduce(self, rank: int, index: int, key: tuple[int, int, int]) -> bool:
        active = self.windows[rank][index]
        if not active.posted:
            in_use = sum(
                other.posted and not other.done and other.step.kind == "receive_reduce"
                for other in self.windows[rank]
            )
            # The executor goes through its window in order, so the first waiting step is served.
            earlier_waits = any(
                not other.posted and other.step.kind == "receive_reduce"
                for other in self.windows[rank][:index]
            )
            if in_use >= self.temporaries or earlier_waits:
                return False
            self.receives[key] = active
            active.posted = True
            return True
        if active.received is None:
            return self._complete(key)
        if self._blocked(rank, index):
            return False
        memory = self.memories[rank]
        own = memory.read(active.spans.source)
        total = received_sum(active.step, own, active.received, self.expressions)
        memory.elements[slice(*active.spans.destination)] = total
        active.done = True
        return True

    def _complete(self, key: tuple[int, int, int]) -> bool:
        """Moves a message whose send and receive are both posted: the memory is read only now."""
        if key not in self.sends or key not in self.receives:
            return False
        sender, receiver, _ = key
        send, receive = self.sends.pop(key), self.receives.pop(key)
        if send.step.count != receive.step.count:
            raise SimulationError(f"sent and expected counts differ: {send.step}, {receive.step}")
        values = self.memories[sender].read(send.spans.source).copy()
        if receive.step.kind == "receive_reduce":
            receive.received = values
        else:
            self.memories[receiver].elements[slice(*receive.spans.destination)] = values
            receive.done = True
        send.done = True
        return True


def run_overlapped(
    case: Case,
    programs: list[Program],
    rng: random.Random,
    window: int = schedules.WINDOW,
    temporaries: int = 2,
) -> Outcome:
    """A random run within the executor's rules; raises `SimulationError` on a deadlock."""
    return _Overlapped(case, programs, rng, window, temporaries).run()
