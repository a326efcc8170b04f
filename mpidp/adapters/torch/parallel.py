"""`data_parallel`: a module whose backward averages its gradients over the ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_iter

from mpidp.adapters.torch.batchnorm import SyncBatchNorm
from mpidp.adapters.torch.sparse import all_reduce_sparse, sparse_parameters
from mpidp.adapters.torch.tensors import as_tensor, broadcast_module, broadcast_tensors, leaf_of
from mpidp.errors import InvalidArgumentError, MpidpError
from mpidp.reducer import Reducer
from mpidp.reducer.compression import codec_named
from mpidp.reducer.plan import DEFAULT_BUCKET_BYTES, DEFAULT_FIRST_BUCKET_BYTES
from mpidp.training.adapter import BatchResult

if TYPE_CHECKING:
    from mpidp.communicator import Communicator


def data_parallel(
    model: torch.nn.Module,
    comm: Communicator,
    *,
    compression: str | None = None,
    broadcast_buffers: bool = True,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    first_bucket_bytes: int = DEFAULT_FIRST_BUCKET_BYTES,
) -> DataParallel:
    """Wraps `model` so that every backward averages its gradients over the ranks. Collective.

    All ranks start from rank 0's parameters and buffers. `compression` names a codec (see
    mpidp.reducer.compression). With `broadcast_buffers` rank 0's buffers, such as the statistics of
    batch normalization, are given to all ranks before each forward in training mode.

    Raises `MismatchError` on every rank where the ranks' parameters differ.
    """
    return DataParallel(
        model, comm, compression, broadcast_buffers, bucket_bytes, first_bucket_bytes
    )


class DataParallel(torch.nn.Module):
    """What `data_parallel` returns: calls `module`, and exchanges gradients in its backward.

    By default the gradients of the ranks count alike, as in DistributedDataParallel: the result is
    the gradient of the whole batch where the loss is a mean and all ranks have equally many
    samples. `backward(loss, weight=n)` weighs each rank and micro-batch by its n samples or tokens:
    then it is exact for uneven batches and accumulation too.

    Every backward outside `no_sync()` is collective, and must reach at least one parameter on each
    rank. A parameter that no rank's backward reached keeps its gradient None, as in one process.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        comm: Communicator,
        compression: str | None,
        broadcast_buffers: bool,
        bucket_bytes: int,
        first_bucket_bytes: int,
    ) -> None:
        super().__init__()
        self.module = module
        self._comm = comm
        self._compression = compression
        self._broadcast_buffers = broadcast_buffers
        self._bucket_bytes = bucket_bytes
        self._first_bucket_bytes = first_bucket_bytes
        self._synchronize = True
        # The callback at the end of the running backward. The engine alone holds it: once a
        # backward has failed it is gone without having been called.
        self._running: weakref.ref[_EndOfBackward] | None = None
        self._reached = False  # the running backward has given some parameter a gradient
        self._failed = False  # the exchange at the end of a backward raised
        self._exchanged = False  # gradients that are not None are averages already
        self._weight = 0.0  # of the backwards since the last exchange, if they were weighed
        self._weighed = False
        self._aside: dict[int, torch.Tensor] = {}  # averages that this step adds to
        self._handles: list[Any] = []
        self._trainable: list[tuple[str, torch.nn.Parameter]] = []
        self._sparse: list[torch.nn.Parameter] = []
        broadcast_module(module, comm)
        self._attach()

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        training = torch.is_grad_enabled()
        if training:
            self._prepare()
        output = self.module(*args, **kwargs)
        if training:
            # The outermost backward passes the output first, whatever checkpointing nests in it.
            for tensor in tree_iter(output):
                if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                    tensor.register_hook(self._passing_output)
        return output

    def backward(self, loss: torch.Tensor, *, weight: float) -> None:
        """The backward of a loss that is a mean over `weight` samples or tokens of this rank.

        After the last backward of a step each `.grad` is the gradient of the mean over all samples
        of all ranks and micro-batches. A rank without samples passes a loss of zero that depends on
        a parameter, and the weight 0. Do not mix with plain `loss.backward()` in one step.

        With a gradient scaler pass `scaler.scale(loss)`.
        """
        if not weight >= 0:
            raise InvalidArgumentError(f"weight={weight!r}: expected a number >= 0")
        self._drop_failed_step()
        if not self._weighed:
            self._set_averages_aside()
        self._weight += weight
        self._weighed = True
        try:
            (loss * weight).backward()
        except Exception:
            self._failed = True
            raise

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here only accumulate; the next one outside exchanges."""
        before, self._synchronize = self._synchronize, False
        try:
            yield
        finally:
            self._synchronize = before

    @property
    def reducer(self) -> Reducer:
        """The buckets in use, for inspection."""
        return self._reducer

    def detach(self) -> torch.nn.Module:
        """Removes the hooks and gives back the module, whose gradients are then its own again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for _, parameter in self._trainable:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
        return self.module

    def _attach(self) -> None:
        named = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        sparse = sparse_parameters(self.module)
        self._trainable = [(name, p) for name, p in named if id(p) not in sparse]
        self._sparse = [p for _, p in named if id(p) in sparse]
        self._reducer = Reducer(
            self._comm,
            [leaf_of(name, p) for name, p in self._trainable],
            codec=codec_named(self._compression),
            bucket_bytes=self._bucket_bytes,
            first_bucket_bytes=self._first_bucket_bytes,
            rebuild=False,
        )
        self._views = [as_tensor(view) for view in self._reducer.gradient_views]
        self._addresses = [view.data_ptr() for view in self._views]
        for index, (_, parameter) in enumerate(self._trainable):
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._hook_of(index)))
        for parameter in self._sparse:
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._reach))

    def _prepare(self) -> None:
        """Before a forward: new parameters get a place in the buckets, buffers are made equal."""
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpointed segment runs again, within a backward
        self._drop_failed_step()
        known = {id(p) for _, p in self._trainable} | {id(p) for p in self._sparse}
        if any(p.requires_grad and id(p) not in known for p in self.module.parameters()):
            self.detach()
            self._attach()
        if self._broadcast_buffers and self.training and self._synchronize:
            broadcast_tensors(
                (
                    buffer
                    for part in self.module.modules()
                    if not isinstance(part, SyncBatchNorm)  # its statistics are equal already
                    for buffer in part.buffers(recurse=False)
                ),
                self._comm,
            )

    def _hook_of(self, index: int) -> Callable[[torch.Tensor], None]:
        def gradient_is_ready(parameter: torch.Tensor) -> None:
            self._reach(parameter)
            self._move_into_bucket(index, parameter)
            self._reducer.mark_ready(index)

        return gradient_is_ready

    def _reach(self, parameter: torch.Tensor) -> None:
        """The running backward has given `parameter` a gradient."""
        if torch.is_grad_enabled():
            raise MpidpError(
                "backward(create_graph=True) cannot be exchanged: the graph would not contain the "
                "exchange. Use torch.autograd.grad(..., create_graph=True) for the inner gradient, "
                "and a plain backward() for the outer"
            )
        if self._is_abandoned():  # and no forward came in between
            assert parameter.grad is not None
            gradient = parameter.grad.clone()
            self._drop_failed_step()
            parameter.grad = gradient
        self._begin()
        if not self._reached:
            self._reached = True
            self._reducer.equal_weights = not self._weighed
            self._reducer.begin(synchronize=self._synchronize)

    def _passing_output(self, _: torch.Tensor) -> None:
        if self._is_abandoned():
            self._drop_failed_step()
        self._begin()

    def _begin(self) -> None:
        if self._running is None:
            end = _EndOfBackward(self)
            self._running = weakref.ref(end)
            torch.autograd.Variable._execution_engine.queue_callback(end)

    def _move_into_bucket(self, index: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            self._views[index].zero_()
        elif gradient.is_sparse:
            self._views[index].zero_().add_(gradient)
            parameter.grad = self._views[index]
        elif gradient.data_ptr() != self._addresses[index]:
            # Fresh from the backward, since the loop had set it to None. Copying it is cheaper
            # than to lend zeroed memory before, which the backward would read and add to.
            self._views[index].copy_(gradient)
            parameter.grad = self._views[index]

    def _is_abandoned(self) -> bool:
        """Whether a backward has raised since, so that its end was never reached."""
        return self._failed or (self._running is not None and self._running() is None)

    def _drop_failed_step(self) -> None:
        """After a backward that raised: drops its gradients; the next step starts anew."""
        if not self._is_abandoned():
            return
        self._reducer.zero()  # waits for what was launched, which writes into the buckets
        for parameter in self.module.parameters():
            parameter.grad = None
        self._running, self._reached, self._failed, self._exchanged = None, False, False, False
        self._weight, self._weighed = 0.0, False
        self._aside.clear()

    def _set_averages_aside(self) -> None:
        """Before the first weighed backward of a window: what an earlier one of this step gave.

        It is an average already, and must not be weighed and averaged again.
        """
        if not self._exchanged:
            return
        for parameter in self.module.parameters():
            gradient = parameter.grad
            if gradient is not None and (gradient.is_sparse or bool(gradient.any())):
                self._aside[id(parameter)] = gradient.clone()
                parameter.grad = None

    def _end_of_backward(self) -> None:
        self._running = None
        reached, self._reached = self._reached, False
        # torch.autograd.grad with respect to inputs passes outputs and reaches no parameter.
        if not reached or not self._synchronize:
            return
        try:
            self._exchange()
        except Exception:
            self._failed = True
            raise

    def _exchange(self) -> None:
        weight, weighed = self._weight, self._weighed
        self._weight, self._weighed = 0.0, False
        self._reducer.equal_weights = not weighed
        for index, (_, parameter) in enumerate(self._trainable):
            if parameter.grad is None or parameter.grad.data_ptr() != self._addresses[index]:
                self._move_into_bucket(index, parameter)  # not reached by this backward
        reduced = self._reducer.finish(BatchResult(weight if weighed else 1.0))
        self._reducer.forget_used()
        for index, (_, parameter) in enumerate(self._trainable):
            if parameter.grad is None and reduced.used[index]:
                parameter.grad = self._views[index]
        divisor = reduced.result.weight if weighed else float(self._comm.world_size)
        all_reduce_sparse(self._comm, self._sparse, divisor)
        for parameter in self.module.parameters():
            before = self._aside.pop(id(parameter), None)
            if before is not None:
                # In place where it can be: `.grad` stays a view of the bucket.
                if parameter.grad is None:
                    parameter.grad = before
                elif parameter.grad.is_sparse:
                    parameter.grad = (parameter.grad + before).coalesce()
                else:
                    parameter.grad += before
        self._exchanged = True


class _EndOfBackward:
    """What the autograd engine calls when a backward has succeeded."""

    def __init__(self, model: DataParallel) -> None:
        self._model = model

    def __call__(self) -> None:
        self._model._end_of_backward()
