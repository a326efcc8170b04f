"""Learning-rate schedules: exact values at their corners, and pure."""

import math

import pytest

from mpidp.errors import InvalidArgumentError
from mpidp.training import lr

BUILDERS = {
    "constant": lambda **more: lr.constant(0.8, **more),
    "linear": lambda **more: lr.linear(0.8, total_steps=100, **more),
    "cosine": lambda **more: lr.cosine(0.8, total_steps=100, **more),
    "step": lambda **more: lr.step_decay(0.8, every_steps=30, **more),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_warm_up_rises_in_a_straight_line_to_the_full_rate(name):
    schedule = BUILDERS[name](warmup_steps=4)
    assert [schedule(step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])


@pytest.mark.parametrize("name", BUILDERS)
def test_without_warm_up_the_first_step_has_the_full_rate(name):
    assert BUILDERS[name]()(0) == 0.8


@pytest.mark.parametrize("name", BUILDERS)
def test_a_schedule_is_a_function_of_the_step_alone(name):
    schedule = BUILDERS[name](warmup_steps=7)
    forward = [schedule(step) for step in range(120)]
    backward = [schedule(step) for step in reversed(range(120))]
    assert forward == backward[::-1]
    assert all(rate >= 0 for rate in forward)


def test_linear():
    schedule = lr.linear(1.0, total_steps=10, warmup_steps=2, final_rate=0.2)
    assert schedule(6) == pytest.approx(0.6)
    assert schedule(10) == schedule(11) == pytest.approx(0.2)


def test_cosine():
    schedule = lr.cosine(1.0, total_steps=12, warmup_steps=4, final_rate=0.5)
    assert schedule(8) == pytest.approx(0.75)
    assert schedule(6) == pytest.approx(0.5 + 0.25 * (1 + math.cos(math.pi / 4)))
    assert schedule(12) == schedule(1000) == 0.5


def test_step_decay():
    schedule = lr.step_decay(1.0, every_steps=10, factor=0.5)
    assert [schedule(step) for step in (0, 9, 10, 19, 20, 35)] == [1, 1, 0.5, 0.5, 0.25, 0.125]


@pytest.mark.parametrize("name", lr.NAMES)
def test_names(name):
    schedule = lr.named(name, 0.1, total_steps=9, warmup_steps=2)
    assert schedule(0) == pytest.approx(0.05)
    assert schedule(2) == pytest.approx(0.1)
    if name == "step":
        assert schedule(8) == pytest.approx(0.001)


def test_all_of_it_may_be_warm_up():
    schedule = lr.linear(1.0, total_steps=3, warmup_steps=3)
    assert schedule(2) == 1.0
    assert schedule(3) == 0.0


@pytest.mark.parametrize(
    "build",
    [
        lambda: lr.constant(0.0),
        lambda: lr.constant(math.nan),
        lambda: lr.constant(math.inf),
        lambda: lr.constant(1.0, warmup_steps=-1),
        lambda: lr.linear(1.0, total_steps=3, warmup_steps=4),
        lambda: lr.cosine(1.0, total_steps=3, final_rate=-1),
        lambda: lr.step_decay(1.0, every_steps=0),
        lambda: lr.step_decay(1.0, every_steps=1, factor=0.0),
        lambda: lr.named("triangle", 1.0, total_steps=3),
    ],
)
def test_bad_arguments(build):
    with pytest.raises(InvalidArgumentError):
        build()
