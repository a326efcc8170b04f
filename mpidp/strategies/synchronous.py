"""Synchronous data-parallel SGD: every step averages the gradients of all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpidp.errors import InvalidArgumentError, MpidpError
from mpidp.reducer import Reducer
from mpidp.reducer.compression import Codec, codec_named
from mpidp.reducer.plan import DEFAULT_BUCKET_BYTES, DEFAULT_FIRST_BUCKET_BYTES
from mpidp.strategies.base import StepReport
from mpidp.strategies.scaling import LossScale, ScalesLoss, loss_scale_of
from mpidp.training.adapter import Adapter, BatchResult

if TYPE_CHECKING:
    from mpidp.communicator import Communicator

# As torch.nn.utils.clip_grad_norm_ has it, so that clipped runs compare.
_CLIP_EPSILON = 1e-6
_LOSS_SCALE = "loss_scale"
_NONFINITE = ("skip", "apply", "raise")


class Synchronous:
    """Averages the gradients of all ranks in every step, exactly as one process would.

    `clip_norm` scales the averaged gradient down to this norm; `clip_value` clamps its elements.
    `compression` is a codec or its name (see mpidp.reducer.compression). `nonfinite` says what
    happens where the averaged gradient has an Inf or NaN: "skip" the step, "apply" it as it is, or
    "raise" MpidpError. All ranks decide alike, since all look at the same bits.

    `loss_scale` multiplies the losses before the backward, and the averaged gradients are divided
    by it: a number, "dynamic", or a `LossScale`. It goes with "skip", and needs an adapter that
    has `set_loss_scale`.
    """

    def __init__(
        self,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        compression: str | Codec | None = None,
        loss_scale: LossScale | float | str | None = None,
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
        self._scaling = loss_scale_of(loss_scale)
        if self._scaling is not None and nonfinite != "skip":
            raise InvalidArgumentError(
                f'nonfinite={nonfinite!r} does not go with loss_scale: expected "skip"'
            )
        self._nonfinite = nonfinite
        self._bucket_bytes = bucket_bytes
        self._first_bucket_bytes = first_bucket_bytes
        self._adapter: Adapter | None = None
        self._reducer: Reducer | None = None
        self._bound = 0

    def attach(self, adapter: Adapter, comm: Communicator) -> None:
        """See `Strategy.attach`."""
        if self._scaling is not None and not isinstance(adapter, ScalesLoss):
            raise InvalidArgumentError(
                f"loss_scale needs an adapter with set_loss_scale(); {type(adapter).__name__} has "
                "none"
            )
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
        return self._step(batches, learning_rate, stop, serving=False)

    @contextmanager
    def join(self, *, learning_rate: float | None = None) -> Iterator[None]:
        """A loop of `step` calls whose number may differ by rank. Collective.

        At the end of the block a rank goes on with empty steps until no rank has data left, so
        that all replicas stay equal (see mpidp.reducer.join). An exception in the block ends it
        without that.

            with strategy.join():
                for batch in batches_of_this_rank:
                    strategy.step([batch])
        """
        yield
        while self._step([], learning_rate, False, serving=True).active:
            pass

    def _step(
        self, batches: Sequence[Any], learning_rate: float | None, stop: bool, *, serving: bool
    ) -> StepReport:
        adapter, reducer = self._attached()
        scale = 1.0 if self._scaling is None else self._scaling.value
        if self._scaling is not None and isinstance(adapter, ScalesLoss):
            reducer.loss_scale = scale
            adapter.set_loss_scale(scale)
        reducer.zero()
        if self._bound != reducer.generation:
            adapter.bind_gradients(reducer.gradient_views)
            self._bound = reducer.generation
        result = BatchResult()
        for number, batch in enumerate(batches):
            reducer.begin(synchronize=number == len(batches) - 1)
            result = result + adapter.compute_gradients(batch)
        reduced = reducer.finish(result, stop=stop, serving=serving)
        squared_norm = reducer.squared_norm()
        norm = math.sqrt(squared_norm) if squared_norm >= 0 else math.nan
        finite = math.isfinite(norm)
        if not finite and self._nonfinite == "raise":
            raise MpidpError(f"the averaged gradient is not finite (its norm is {norm})")
        if self._scaling is not None and reduced.result.weight > 0:
            self._scaling.update(finite=finite)
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
            active=reduced.active,
            loss_scale=scale,
        )

    def state_dict(self) -> Mapping[str, NDArray[Any]]:
        """See `Strategy.state_dict`: that of a lossy codec, and the loss scale."""
        state = self._attached()[1].state_dict()
        if self._scaling is not None:
            state[_LOSS_SCALE] = np.array([self._scaling.value, self._scaling.good_steps])
        return state

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """See `Strategy.load_state_dict`. Collective: the loss scale is rank 0's."""
        _, reducer = self._attached()
        if self._scaling is not None:
            mine = state.get(_LOSS_SCALE)
            found = reducer.comm.broadcast_object(mine, root=0)
            if found is not None:
                self._scaling.value, self._scaling.good_steps = float(found[0]), int(found[1])
        reducer.load_state_dict({k: v for k, v in state.items() if k != _LOSS_SCALE})

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
