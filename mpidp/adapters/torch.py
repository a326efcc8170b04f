"""PyTorch: `data_parallel` for your own loop, and `TorchAdapter` for the Trainer.

    import mpidp.adapters.torch as mt

    model = mt.data_parallel(model, comm)               # the four lines that change
    for x, y in loader_of_this_rank:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        model.backward(loss, weight=len(x))             # or loss.backward(), for equal batches
        optimizer.step()

Gradients live in the reducer's buckets: `.grad` of every parameter is a view of registered memory,
so there is no second copy, and the exchange of a bucket starts while the backward still runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpidp.errors import InvalidArgumentError, MpidpError
from mpidp.reducer import Reducer
from mpidp.reducer.compression import codec_named
from mpidp.reducer.plan import DEFAULT_BUCKET_BYTES, DEFAULT_FIRST_BUCKET_BYTES
from mpidp.training.adapter import BatchResult, Leaf, State

if TYPE_CHECKING:
    from mpidp.communicator import Communicator

_DTYPES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
}


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
        self._running = False  # a backward has begun and its end is not reached
        self._weight = 0.0  # of the backwards since the last exchange, if they were weighed
        self._handles: list[Any] = []
        self._trainable: list[tuple[str, torch.nn.Parameter]] = []
        broadcast_module(module, comm)
        self._attach()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        if torch.is_grad_enabled():
            self._prepare()
            if self._broadcast_buffers and self.training:
                for buffer in self.module.buffers():
                    _broadcast_tensor(buffer, self._comm)
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, *, weight: float) -> None:
        """The backward of a loss that is a mean over `weight` samples or tokens of this rank.

        After the last backward of a step each `.grad` is the gradient of the mean over all samples
        of all ranks and micro-batches. A rank without samples passes a loss of zero that depends on
        a parameter, and the weight 0. Do not mix with plain `loss.backward()` in one step.
        """
        if not weight >= 0:
            raise InvalidArgumentError(f"weight={weight!r}: expected a number >= 0")
        self._weight += weight
        self._weighed = True
        (loss * weight).backward()

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
        self._trainable = [
            (name, p) for name, p in self.module.named_parameters() if p.requires_grad
        ]
        self._reducer = Reducer(
            self._comm,
            [_leaf(name, p) for name, p in self._trainable],
            codec=codec_named(self._compression),
            bucket_bytes=self._bucket_bytes,
            first_bucket_bytes=self._first_bucket_bytes,
            rebuild=False,
        )
        self._views = [as_tensor(view) for view in self._reducer.gradient_views]
        self._weighed = False
        for index, (_, parameter) in enumerate(self._trainable):
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._hook_of(index)))

    def _prepare(self) -> None:
        """Before a forward: parameters that were unfrozen since get a place in the buckets."""
        known = {id(parameter) for _, parameter in self._trainable}
        if any(p.requires_grad and id(p) not in known for p in self.module.parameters()):
            self.detach()
            self._attach()

    def _hook_of(self, index: int) -> Callable[[torch.Tensor], None]:
        def gradient_is_ready(parameter: torch.Tensor) -> None:
            view = self._views[index]
            gradient = parameter.grad
            if gradient is not None and gradient.data_ptr() != view.data_ptr():
                # Fresh from the backward, since the loop had set it to None. Copying it is cheaper
                # than to lend zeroed memory before, which the backward would read and add to.
                view.copy_(gradient)
                parameter.grad = view
            if not self._running:
                self._running = True
                self._reducer.equal_weights = not self._weighed
                self._reducer.begin(synchronize=self._synchronize)
                torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
            self._reducer.mark_ready(index)

        return gradient_is_ready

    def _end_of_backward(self) -> None:
        self._running = False
        if not self._synchronize:
            return
        weight = self._weight if self._weighed else 1.0
        self._reducer.equal_weights = not self._weighed
        self._weight, self._weighed = 0.0, False
        for index, (_, parameter) in enumerate(self._trainable):
            if parameter.grad is None:  # not used on this rank
                self._views[index].zero_()
        reduced = self._reducer.finish(BatchResult(weight))
        self._reducer.forget_used()
        for index, (_, parameter) in enumerate(self._trainable):
            if parameter.grad is None and reduced.used[index]:
                parameter.grad = self._views[index]


class TorchAdapter:
    """An `mpidp.training.adapter.Adapter` over a PyTorch module and optimizer.

    `loss(model, batch)` gives the sum of the losses (a tensor), the number of samples or tokens,
    and further sums by name: `(loss_sum, weight, {"correct": 17.0})`. `batch_size(batch)` gives the
    number of samples without computing; by default the length of the batch's first item.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Callable[[torch.nn.Module, Any], tuple[torch.Tensor, float, Mapping[str, float]]],
        optimizer: torch.optim.Optimizer,
        *,
        batch_size: Callable[[Any], int] | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._loss = loss
        self._batch_size = batch_size or (lambda batch: len(batch[0]))
        self._named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._callback: Callable[[int], None] | None = None
        for index, (_, parameter) in enumerate(self._named):
            parameter.register_post_accumulate_grad_hook(self._hook_of(index))

    def leaves(self) -> Sequence[Leaf]:
        """See `Adapter.leaves`."""
        return [_leaf(name, parameter) for name, parameter in self._named]

    def read_leaf(self, index: int) -> NDArray[Any]:
        """See `Adapter.read_leaf`; a copy."""
        value: NDArray[Any] = as_array(self._named[index][1].detach()).copy()
        return value

    def write_leaf(self, index: int, value: NDArray[Any]) -> None:
        """See `Adapter.write_leaf`."""
        with torch.no_grad():
            self._named[index][1].copy_(as_tensor(np.asarray(value, order="C")))

    def bind_gradients(self, views: Sequence[NDArray[Any]] | None) -> None:
        """See `Adapter.bind_gradients`."""
        for index, (_, parameter) in enumerate(self._named):
            parameter.grad = None if views is None else as_tensor(views[index])

    def on_gradient_ready(self, callback: Callable[[int], None] | None) -> None:
        """See `Adapter.on_gradient_ready`."""
        self._callback = callback

    def compute_gradients(self, batch: Any) -> BatchResult:
        """See `Adapter.compute_gradients`."""
        if self._batch_size(batch) == 0:
            return BatchResult()
        self.model.train()
        loss, weight, metrics = self._loss(self.model, batch)
        loss.backward()
        return BatchResult(float(weight), float(loss.detach()), dict(metrics))

    def evaluate(self, batch: Any) -> BatchResult:
        """See `Adapter.evaluate`."""
        if self._batch_size(batch) == 0:
            return BatchResult()
        self.model.eval()
        with torch.no_grad():
            loss, weight, metrics = self._loss(self.model, batch)
        return BatchResult(float(weight), float(loss), dict(metrics))

    def apply_gradients(self, learning_rate: float | None = None) -> None:
        """See `Adapter.apply_gradients`."""
        if learning_rate is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
        self.optimizer.step()

    def state_dict(self) -> State:
        """See `Adapter.state_dict`."""
        state: State = {
            f"model.{name}": as_array(value.detach()).copy()
            for name, value in self.model.state_dict().items()
        }
        optimizer = self.optimizer.state_dict()
        state["optimizer.param_groups"] = json.dumps(optimizer["param_groups"])
        for number, entries in optimizer["state"].items():
            for name, value in entries.items():
                if value is not None:
                    tensor = torch.as_tensor(value)
                    state[f"optimizer.state.{number}.{name}"] = as_array(tensor).copy()
        return state

    def load_state_dict(self, state: State) -> None:
        """See `Adapter.load_state_dict`."""
        prefix = "model."
        own = self.model.state_dict()
        loaded = {}
        for name, value in own.items():
            found = as_tensor(np.asarray(state[prefix + name], order="C"))
            if found.shape != value.shape or found.dtype != value.dtype:
                raise ValueError(f"{name} does not fit: {found.dtype}{list(found.shape)}")
            loaded[name] = found
        self.model.load_state_dict(loaded)
        entries: dict[int, dict[str, torch.Tensor]] = {}
        prefix = "optimizer.state."
        for key, value in state.items():
            if key.startswith(prefix):
                number, _, name = key[len(prefix) :].partition(".")
                tensor = as_tensor(np.array(value))
                entries.setdefault(int(number), {})[name] = tensor
        groups = json.loads(str(state["optimizer.param_groups"]))
        self.optimizer.load_state_dict({"state": entries, "param_groups": groups})

    def _hook_of(self, index: int) -> Callable[[torch.Tensor], None]:
        def gradient_is_ready(parameter: torch.Tensor) -> None:
            if self._callback is not None:
                self._callback(index)

        return gradient_is_ready


