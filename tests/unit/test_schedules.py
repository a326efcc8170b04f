"""Every algorithm, on symbols: for any number of ranks each contribution arrives exactly once."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from adversary import run_overlapped
from simulate import run_in_order, verify
from symbols import REDUCING, Case, Program, SimulationError, load

from mpidp import schedules
from mpidp._core import chunk_of
from mpidp.errors import InvalidArgumentError
from mpidp.tuning import AVAILABLE

PAIRS = [
    (collective, algorithm)
    for collective, algorithms in AVAILABLE.items()
    for algorithm in algorithms
    if algorithm not in ("mpi", "hierarchical")
]
ROOTED = [pair for pair in PAIRS if pair[0] in ("broadcast", "reduce")]
WORLD_SIZES = range(1, 34)
# Up to here every combination is tried; beyond, each count meets one of the others' combinations.
ALL_COMBINATIONS_UP_TO = 8


def pair_ids(pair: tuple[str, str]) -> str:
    return "-".join(pair)


each_pair = pytest.mark.parametrize("pair", PAIRS, ids=pair_ids)
each_rooted_pair = pytest.mark.parametrize("pair", ROOTED, ids=pair_ids)


def offers_in_place(collective: str) -> bool:
    """Whether input and output can be the same memory, or the one part of the other."""
    return collective not in ("reduce_scatter", "all_to_all")


def cases(pair: tuple[str, str], world_size: int) -> list[Case]:
    """Counts around world_size, segmented or not, in place or not."""
    near = sorted({0, 1, world_size - 1, world_size, world_size + 1, 2 * world_size + 3})
    # As many elements where the whole is world_size times as long as what a rank has.
    long_count = 1000 if pair[0] in ("all_reduce", "broadcast", "reduce") else 1000 // world_size
    places = (False, True) if offers_in_place(pair[0]) else (False,)
    if world_size <= ALL_COMBINATIONS_UP_TO:
        plans = list(itertools.product(near, (0, 1, 7), places))
        plans += list(itertools.product((long_count,), (7, 64), places))
    else:
        variants = list(itertools.product((0, 20, 64), places))
        plans = [
            (count, *variants[(world_size + number) % len(variants)])
            for number, count in enumerate([*near, long_count])
        ]
    root = world_size // 2
    return [
        Case(*pair, world_size, count, root, segment_count, in_place)
        for count, segment_count, in_place in plans
    ]


def failures(tried: list[Case], check: object) -> list[str]:
    """What went wrong in which case; empty when nothing did."""
    found = []
    for case in tried:
        try:
            check(case)  # type: ignore[operator]
        except SimulationError as error:
            found.append(f"{case}: {error}")
    return found


def check_in_order(case: Case) -> None:
    verify(case, run_in_order(case, load(case)))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@each_pair
def test_every_contribution_arrives_exactly_once(pair: tuple[str, str], world_size: int) -> None:
    assert not failures(cases(pair, world_size), check_in_order)


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 6, 7, 8, 11])
@each_rooted_pair
def test_any_root(pair: tuple[str, str], world_size: int) -> None:
    tried = [
        Case(*pair, world_size, count, root, segment_count, in_place)
        for root in range(world_size)
        for count in (1, world_size + 1)
        for segment_count in (0, 2)
        for in_place in (False, True)
    ]
    assert not failures(tried, check_in_order)


@pytest.mark.parametrize("world_size", range(1, 9))
@each_pair
def test_any_legal_order_gives_the_same(pair: tuple[str, str], world_size: int) -> None:
    """The executor may reorder what memory does not order, and sends may not be buffered."""

    def check(case: Case) -> None:
        programs = load(case)
        for seed in range(2):
            verify(case, run_overlapped(case, programs, random.Random(seed)))

    places = (False, True) if offers_in_place(pair[0]) else (False,)
    tried = [
        Case(*pair, world_size, count, world_size - 1, segment_count, in_place)
        for count, segment_count in ((world_size + 1, 0), (3 * world_size + 2, 2))
        for in_place in places
    ]
    assert not failures(tried, check)


@pytest.mark.parametrize("world_size", [2, 3, 5, 8, 13, 16])
@each_pair
def test_no_deadlock_in_the_smallest_window(pair: tuple[str, str], world_size: int) -> None:
    """Two unfinished steps a rank and unbuffered sends: every send is beside its receive."""
    per_rank = pair[0] in ("reduce_scatter", "all_gather", "all_to_all")
    case = Case(*pair, world_size, 2 if per_rank else world_size + 3, segment_count=1)
    programs = load(case)
    outcome = run_overlapped(case, programs, random.Random(world_size), window=2, temporaries=1)
    verify(case, outcome)


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 7, 8, 16, 21])
@each_pair
def test_volume_and_rounds_are_those_of_the_formulas(
    pair: tuple[str, str], world_size: int
) -> None:
    members = 1 << (world_size.bit_length() - 1)
    halvings = members.bit_length() - 1
    pairs = world_size - members
    doublings = (world_size - 1).bit_length()
    others = world_size - 1
    chunk = 16 * members  # divides by ranks and members alike
    whole = chunk * world_size
    fold = 2 if pairs else 0
    # Elements sent by all ranks together, messages on the longest chain.
    total, rounds = {
        ("all_reduce", "ring"): (2 * others * whole, 2 * others),
        ("all_reduce", "recursive_halving"): (
            2 * (members - 1) * whole + 2 * pairs * whole,
            2 * halvings + fold,
        ),
        ("all_reduce", "recursive_doubling"): (
            members * halvings * whole + 2 * pairs * whole,
            halvings + fold,
        ),
        ("all_reduce", "direct"): (2 * others * whole, 2),
        ("reduce_scatter", "ring"): (others * whole, others),
        ("reduce_scatter", "direct"): (others * whole, 1),
        # A pair's rank sends its mate's chunk on, after the pair's exchange of the whole array.
        ("reduce_scatter", "recursive_halving"): (
            (members - 1) * whole + pairs * (whole + chunk),
            halvings + fold,
        ),
        ("all_gather", "ring"): (others * whole, others),
        ("all_gather", "recursive_doubling"): (others * whole, doublings),
        ("all_gather", "direct"): (others * whole, 1),
        ("broadcast", "ring"): (others * whole, others),
        ("broadcast", "recursive_doubling"): (others * whole, doublings),
        ("broadcast", "direct"): (others * whole, 1),
        ("reduce", "ring"): (others * whole, others),
        ("reduce", "recursive_doubling"): (others * whole, doublings),
        ("reduce", "direct"): (others * whole + others * chunk, 2),
        ("all_to_all", "direct"): (others * whole, 1),
    }[pair]
    per_rank = pair[0] in ("reduce_scatter", "all_gather", "all_to_all")
    case = Case(*pair, world_size, chunk if per_rank else whole, root=world_size - 1)
    outcome = run_in_order(case, load(case), count_rounds=True)
    sent = [sum(by_peer.values()) for by_peer in outcome.messages]
    assert sum(sent) == total
    # The pairs' extra rounds, and the tree's last, need not lie on one chain.
    exact = not pairs or pair[1] in ("ring", "direct")
    assert outcome.rounds == rounds if exact else outcome.rounds in range(rounds // 2, rounds + 1)
    if exact and pair[0] not in ("broadcast", "reduce"):
        assert set(sent) == {total // world_size}
    if pair == ("broadcast", "ring"):
        assert max(sent) == whole


@pytest.mark.parametrize("world_size", [2, 3, 8, 13])
@pytest.mark.parametrize("pair", [p for p in PAIRS if p[1] == "ring"], ids=pair_ids)
def test_a_ring_talks_to_its_neighbours_only(pair: tuple[str, str], world_size: int) -> None:
    case = Case(*pair, world_size, 3 * world_size + 1, root=1, segment_count=2)
    for rank, program in enumerate(load(case)):
        sends = {step.peer for step in program.steps if step.kind == "send"}
        receives = {step.peer for step in program.steps if step.kind.startswith("receive")}
        assert sends <= {(rank + 1) % world_size}
        assert receives <= {(rank - 1) % world_size}


@pytest.mark.parametrize("world_size", [2, 5, 8])
@each_pair
def test_messages_and_scratch_are_bounded(pair: tuple[str, str], world_size: int) -> None:
    segment_count = 64
    case = Case(*pair, world_size, 10_000, segment_count=segment_count)
    scratch = {
        "direct": world_size * segment_count,
        # reduce_scatter keeps sums of chunks that are not its own: half the array, two thirds
        # where the ranks of pairs have more; or one chunk.
        "recursive_halving": -(-2 * case.input_count // 3),
        "ring": case.count if pair[0] == "reduce_scatter" else 8 * segment_count,
        "recursive_doubling": 2 * segment_count,
    }[pair[1]]
    for program in load(case):
        assert program.scratch_count <= scratch
        assert all(
            step.count <= segment_count for step in program.steps if step.kind not in ("copy",)
        )


@each_pair
def test_every_rank_alone_copies(pair: tuple[str, str]) -> None:
    (program,) = load(Case(*pair, 1, 5))
    assert [step.kind for step in program.steps] == ["copy"]
    assert load(Case(*pair, 1, 0))[0].steps == []


@each_pair
def test_counts_beyond_32_bits(pair: tuple[str, str]) -> None:
    """The offsets of the steps cover the last element, and nothing wraps around."""
    count = (1 << 40) + 3
    case = Case(*pair, 6, count, root=5)
    programs = load(case)
    ends = {"input": 0, "output": 0}
    for program in programs:
        for step in program.steps:
            assert step.count > 0
            if step.kind != "receive":
                end = step.source_offset + step.count
                ends[step.source_buffer] = max(ends.get(step.source_buffer, 0), end)
            if step.kind != "send":
                end = step.destination_offset + step.count
                ends[step.destination_buffer] = max(ends.get(step.destination_buffer, 0), end)
    assert ends["input"] == case.input_count
    assert ends["output"] == case.output_count


@each_pair
def test_the_list_of_steps_stays_short(pair: tuple[str, str]) -> None:
    """One element a segment is no reason for a step per element of a large array."""
    records = schedules.steps(*pair, 4, 0, 1 << 30, segment_count=1).steps
    assert len(records) < 1 << 20


def mutants(programs: list[Program]) -> list[tuple[str, list[Program]]]:
    """Schedules with one fault each, and what it is."""
    found = []
    for rank, program in enumerate(programs):
        for number, step in enumerate(program.steps):
            changes = {"dropped": None}
            if step.kind in ("receive_reduce", "reduce_ordered"):
                changes["final flipped"] = step._replace(final=1 - step.final)
            if step.kind != "receive":
                changes["source shifted"] = step._replace(source_offset=step.source_offset + 1)
            if step.kind != "send":
                offset = step.destination_offset + 1
                changes["destination shifted"] = step._replace(destination_offset=offset)
            if step.count > 1:
                changes["shortened"] = step._replace(count=step.count - 1)
            if step.kind == "receive_reduce":
                changes["overwrites"] = step._replace(kind="receive")
            for what, changed in changes.items():
                steps = list(program.steps)
                steps[number : number + 1] = [] if changed is None else [changed]
                mutant = list(programs)
                mutant[rank] = dataclasses.replace(program, steps=steps)
                found.append((f"rank {rank}, step {number} {what}: {step}", mutant))
    return found


@pytest.mark.parametrize("world_size", [3, 4])
@each_pair
def test_the_simulation_catches_faults(pair: tuple[str, str], world_size: int) -> None:
    case = Case(*pair, world_size, 2 * world_size + 1, root=1)
    programs = load(case)
    verify(case, run_in_order(case, programs))
    missed = []
    for what, mutant in mutants(programs):
        try:
            verify(case, run_in_order(case, mutant))
        except SimulationError:
            continue
        missed.append(what)
    assert not missed


@pytest.mark.parametrize("world_size", [2, 4, 5])
def test_the_simulation_catches_bits_that_differ(world_size: int) -> None:
    """In recursive doubling both partners add, so the operands' order matters."""
    case = Case("all_reduce", "recursive_doubling", world_size, 3)
    for rank in (0, 2) if world_size > 2 else (0, 1):
        programs = load(case)
        steps = programs[rank].steps
        last = max(i for i, step in enumerate(steps) if step.kind == "receive_reduce")
        steps[last] = steps[last]._replace(received_first=1 - steps[last].received_first)
        with pytest.raises(SimulationError, match="different trees"):
            verify(case, run_in_order(case, programs))


