"""Loss scaling: small float16 gradients do not vanish, where the loss is multiplied beforehand."""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

from mpidp.errors import InvalidArgumentError


@runtime_checkable
class ScalesLoss(Protocol):
    """What an adapter has besides, if its backward can start from a multiple of the loss."""

    def set_loss_scale(self, scale: float) -> None:
        """The backwards to come give `scale` times the gradient; reported losses stay unscaled."""


class LossScale:
    """A loss scale that follows the gradients, by the rules of torch.amp.GradScaler.

    A step whose averaged gradient is not finite is skipped, and multiplies the scale by
    `backoff_factor`; `growth_interval` good steps in a row multiply it by `growth_factor`. The
    ranks see the same averaged gradients, so their scales stay equal. With `growth_interval=None`
    the scale is fixed. Factors that are powers of two lose no bit.

        strategy = mpidp.strategies.Synchronous(loss_scale=LossScale(2.0**12))

    Raises InvalidArgumentError for numbers that make no sense.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int | None = 2000,
    ) -> None:
        wrong = {
            "init_scale": not 0 < init_scale < math.inf,
            "growth_factor": not growth_factor > 1,
            "backoff_factor": not 0 < backoff_factor < 1,
            "growth_interval": growth_interval is not None and growth_interval < 1,
        }
        for name, is_wrong in wrong.items():
            if is_wrong:
                raise InvalidArgumentError(f"{name} does not fit: see LossScale")
        self.value = float(init_scale)
        self.good_steps = 0  # in a row, since the last change
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval

    def update(self, *, finite: bool) -> None:
        """After a step, with whether its averaged gradient was finite."""
        if self._growth_interval is None:
            return
        if not finite:
            self.value *= self._backoff_factor
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self._growth_interval:
            self.good_steps = 0
            if self.value * self._growth_factor < math.inf:
                self.value *= self._growth_factor


def loss_scale_of(given: LossScale | float | str | None) -> LossScale | None:
    """A number is a fixed scale, "dynamic" a LossScale as it comes. Raises InvalidArgumentError."""
    if given is None or isinstance(given, LossScale):
        return given
    if given == "dynamic":
        return LossScale()
    if isinstance(given, (int, float)):
        return LossScale(float(given), growth_interval=None)
    raise InvalidArgumentError(
        f'loss_scale={given!r}: expected a number > 0, "dynamic", a LossScale or None'
    )
