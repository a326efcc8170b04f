"""Learning-rate schedules: pure functions of the step, so that nothing needs to be saved of them.

    schedule = lr.cosine(0.1, total_steps=1000, warmup_steps=50)
    trainer.fit(dataset, 128, steps=1000, schedule=schedule)

Steps count from 0. Each schedule starts with a linear warm-up (Goyal et al. 2017, section 2.2):
step s < warmup_steps has the rate `rate * (s + 1) / warmup_steps`, so that no step has the rate 0
and step `warmup_steps` has the full one. After `total_steps` the last rate holds on.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from mpidp.errors import InvalidArgumentError

Schedule = Callable[[int], float]

NAMES = ("constant", "linear", "cosine", "step")


def constant(rate: float, *, warmup_steps: int = 0) -> Schedule:
    """`rate` at every step after the warm-up. Raises InvalidArgumentError for a bad number."""
    _check(rate, warmup_steps, 0)
    return _warmed(rate, warmup_steps, lambda step: rate)


def linear(
    rate: float, *, total_steps: int, warmup_steps: int = 0, final_rate: float = 0.0
) -> Schedule:
    """From `rate` after the warm-up in a straight line to `final_rate` at step `total_steps`."""
    _check(rate, warmup_steps, final_rate)
    _check_total(total_steps, warmup_steps)

    def decay(step: int) -> float:
        return rate + (final_rate - rate) * _progress(step, warmup_steps, total_steps)

    return _warmed(rate, warmup_steps, decay)


def cosine(
    rate: float, *, total_steps: int, warmup_steps: int = 0, final_rate: float = 0.0
) -> Schedule:
    """From `rate` to `final_rate` along half a cosine (Loshchilov & Hutter 2017, equation 5)."""
    _check(rate, warmup_steps, final_rate)
    _check_total(total_steps, warmup_steps)

    def decay(step: int) -> float:
        part = _progress(step, warmup_steps, total_steps)
        return final_rate + (rate - final_rate) * (1 + math.cos(math.pi * part)) / 2

    return _warmed(rate, warmup_steps, decay)


def step_decay(
    rate: float, *, every_steps: int, factor: float = 0.1, warmup_steps: int = 0
) -> Schedule:
    """`rate` times `factor` to the power of how often `every_steps` fit into the steps so far."""
    _check(rate, warmup_steps, 0)
    if every_steps < 1 or not factor > 0:
        raise InvalidArgumentError(
            f"every_steps={every_steps}, factor={factor}: need every_steps >= 1 and factor > 0"
        )
    return _warmed(rate, warmup_steps, lambda step: rate * factor ** (step // every_steps))


def named(name: str, rate: float, *, total_steps: int, warmup_steps: int = 0) -> Schedule:
    """The schedule of this name: "constant", "linear", "cosine", or "step" (a tenth after each
    third of the steps). Raises InvalidArgumentError.

        schedule = lr.named("cosine", 0.1, total_steps=1000, warmup_steps=50)
    """
    if name == "constant":
        return constant(rate, warmup_steps=warmup_steps)
    if name == "linear":
        return linear(rate, total_steps=total_steps, warmup_steps=warmup_steps)
    if name == "cosine":
        return cosine(rate, total_steps=total_steps, warmup_steps=warmup_steps)
    if name == "step":
        every_steps = max(1, -(-total_steps // 3))
        return step_decay(rate, every_steps=every_steps, warmup_steps=warmup_steps)
    raise InvalidArgumentError(f"schedule {name!r}: expected one of {', '.join(NAMES)}")


def _warmed(rate: float, warmup_steps: int, after: Schedule) -> Schedule:
    def schedule(step: int) -> float:
        if step < warmup_steps:
            return rate * (step + 1) / warmup_steps
        return after(step)

    return schedule


def _progress(step: int, warmup_steps: int, total_steps: int) -> float:
    """The part of the steps after the warm-up that is over, from 0 to 1."""
    left = total_steps - warmup_steps
    return 1.0 if left <= 0 else min(1.0, max(0.0, (step - warmup_steps) / left))


def _check(rate: float, warmup_steps: int, final_rate: float) -> None:
    if not (math.isfinite(rate) and rate > 0) or warmup_steps < 0 or not final_rate >= 0:
        raise InvalidArgumentError(
            f"rate={rate}, warmup_steps={warmup_steps}, final_rate={final_rate}: need rate > 0, "
            "warmup_steps >= 0 and final_rate >= 0"
        )


def _check_total(total_steps: int, warmup_steps: int) -> None:
    if total_steps < warmup_steps:
        raise InvalidArgumentError(
            f"total_steps={total_steps} ends before the {warmup_steps} steps of warm-up"
        )