def test_the_simulation_catches_a_deadlock_without_buffering() -> None:
    """All ranks send before they receive: right by the steps' meaning, stuck in a small window."""
    case = Case("all_to_all", "direct", 3, 1)
    programs = load(case)
    for program in programs:
        program.steps.sort(key=lambda step: step.kind == "receive")
    verify(case, run_in_order(case, programs))
    with pytest.raises(SimulationError, match="nothing can go on"):
        run_overlapped(case, programs, random.Random(0), window=2)


def test_the_simulation_catches_the_order_that_memory_asks_for() -> None:
    """Sums sent from scratch that the next segment's overwrite, were they not ordered."""
    case = Case("reduce", "ring", 3, 64, root=2, segment_count=1)
    programs = load(case)
    verify(case, run_overlapped(case, programs, random.Random(0)))
    # Rank 1 sends slot 0 again where it should send slot 1.
    steps = programs[1].steps
    second = [i for i, step in enumerate(steps) if step.kind == "send"][1]
    steps[second] = steps[second]._replace(source_offset=0)
    with pytest.raises(SimulationError):
        verify(case, run_overlapped(case, programs, random.Random(0)))


@pytest.mark.parametrize("collective", REDUCING)
def test_direct_adds_in_rank_order_whatever_the_segments(collective: str) -> None:
    """`verify` compares the tree of "direct" with the left fold over the ranks."""
    tried = [
        Case(collective, "direct", world_size, count, segment_count=segment_count)
        for world_size in (2, 5, 9)
        for count in (1, 30)
        for segment_count in (0, 1, 3, 100)
    ]
    assert not failures(tried, check_in_order)


