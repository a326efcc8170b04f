"""The extension's schedules as NumPy records: inspect them, price them, draw them.

An algorithm is data: a list of steps for each rank (send, receive, reduce, copy). What this module
shows is what the library runs over MPI; the shared-memory path of one node has no schedule.

    steps("all_reduce", "ring", world_size=4, rank=0, count=8).steps["peer"]
    price("all_reduce", "ring", 16, 1 << 20, alpha=2e-6, beta=8e-11)        # seconds
    print(draw("all_reduce", "recursive_halving", 4, 8))

`count` is in elements, by the collective: of the array (all_reduce, broadcast, reduce), of one
rank's input (all_gather), of one rank's output (reduce_scatter), of one block (all_to_all).
`segment_count` is the longest message in elements, 0 for uncut. Every function raises
`InvalidArgumentError` where the collective has no such algorithm or an argument is out of range.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpidp import _core
from mpidp.errors import InvalidArgumentError

STEP_DTYPE = np.dtype(
    [
        ("kind", "U14"),  # send, receive, receive_reduce, reduce_ordered, copy
        ("source_buffer", "U7"),  # input, output, scratch
        ("destination_buffer", "U7"),
        ("final", "u1"),  # 1: this reduction completes its range
        ("received_first", "u1"),  # operand order of receive_reduce
        ("peer", "i4"),
        ("source_offset", "i8"),  # elements
        ("destination_offset", "i8"),  # elements
        ("count", "i8"),  # elements
        ("stride", "i8"),  # elements between the terms of reduce_ordered
    ]
)

EVENT_DTYPE = np.dtype([("rank", "i4"), ("step", "i8"), ("start", "f8"), ("end", "f8")])

# How many unfinished steps of a rank the executor looks at (csrc/core/executor.cc).
WINDOW = 16

_RECEIVES = ("receive", "receive_reduce")
_SHORT = {"input": "in", "output": "out", "scratch": "tmp"}


class Schedule(NamedTuple):
    """The steps of one rank, in order, and the scratch memory they need."""

    steps: NDArray[Any]  # of STEP_DTYPE
    scratch_count: int  # elements


def steps(
    collective: str,
    algorithm: str,
    world_size: int,
    rank: int,
    count: int,
    root: int = 0,
    segment_count: int = 0,
) -> Schedule:
    """What one rank does in a collective, as records of `STEP_DTYPE`.

    The steps mean what they would mean one after another, with sends buffered; the k-th send from
    a to b matches the k-th receive at b from a. A send has no destination and a receive no source:
    those fields are to be ignored.

        >>> ring = steps("all_reduce", "ring", world_size=3, rank=0, count=6)
        >>> ring.steps["kind"][:2].tolist(), ring.steps["peer"][:2].tolist()
        (['send', 'receive_reduce'], [1, 2])
    """
    records, scratch_count = _core.schedule(
        collective, algorithm, world_size, rank, count, root, segment_count
    )
    return Schedule(np.array(records, dtype=STEP_DTYPE), scratch_count)


def has_schedule(collective: str, algorithm: str) -> bool:
    """Whether the pair is a schedule: "auto", "hierarchical" and "mpi" are not."""
    return _core.has_schedule(collective, algorithm)


def timeline(
    collective: str,
    algorithm: str,
    world_size: int,
    count: int,
    *,
    alpha: float,
    beta: float,
    gamma: float = 0.0,
    item_size: int = 4,
    root: int = 0,
    segment_count: int = 0,
) -> NDArray[Any]:
    """When each step of each rank starts and ends, as records of `EVENT_DTYPE`, in seconds.

    The model: a message of n bytes holds its sender for alpha + n beta, and its receiver for n
    beta; a rank sends and receives at the same time, but one message each way. Combining two
    operands of n bytes takes n gamma, one reduction at a time. Copies are free. Steps overlap as
    in the executor: a step waits for the earlier ones whose memory it shares, among the 16 that
    are looked at. All ranks enter at time 0.
    """
    ranks = [
        _RankClock(
            steps(collective, algorithm, world_size, rank, count, root, segment_count),
            rank,
            world_size,
            _Costs(alpha, beta, gamma, item_size),
        )
        for rank in range(world_size)
    ]
    # arrivals[a][b]: when the messages from a reach b, in the order of sending.
    arrivals: list[list[deque[float]]] = [
        [deque() for _ in range(world_size)] for _ in range(world_size)
    ]
    progress = True
    while progress:
        progress = False
        for clock in ranks:
            progress |= clock.advance(arrivals)
    events = [event for clock in ranks for event in clock.events]
    return np.array(events, dtype=EVENT_DTYPE)


def price(
    collective: str,
    algorithm: str,
    world_size: int,
    count: int,
    *,
    alpha: float,
    beta: float,
    gamma: float = 0.0,
    item_size: int = 4,
    root: int = 0,
    segment_count: int = 0,
) -> float:
    """Seconds until the last rank is done, by the model of `timeline`.

    alpha is the latency of a message in seconds, beta the seconds per byte sent, gamma the seconds
    per byte reduced, item_size the bytes of an element.

        >>> round(price("all_reduce", "ring", 4, 1000, alpha=1.0, beta=0.0), 9)
        6.0
    """
    events = timeline(
        collective,
        algorithm,
        world_size,
        count,
        alpha=alpha,
        beta=beta,
        gamma=gamma,
        item_size=item_size,
        root=root,
        segment_count=segment_count,
    )
    return float(events["end"].max(initial=0.0))


def closed_form_cost(
    collective: str,
    algorithm: str,
    world_size: int,
    nbytes: int,
    *,
    alpha: float,
    beta: float,
    gamma: float = 0.0,
    num_segments: int = 1,
) -> float:
    """Seconds by the formulas of the algorithm files (csrc/schedule), for equal chunks.

    nbytes is the larger of input and output. num_segments counts for the pipelined chains alone
    ("ring" broadcast and reduce); elsewhere segments hide reductions, which no formula shows. Where
    world_size is no power of two, all_gather by "recursive_doubling" leaves out the second messages
    of runs that wrap around.

        >>> closed_form_cost("all_reduce", "ring", 4, 4000, alpha=1.0, beta=0.001)
        12.0
    """
    if not has_schedule(collective, algorithm):
        raise InvalidArgumentError(f"{collective} has no schedule by {algorithm!r}")
    if world_size < 1 or nbytes < 0 or num_segments < 1:
        raise InvalidArgumentError(
            "closed_form_cost needs world_size >= 1, nbytes >= 0 and num_segments >= 1, got "
            f"{world_size}, {nbytes}, {num_segments}"
        )
    if world_size == 1 or nbytes == 0:
        return 0.0
    messages, sent, reduced = _factors(collective, algorithm, world_size, num_segments)
    return messages * alpha + nbytes * (sent * beta + reduced * gamma)


def _factors(
    collective: str, algorithm: str, world_size: int, num_segments: int
) -> tuple[float, float, float]:
    """What alpha, n beta and n gamma are multiplied by."""
    others = world_size - 1
    share = others / world_size
    rounds = others.bit_length()  # ceil(log2 P)
    members = 1 << (world_size.bit_length() - 1)
    halvings = members.bit_length() - 1
    folded = members != world_size
    kept = (members - 1) / members
    if algorithm == "ring":
        stages = (world_size - 2 + num_segments) / num_segments
        return {
            "all_reduce": (2 * others, 2 * share, share),
            "reduce_scatter": (others, share, share),
            "all_gather": (others, share, 0.0),
            "broadcast": (stages * num_segments, stages, 0.0),
            "reduce": (stages * num_segments, stages, stages),
        }[collective]
    if algorithm == "recursive_halving":
        if collective == "all_reduce":
            fold = (2.0, 1.0, 0.5) if folded else (0.0, 0.0, 0.0)
            return 2 * halvings + fold[0], 2 * kept + fold[1], kept + fold[2]
        if not folded:
            return halvings, share, share
        # The ranks of the first members deal with most: 2v ranks up to v = P - K, v + P - K after.
        pairs = world_size - members
        dealt = [
            (v + min(v, pairs)) / world_size for v in (members >> i for i in range(1, halvings + 1))
        ]
        return halvings + 2, dealt[0] + sum(dealt) + 1 / world_size, dealt[0] + sum(dealt)
    if algorithm == "recursive_doubling":
        extra = 1 if folded else 0
        return {
            "all_reduce": (halvings + 2.0 * extra, halvings + 2.0 * extra, halvings + 1.0 * extra),
            "all_gather": (rounds, share, 0.0),
            "broadcast": (rounds, rounds, 0.0),
            "reduce": (rounds, rounds, rounds),
        }[collective]
    return {
        "all_reduce": (2 * others, 2 * share, share),
        "reduce_scatter": (others, share, share),
        "all_gather": (others, share, 0.0),
        "all_to_all": (others, share, 0.0),
        "broadcast": (others, others, 0.0),
        "reduce": (world_size, 2 * share, share),
    }[collective]


def draw(
    collective: str,
    algorithm: str,
    world_size: int,
    count: int,
    *,
    root: int = 0,
    segment_count: int = 0,
) -> str:
    """A table of who sends what when: a column per rank, a row per round.

    A message's round is one more than the latest round its sender had to wait for. `>1 in[0:2]`
    sends elements 0 and 1 of the input to rank 1; `<3 out[2:4]` receives from rank 3; `+3` adds
    what comes from rank 3 to the own term; `=` is a local copy, `+all` the sum of all terms in rank
    order; `!` marks a sum that is complete.
    """
    lists = [
        steps(collective, algorithm, world_size, rank, count, root, segment_count).steps.tolist()
        for rank in range(world_size)
    ]
    cells: list[dict[int, list[str]]] = [{} for _ in range(world_size)]
    pending: dict[tuple[int, int], deque[int]] = {}
    position = [0] * world_size
    now = [0] * world_size
    progress = True
    while progress:
        progress = False
        for rank, records in enumerate(lists):
            while position[rank] < len(records):
                step = records[position[rank]]
                kind, peer = step[0], step[5]
                when = max(now[rank], 1)
                if kind == "send":
                    when = now[rank] + 1
                    pending.setdefault((rank, peer), deque()).append(when)
                elif kind in _RECEIVES:
                    if not pending.get((peer, rank)):
                        break
                    now[rank] = when = max(now[rank], pending[peer, rank].popleft())
                cells[rank].setdefault(when, []).append(_cell(step))
                position[rank] += 1
                progress = True
    last = max((when for cell in cells for when in cell), default=0)
    table = [["round", *(f"rank {rank}" for rank in range(world_size))]]
    for when in range(1, last + 1):
        columns = [cell.get(when, []) for cell in cells]
        for line in range(max((len(column) for column in columns), default=0)):
            label = str(when) if line == 0 else ""
            table.append(
                [label, *(column[line] if line < len(column) else "" for column in columns)]
            )
    widths = [max(len(row[i]) for row in table) for i in range(world_size + 1)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    )


def _cell(step: tuple[Any, ...]) -> str:
    kind, source_buffer, destination_buffer, final, _, peer, source, destination, count, _ = step
    source_text = f"{_SHORT[source_buffer]}[{source}:{source + count}]"
    destination_text = f"{_SHORT[destination_buffer]}[{destination}:{destination + count}]"
    mark = "!" if final else ""
    return {
        "send": f">{peer} {source_text}",
        "receive": f"<{peer} {destination_text}",
        "receive_reduce": f"+{peer} {destination_text}{mark}",
        "reduce_ordered": f"+all {destination_text}{mark}",
        "copy": f"= {destination_text}",
    }[kind]


class _Costs(NamedTuple):
    alpha: float
    beta: float
    gamma: float
    item_size: int


class _RankClock:
    """Plays one rank's steps in program order and notes when each starts and ends."""

    def __init__(self, schedule: Schedule, rank: int, world_size: int, costs: _Costs) -> None:
        self.records = schedule.steps.tolist()
        self.rank = rank
        self.world_size = world_size
        self.costs = costs
        self.events: list[tuple[int, int, float, float]] = []
        self.send_free = self.receive_free = self.reduce_free = 0.0
        # The steps that end last, as (end, number, reads, writes): the window at any time.
        self.latest: list[tuple[float, int, tuple[Any, ...], tuple[Any, ...]]] = []

    def advance(self, arrivals: list[list[deque[float]]]) -> bool:
        """Goes on until a message is missing; True if any step was played."""
        first = len(self.events)
        while len(self.events) < len(self.records):
            step = self.records[len(self.events)]
            kind, peer = step[0], step[5]
            if kind in _RECEIVES and not arrivals[peer][self.rank]:
                break
            self._play(step, arrivals)
        return len(self.events) > first

    def _play(self, step: tuple[Any, ...], arrivals: list[list[deque[float]]]) -> None:
        kind, peer, count = step[0], step[5], step[8]
        alpha, beta, gamma, item_size = self.costs
        nbytes = count * item_size
        reads, writes = self._memory(step)
        entered = self.latest[0][0] if len(self.latest) == WINDOW else 0.0
        ready = max([entered, *(past[0] for past in self.latest if _conflict(past, reads, writes))])
        if kind == "send":
            start = max(ready, self.send_free)
            self.send_free = end = start + alpha + nbytes * beta
            arrivals[self.rank][peer].append(end)
        elif kind in _RECEIVES:
            # A message that is reduced lands in a temporary, so only the reduction has to wait.
            start = entered if kind == "receive_reduce" else ready
            arrived = arrivals[peer][self.rank].popleft()
            earliest = max(start, self.receive_free) + nbytes * beta
            self.receive_free = end = max(arrived, earliest)
            if kind == "receive_reduce":
                self.reduce_free = end = max(end, ready, self.reduce_free) + nbytes * gamma
        elif kind == "reduce_ordered":
            start = max(ready, self.reduce_free)
            self.reduce_free = end = start + (self.world_size - 1) * nbytes * gamma
        else:
            start = end = ready
        number = len(self.events)
        self.events.append((self.rank, number, start, end))
        heapq.heappush(self.latest, (end, number, reads, writes))
        if len(self.latest) > WINDOW:
            heapq.heappop(self.latest)

    def _memory(self, step: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        kind, source_buffer, destination_buffer, _, _, _, source, destination, count, _ = step
        reads: tuple[Any, ...] = ()
        if kind != "receive":
            reads = ((source_buffer, source, source + count),)
        if kind == "reduce_ordered":
            reads = (*reads, ("scratch", 0, (self.world_size - 1) * step[9]))
        writes: tuple[Any, ...] = ()
        if kind != "send":
            writes = ((destination_buffer, destination, destination + count),)
        return reads, writes


def _conflict(past: tuple[Any, ...], reads: tuple[Any, ...], writes: tuple[Any, ...]) -> bool:
    _, _, past_reads, past_writes = past
    return _overlap(past_writes, reads + writes) or _overlap(past_reads, writes)


def _overlap(some: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] for a in some for b in others)