def as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """A tensor on the memory of `array`."""
    if array.dtype.name == "bfloat16":  # NumPy's and PyTorch's do not know each other
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """A NumPy array on the memory of a CPU tensor."""
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        tensor_bits: NDArray[Any] = tensor.view(torch.int16).numpy()
        return tensor_bits.view(ml_dtypes.bfloat16)
    array: NDArray[Any] = tensor.numpy()
    return array


def broadcast_module(module: torch.nn.Module, comm: Communicator, root: int = 0) -> None:
    """Gives every rank the root's parameters and buffers. Collective."""
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            _broadcast_tensor(tensor, comm, root)


def _broadcast_tensor(tensor: torch.Tensor, comm: Communicator, root: int = 0) -> None:
    with torch.no_grad():
        data = tensor.detach()
        if data.is_contiguous():
            comm.broadcast(data, root=root)
        else:
            dense = data.contiguous()
            comm.broadcast(dense, root=root)
            data.copy_(dense)


def _leaf(name: str, parameter: torch.nn.Parameter) -> Leaf:
    if parameter.device.type != "cpu":
        raise MpidpError(f"parameter {name} is on {parameter.device}: this build has no CUDA part")
    if parameter.dtype not in _DTYPES:
        raise InvalidArgumentError(f"parameter {name} has dtype {parameter.dtype}")
    return Leaf(name, tuple(parameter.shape), _DTYPES[parameter.dtype])
