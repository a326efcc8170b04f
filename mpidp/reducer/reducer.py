"""The reducer: sums gradients over the ranks while the backward pass still runs.

Gradients live in buckets of registered memory; the framework accumulates straight into views of
them. A bucket is launched when its last gradient is ready and all buckets before it are launched,
so that every rank launches in the same order, whatever order its hooks fire in. A small float64
tail (weights, losses, flags) rides along with the last bucket.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpidp import _core
from mpidp.errors import MismatchError, MpidpError
from mpidp.reducer.compression.base import Codec, Exchange, Part
from mpidp.reducer.compression.plain import Plain
from mpidp.reducer.parts import make_part, residual_views
from mpidp.reducer.plan import (
    DEFAULT_BUCKET_BYTES,
    DEFAULT_FIRST_BUCKET_BYTES,
    Plan,
    plan_buckets,
    schema_difference,
    schema_hash,
    views_of,
)
from mpidp.training.adapter import BatchResult, Leaf
from mpidp.training.metrics import reduce_result

if TYPE_CHECKING:
    from mpidp.communicator import Communicator

# The tail's fixed slots; then one for each leaf (ranks that used it), then the metrics.
_WEIGHT, _LOSS, _STOP, _NEW_NAMES, _ACTIVE = range(5)
_FIXED = 5
# Names in a state.
_RESIDUAL, _WARM = "residual.", "warm."
# Elements widened at a time for the norm: small enough to stay in the second-level cache.
_NORM_BLOCK = 1 << 14


@dataclass(frozen=True)
class ReducedStep:
    """What all ranks know after a step; identical on all of them but for `wait_seconds`.

    `result` is the sum over all ranks and micro-batches; the gradients are divided by its weight.
    `used[i]` tells whether any rank's backward used leaf i. `active` is the number of ranks that
    had data, and did not only serve. `wire_bytes` is what one rank put into the exchanges, in
    encoded form.
    """

    result: BatchResult
    stop: bool
    used: NDArray[np.bool_]
    wire_bytes: int
    wait_seconds: float
    active: int


class Reducer:
    """Sums the gradients of `leaves` over the ranks of `comm`.

    Creating one is collective; ranks whose leaves differ all raise `MismatchError` with a table.
    The order of calls in a step:

        reducer.zero()                             # clears; may move the views (see generation)
        reducer.begin(synchronize=False)           # for all micro-batches but the last
        ...backward...
        reducer.begin()
        ...backward, whose hooks call reducer.mark_ready(i)...
        step = reducer.finish(result)              # now gradient_views hold the averages

    With `equal_weights` every rank counts alike, whatever its result's weight: the gradients are
    the mean over ranks, which costs no extra pass over them.

    `codec` encodes what goes over the wire (see mpidp.reducer.compression). With `rebuild` the
    buckets are planned anew once, after the first step, by the order in which rank 0's gradients
    became ready; `generation` changes then, and the views must be bound anew.
    """

    def __init__(
        self,
        comm: Communicator,
        leaves: Sequence[Leaf],
        *,
        codec: Codec | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        first_bucket_bytes: int = DEFAULT_FIRST_BUCKET_BYTES,
        rebuild: bool = True,
        equal_weights: bool = False,
    ) -> None:
        self._comm = comm
        self._leaves = list(leaves)
        self._codec: Codec = Plain() if codec is None else codec
        self._bucket_bytes = bucket_bytes
        self._first_bucket_bytes = first_bucket_bytes
        self._check_schema()
        self._names: list[str] = []  # of the metrics, as agreed
        self._hint = 0.0  # a power of two near the last total weight; 0 until the first step
        self._used = np.zeros(len(self._leaves), dtype=np.bool_)
        self._rebuild = rebuild
        self.equal_weights = equal_weights
        self._observed: list[int] = []
        self._synchronize = False
        self._missing: list[int] = []  # gradients that each bucket still waits for
        self._stepped = False
        self._loss_scale = 1.0
        self.generation = 0
        self._parts: list[Part] = []
        self._install(list(reversed(range(len(self._leaves)))))

    @property
    def comm(self) -> Communicator:
        """The ranks that it sums over."""
        return self._comm

    @property
    def plan(self) -> Plan:
        """The buckets in use."""
        return self._plan

    @property
    def loss_scale(self) -> float:
        """By what the losses are multiplied before the backward; averaging divides by it.

        The same on all ranks; set it between steps. Residuals move to the new scale with it.
        """
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        for part in self._parts:
            if part.residual is not None and value != self._loss_scale:
                part.residual *= part.residual.dtype.type(value / self._loss_scale)
        self._loss_scale = value

    def zero(self) -> None:
        """Clears the gradients for a new step. Collective only when the buckets are rebuilt.

        Drops a step whose backward failed before `finish`, provided it failed on all ranks alike:
        what it has launched is waited for, so that nothing writes into the new step's gradients.
        """
        dropped = self._exchanges
        self._reset_launches()
        for exchange in dropped:
            # The caller has seen the error of that step, and goes on; a communicator that is
            # broken says so again at the next collective.
            with contextlib.suppress(MpidpError):
                exchange.drop()
        if self._rebuild and self._stepped:
            self._rebuild = False
            self._adopt_order()
        for bucket in self._buckets:
            bucket[...] = 0
        self._used[...] = False
        self._observed.clear()

    def begin(self, *, synchronize: bool = True) -> None:
        """Announces a backward pass; only the last of a step synchronizes."""
        self._synchronize = synchronize
        self._ready = np.zeros(len(self._leaves), dtype=np.bool_)

    def mark_ready(self, leaf: int) -> None:
        """The running backward has completed leaf's gradient in its view; the target of hooks."""
        if self._ready[leaf]:
            raise MpidpError(
                f"parameter {self._leaves[leaf].name} got two gradients in one backward pass: run "
                "all but the last backward of a step without synchronization (no_sync)"
            )
        self._ready[leaf] = True
        self._used[leaf] = True
        if not self._synchronize:
            return
        self._observed.append(leaf)
        bucket = self._bucket_of[leaf]
        self._missing[bucket] -= 1
        # Before the first step the codec does not know the scale of things yet.
        if self._hint or not self._codec.needs_scale:
            self._launch_complete()

    def finish(
        self, result: BatchResult, *, stop: bool = False, serving: bool = False
    ) -> ReducedStep:
        """Completes the exchange of a step. Collective.

        `result` is the sum over this rank's micro-batches. Leaves that got no gradient count as
        they are: zero, or what earlier micro-batches left there. A rank that has run out of data
        is `serving` the others (see mpidp.reducer.join).
        """
        start = time.perf_counter()
        self._missing = [0] * len(self._missing)
        # The first step agrees on names and scale. All ranks must do that at the same place among
        # the launches: some have launched all their buckets by now, some (empty batch) none.
        first = not self._hint
        if first and self._codec.needs_scale:
            self._agree(result)
        self._launch_complete()
        if first and not self._codec.needs_scale:
            self._agree(result)
        tail = self._tail(result, stop, serving)
        tail_work = self._comm.all_reduce_async(tail, deterministic=True)
        wire_bytes = tail.nbytes
        # Codecs of several rounds start the later ones here: on all ranks in the same order.
        under_way = self._exchanges
        while under_way:
            under_way = [exchange for exchange in under_way if exchange.advance()]
        wire_bytes += sum(exchange.wire_bytes for exchange in self._exchanges)
        tail_work.wait()
        waited = time.perf_counter() - start
        total = self._read_tail(tail, result)
        self._average(total.weight)
        used = tail[_FIXED : _FIXED + len(self._leaves)] > 0
        self._hint = _power_of_two(total.weight) or self._hint
        self._stepped = self._stepped or total.weight > 0
        self._reset_launches()
        return ReducedStep(
            total, bool(tail[_STOP] > 0), used, wire_bytes, waited, int(tail[_ACTIVE])
        )

    def squared_norm(self) -> float:
        """The squared norm of all gradients, in float64; not finite if one of them is not.

        Collective: each rank sums a part, so all get the same bits, even on unlike processors.
        """
        mine = np.zeros(1)
        for bucket in self._buckets:
            offset, count = _core.chunk_of(bucket.size, self._comm.world_size, self._comm.rank)
            for first in range(offset, offset + count, _NORM_BLOCK):
                block = bucket[first : min(first + _NORM_BLOCK, offset + count)]
                wide = block if block.dtype.itemsize >= 8 else block.astype(np.float64)
                mine += np.vdot(wide, wide).real
        return float(self._comm.all_reduce(mine, deterministic=True)[0])

    def forget_used(self) -> None:
        """Starts counting anew which leaves are used; `zero` does so too."""
        self._used[...] = False

    def residuals(self) -> dict[str, NDArray[Any]]:
        """This rank's error-feedback residuals, by leaf name; empty without a lossy codec."""
        found: dict[str, NDArray[Any]] = {}
        for bucket, part in zip(self._plan.buckets, self._parts, strict=True):
            found.update((k, v.copy()) for k, v in residual_views(part, bucket, self._leaves))
        return found

    def load_residuals(self, residuals: Mapping[str, NDArray[Any]]) -> None:
        """Restores what `residuals` gave; leaves that it lacks start from zero."""
        for bucket, part in zip(self._plan.buckets, self._parts, strict=True):
            for name, view in residual_views(part, bucket, self._leaves):
                view[...] = residuals.get(name, 0)

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """What a lossy codec needs to go on bit for bit; empty for others.

        This rank's residuals, the codec's warm starts, the scale of the gradients, and the order of
        the leaves in the buckets.
        """
        if not self._codec.lossy:
            return {}
        state = {_RESIDUAL + name: value for name, value in self.residuals().items()}
        for part in self._parts:
            state.update((_WARM + name, value.copy()) for name, value in part.warm.items())
        pending = self._rebuild and self._stepped
        order = self._whole_order(self._observed) if pending else self._order
        state["scale"] = np.array([self._hint, self._loss_scale])
        state["order"] = np.array([*order, not self._rebuild or self._stepped], dtype=np.int64)
        return state

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restores what `state_dict` gave on this rank; nothing starts afresh. Collective.

        What must be equal on all ranks is rank 0's; ranks without a state have no residual.
        """
        if not self._codec.lossy:
            return
        common = {k: v for k, v in state.items() if not k.startswith(_RESIDUAL)}
        common = self._comm.broadcast_object(common, root=0)
        *order, planned = common.get("order", np.zeros(1, np.int64)).tolist()
        fits = sorted(order) == list(range(len(self._leaves)))
        if fits and order != self._order:
            self._install(order)
        self._rebuild = self._rebuild and not (fits and planned)
        hint, loss_scale = common.get("scale", np.array([0.0, 1.0])).tolist()
        self._hint, self._loss_scale = hint, loss_scale
        warm = {k[len(_WARM) :]: np.array(v) for k, v in common.items() if k.startswith(_WARM)}
        for part in self._parts:
            part.warm = {p.leaf: warm[p.leaf] for p in part.pieces if p.leaf in warm}
        self.load_residuals({k[len(_RESIDUAL) :]: v for k, v in state.items()})

    def _check_schema(self) -> None:
        mine = schema_hash(self._leaves)
        if len(set(self._comm.all_gather_object(mine))) > 1:
            raise MismatchError(*schema_difference(self._comm.all_gather_object(self._leaves)))

    def _plan_buckets(self, order: Sequence[int] | None) -> Plan:
        return plan_buckets(
            self._leaves,
            bucket_bytes=self._bucket_bytes,
            first_bucket_bytes=self._first_bucket_bytes,
            order=order,
        )

    def _install(self, order: Sequence[int]) -> None:
        plan = self._plan_buckets(order)
        kept = self.residuals() if self._parts else {}
        warm = {name: value for part in self._parts for name, value in part.warm.items()}
        self._plan, self._order = plan, list(order)
        self._buckets = [self._comm.empty((b.count,), b.dtype) for b in plan.buckets]
        self._bucket_of = [plan.place_of(leaf)[0] for leaf in range(len(self._leaves))]
        views: dict[int, NDArray[Any]] = {}
        for bucket, array in zip(plan.buckets, self._buckets, strict=True):
            array[...] = 0
            views.update(views_of(bucket, array, self._leaves))
        self.gradient_views = [views[leaf] for leaf in range(len(self._leaves))]
        self._parts = [
            make_part(self._comm, bucket, array, self._leaves, warm, lossy=self._codec.lossy)
            for bucket, array in zip(plan.buckets, self._buckets, strict=True)
        ]
        self.load_residuals(kept)
        self._ready = np.zeros(len(self._leaves), dtype=np.bool_)
        self._reset_launches()
        self.generation += 1

    def _reset_launches(self) -> None:
        self._missing = [len(bucket.slots) for bucket in self._plan.buckets]
        self._launched = 0
        self._exchanges: list[Exchange] = []

    def _adopt_order(self) -> None:
        """Plans anew by rank 0's order; leaves that it did not see come last."""
        order = self._whole_order(self._comm.broadcast_object(self._observed, root=0))
        if self._plan_buckets(order) != self._plan:
            self._install(order)
        self._order = order

    def _whole_order(self, seen: Sequence[int]) -> list[int]:
        there = set(seen)
        return [*seen, *(i for i in reversed(range(len(self._leaves))) if i not in there)]

    def _launch_complete(self) -> None:
        while self._launched < len(self._missing) and self._missing[self._launched] == 0:
            part = self._parts[self._launched]
            scale = (self._hint or 1.0) * _power_of_two(self._loss_scale)
            self._exchanges.append(Exchange(self._codec, part, scale, self.equal_weights))
            self._launched += 1

    def _agree(self, result: BatchResult) -> None:
        total = reduce_result(self._comm, result)
        self._names = sorted(total.metrics)
        self._hint = _power_of_two(total.weight)

    def _tail(self, result: BatchResult, stop: bool, serving: bool) -> NDArray[np.float64]:
        names_at = _FIXED + len(self._leaves)
        tail = np.zeros(names_at + len(self._names))
        tail[_WEIGHT] = result.weight
        tail[_LOSS] = result.loss
        tail[_STOP] = stop
        tail[_ACTIVE] = not serving
        tail[_NEW_NAMES] = not set(result.metrics) <= set(self._names)
        tail[_FIXED:names_at] = self._used
        tail[names_at:] = [result.metrics.get(name, 0.0) for name in self._names]
        return tail

    def _read_tail(self, tail: NDArray[np.float64], result: BatchResult) -> BatchResult:
        if tail[_NEW_NAMES] > 0:
            total = reduce_result(self._comm, result)
            self._names = sorted({*self._names, *total.metrics})
            return total
        values = tail[_FIXED + len(self._leaves) :]
        metrics = {name: float(v) for name, v in zip(self._names, values, strict=True)}
        return BatchResult(float(tail[_WEIGHT]), float(tail[_LOSS]), metrics)

    def _average(self, weight: float) -> None:
        """Divides the sums by the total weight and the loss scale."""
        divisor = weight
        if self.equal_weights:  # a plain exchange has divided by the number of ranks
            divisor = self._comm.world_size if self._codec.lossy else 1
        divisor *= self._loss_scale
        if divisor > 0 and divisor != 1:
            for bucket in self._buckets:
                bucket /= bucket.dtype.type(divisor)


def _power_of_two(weight: float) -> float:
    """The nearest power of two, by which scaling is exact; 0 for no weight."""
    return 2.0 ** round(math.log2(weight)) if weight > 0 else 0.0