@each_pair
def test_the_table_and_the_tuning_agree(pair: tuple[str, str]) -> None:
    assert schedules.has_schedule(*pair)


@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [
        ("all_reduce", "mpi"),
        ("all_reduce", "auto"),
        ("all_reduce", "hierarchical"),
        ("all_gather", "recursive_halving"),
        ("all_to_all", "ring"),
        ("barrier", "ring"),
    ],
)
def test_pairs_that_are_no_schedule(collective: str, algorithm: str) -> None:
    assert not schedules.has_schedule(collective, algorithm)
    with pytest.raises(InvalidArgumentError, match=f"{collective} has no algorithm {algorithm}"):
        schedules.steps(collective, algorithm, 4, 0, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world_size": 0}, "world_size"),
        ({"rank": 4}, "rank must be from 0 to 3, got 4"),
        ({"rank": -1}, "rank"),
        ({"root": 4}, "root"),
        ({"count": -1}, "count"),
        ({"segment_count": -1}, "segment_count"),
        ({"algorithm": "rings"}, "rings"),
        ({"collective": "all_reduced"}, "all_reduced"),
    ],
)
def test_bad_arguments(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "collective": "all_reduce",
        "algorithm": "ring",
        "world_size": 4,
        "rank": 0,
        "count": 8,
        **change,
    }
    with pytest.raises(InvalidArgumentError, match=message):
        schedules.steps(**arguments)  # type: ignore[arg-type]


def test_chunks_cover_the_count() -> None:
    """What the algorithms cut by: no gap, no overlap, sizes within one granule."""
    for count, num_chunks, granule in itertools.product((0, 1, 7, 64, 1000), (1, 3, 8), (1, 16)):
        chunks = [chunk_of(count, num_chunks, i, granule) for i in range(num_chunks)]
        assert sum(length for _, length in chunks) == count
        assert all(a + b == c for (a, b), (c, _) in itertools.pairwise(chunks) if b)
        assert all(offset % granule == 0 for offset, length in chunks if length)
