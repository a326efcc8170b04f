"""Synchronous data-parallel SGD: every step averages the gradients of all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpidp.errors import InvalidArgumentError, MpidpError
from mpidp.reducer import Reducer
from mpidp.reducer.compression import codec_named
from mpidp.reducer.plan import DEFAULT_BUCKET_BYTES, DEFAULT_FIRST_BUCKET_BYTES
from mpidp.strategies.base import StepReport
from mpidp.training.adapter import Adapter, BatchResult

if TYPE_CHECKING:
    from mpidp.communicator import Communicator

# As torch.nn.utils.clip_grad_norm_ has it, so that clipped runs compare.
_CLIP_EPSILON = 1e-6
_NONFINITE = ("skip", "apply", "raise")


class Synchronous:
    """Averages the gradients of all ranks in every step, exactly as one process would.

    `clip_norm` scales the averaged gradient down to this norm; `clip_value` clamps its elements.
    `compression` names a codec (see mpidp.reducer.compression). `nonfinite` says what happens where
    the averaged gradient has an Inf or NaN: "skip" the step, "apply" it as it is, or "raise"
    MpidpError. All ranks decide alike, since all look at the same bits.
    """

    def __init__(
        self,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        compression: str | None = None,
        nonfinite: str = "skip",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        first_bucket_bytes: int = DEFAULT_FIRST_BUCKET_BYTES,
    ) -> None:
        for name, limit in (("clip_norm", clip_norm), ("clip_value", clip_value)):
            if limit is not None and not limit > 0:
                raise InvalidArgumentError(f"{name}={limit!r}: expected a number > 0, or None")
        if nonfinite not in _NONFINITE:
            raise InvalidArgumentError(
                f"nonfinite={nonfinite!r}: expected one of {', '.join(_NONFINITE)}"
            )
        self._clip_norm = clip_norm
        self._clip_value = clip_value
        self._codec = codec_named(compression)
        self._nonfinite = nonfinite
        self._bucket_bytes = bucket_bytes
        self._first_bucket_bytes = first_bucket_bytes
        self._adapter: Adapter | None = None
        self._reducer: Reducer | None = None
        self._bound = 0

    def attach(self, adapter: Adapter, comm: Communicator) -> None:
        """See `Strategy.attach`."""
        self._adapter = adapter
        self._reducer = Reducer(
            comm,
            adapter.leaves(),
            codec=self._codec,
            bucket_bytes=self._bucket_bytes,
            first_bucket_bytes=self._first_bucket_bytes,
        )
        adapter.on_gradient_ready(self._reducer.mark_ready)
        self._bound = 0

    def step(
        self, batches: Sequence[Any], *, learning_rate: float | None = None, stop: bool = False
    ) -> StepReport:
        """See `Strategy.step`."""
        adapter, reducer = self._attached()
        reducer.zero()
        if self._bound != reducer.generation:
            adapter.bind_gradients(reducer.gradient_views)
            self._bound = reducer.generation
        result = BatchResult()
        for number, batch in enumerate(batches):
            reducer.begin(synchronize=number == len(batches) - 1)
            result = result + adapter.compute_gradients(batch)
        reduced = reducer.finish(result, stop=stop)
        squared_norm = reducer.squared_norm()
        norm = math.sqrt(squared_norm) if squared_norm >= 0 else math.nan
        finite = math.isfinite(norm)
        if not finite and self._nonfinite == "raise":
            raise MpidpError(f"the averaged gradient is not finite (its norm is {norm})")
        applies = finite or self._nonfinite == "apply"
        if applies and reduced.result.weight > 0:
            self._clip(reducer.gradient_views, norm)
            adapter.apply_gradients(learning_rate)
        return StepReport(
            reduced.result,
            applies,
            reduced.stop,
            norm,
            reduced.wire_bytes,
            reduced.wait_seconds,
        )

    def state_dict(self) -> Mapping[str, NDArray[Any]]:
        """See `Strategy.state_dict`: the residuals of a lossy codec."""
        return self._attached()[1].residuals()

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """See `Strategy.load_state_dict`."""
        self._attached()[1].load_residuals(dict(state))

    def close(self) -> None:
        """See `Strategy.close`."""
        if self._adapter is not None:
            self._adapter.on_gradient_ready(None)
            self._adapter.bind_gradients(None)
        self._adapter = self._reducer = None

    def _attached(self) -> tuple[Adapter, Reducer]:
        if self._adapter is None or self._reducer is None:
            raise MpidpError("the strategy is not attached: pass it to a Trainer, or attach() it")
        return self._adapter, self._reducer

    def _clip(self, gradients: Sequence[NDArray[Any]], norm: float) -> None:
        if self._clip_norm is not None:
            factor = self._clip_norm / (norm + _CLIP_EPSILON)
            if factor < 1:
                for gradient in gradients:
                    gradient *= gradient.dtype.type(factor)
        if self._clip_value is not None:
            for gradient in gradients:
                np.clip(gradient, -self._clip_value, self._clip_value, out=gradient)
