"""Prices, closed forms and drawings of schedules."""

from __future__ import annotations

import numpy as np
import pytest

from mpidp import schedules
from mpidp.errors import InvalidArgumentError
from mpidp.tuning import AVAILABLE

PAIRS = [
    (collective, algorithm)
    for collective, algorithms in AVAILABLE.items()
    for algorithm in algorithms
    if algorithm not in ("mpi", "hierarchical")
]
COSTS = {"alpha": 5000.0, "beta": 1.0, "gamma": 0.5}
# Pairs whose formula is an upper bound where world_size is no power of two.
BOUNDS = {("reduce_scatter", "recursive_halving"), ("reduce", "recursive_doubling")}


def count_of(collective: str, nbytes: int, world_size: int) -> int:
    """Elements of one byte such that the larger buffer has nbytes."""
    per_rank = collective in ("reduce_scatter", "all_gather", "all_to_all")
    return nbytes // world_size if per_rank else nbytes


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_price_is_the_closed_form(pair: tuple[str, str], world_size: int) -> None:
    """Two ways to the same number: playing the steps, and the formula in the algorithm's file."""
    nbytes = world_size * 32 * 105
    count = count_of(pair[0], nbytes, world_size)
    priced = schedules.price(*pair, world_size, count, item_size=1, **COSTS)
    formula = schedules.closed_form_cost(*pair, world_size, nbytes, **COSTS)
    power_of_two = world_size & (world_size - 1) == 0
    if power_of_two or pair not in BOUNDS | {("all_gather", "recursive_doubling")}:
        assert priced == pytest.approx(formula)
    elif pair in BOUNDS:
        assert formula * 0.6 < priced <= formula * (1 + 1e-9)
    else:
        # One message more in rounds whose run of blocks wraps around.
        rounds = (world_size - 1).bit_length()
        assert formula <= priced <= formula + (rounds - 1) * COSTS["alpha"]


def test_design_table_of_costs() -> None:
    """The formulas written out, at P = 8: 2(P-1)/P, not (2P-1)/P."""
    alpha, beta, gamma, n = 3.0, 0.25, 0.125, 1 << 20
    costs = {"alpha": alpha, "beta": beta, "gamma": gamma}
    ring = schedules.closed_form_cost("all_reduce", "ring", 8, n, **costs)
    assert ring == pytest.approx(14 * alpha + 14 / 8 * n * beta + 7 / 8 * n * gamma)
    halving = schedules.closed_form_cost("all_reduce", "recursive_halving", 8, n, **costs)
    assert halving == pytest.approx(6 * alpha + 14 / 8 * n * beta + 7 / 8 * n * gamma)
    doubling = schedules.closed_form_cost("all_reduce", "recursive_doubling", 8, n, **costs)
    assert doubling == pytest.approx(3 * (alpha + n * beta + n * gamma))


@pytest.mark.parametrize("num_segments", [1, 4, 25])
def test_price_of_a_pipelined_chain(num_segments: int) -> None:
    count = 1000
    arguments = {"alpha": 2.0, "beta": 1.0, "gamma": 0.5}
    for collective in ("broadcast", "reduce"):
        priced = schedules.price(
            collective,
            "ring",
            6,
            count,
            item_size=1,
            segment_count=count // num_segments,
            **arguments,
        )
        formula = schedules.closed_form_cost(
            collective, "ring", 6, count, num_segments=num_segments, **arguments
        )
        # The reductions of a chain overlap its messages, which the formula adds up.
        assert priced == pytest.approx(formula) or (collective == "reduce" and priced < formula)


@pytest.mark.parametrize("algorithm", ["ring", "recursive_halving"])
def test_segments_hide_reductions(algorithm: str) -> None:
    """With free latency, cut messages overlap sends with sums; whole ones cannot."""
    arguments = {"alpha": 0.0, "beta": 1.0, "gamma": 1.0, "item_size": 1}
    whole = schedules.price("all_reduce", algorithm, 4, 4096, **arguments)
    cut = schedules.price("all_reduce", algorithm, 4, 4096, segment_count=64, **arguments)
    transfer = 2 * 3 / 4 * 4096
    assert whole == pytest.approx(transfer + 3 / 4 * 4096)
    assert transfer <= cut < whole - 0.5 * (whole - transfer)


def test_a_ring_keeps_segments_in_flight_both_ways() -> None:
    """While a rank reduces one segment, the next one is on the wire."""
    events = schedules.timeline(
        "all_reduce", "ring", 4, 4096, alpha=1.0, beta=1.0, gamma=0.9, item_size=1, segment_count=64
    )
    records = schedules.steps("all_reduce", "ring", 4, 0, 4096, segment_count=64).steps
    mine = events[events["rank"] == 0]
    busy = sum(mine["end"][records["kind"] == "send"] - mine["start"][records["kind"] == "send"])
    assert busy > 0.9 * events["end"].max()


def test_timeline_has_every_step_once() -> None:
    events = schedules.timeline("all_reduce", "direct", 5, 23, alpha=1.0, beta=0.1, gamma=0.1)
    assert (events["end"] >= events["start"]).all()
    for rank in range(5):
        records = schedules.steps("all_reduce", "direct", 5, rank, 23).steps
        numbers = events["step"][events["rank"] == rank]
        assert np.array_equal(numbers, np.arange(len(records)))


def test_steps_are_records() -> None:
    schedule = schedules.steps("all_reduce", "ring", world_size=3, rank=0, count=6)
    assert schedule.steps.dtype == schedules.STEP_DTYPE
    assert set(schedule.steps["peer"].tolist()) == {1, 2}
    assert schedule.steps["count"].sum() == 2 * 2 * 2 * 2
    empty = schedules.steps("all_reduce", "ring", world_size=3, rank=0, count=0)
    assert empty.steps.shape == (0,)
    assert empty.steps.dtype == schedules.STEP_DTYPE


def test_nothing_costs_nothing() -> None:
    assert schedules.price("all_reduce", "ring", 4, 0, alpha=1.0, beta=1.0) == 0.0
    assert schedules.price("all_reduce", "ring", 1, 9, alpha=1.0, beta=1.0) == 0.0


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        (("all_to_all", "ring", 4, 8), {}),
        (("all_reduce", "ring", 0, 8), {}),
        (("all_reduce", "ring", 4, -8), {}),
        (("broadcast", "ring", 4, 8), {"num_segments": 0}),
    ],
)
def test_bad_closed_form_arguments(
    arguments: tuple[str, str, int, int], changes: dict[str, int]
) -> None:
    with pytest.raises(InvalidArgumentError):
        schedules.closed_form_cost(*arguments, alpha=1.0, beta=1.0, **changes)


def test_draw() -> None:
    expected = """\
round  rank 0        rank 1       rank 2
1      >1 in[3:6]    >0 in[0:3]   >0 in[0:3]
       +1 out[0:3]   +0 out[3:6]
       +2 out[0:3]!
2      >2 out[0:3]   >2 out[3:6]  +1 out[3:6]!
       >1 out[0:3]                <0 out[0:3]
3                    <2 out[3:6]  >1 out[3:6]
                     <0 out[0:3]
4      <1 out[3:6]   >0 out[3:6]"""
    assert schedules.draw("all_reduce", "recursive_halving", 3, 6) == expected


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_draw_shows_every_step(pair: tuple[str, str]) -> None:
    text = schedules.draw(*pair, 5, 7, root=3)
    shown = sum(text.count(mark) for mark in "><+=")
    assert shown == sum(len(schedules.steps(*pair, 5, rank, 7, 3).steps) for rank in range(5))
