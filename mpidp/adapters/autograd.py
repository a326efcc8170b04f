"""The adapter for HIPS autograd: models as functions of a dictionary of NumPy arrays.

def loss(params, batch):                      # -> (sum of losses, number of samples)
...
adapter = AutogradAdapter(params, loss, SGD(0.1, momentum=0.9))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from autograd.core import make_vjp
from autograd.extend import vspace
from numpy.typing import NDArray

from mpidp.adapters.optimizers import Optimizer
from mpidp.training.adapter import BatchResult, Leaf, State

Parameters = dict[str, NDArray[Any]]


class AutogradAdapter:
    """An `mpidp.training.adapter.Adapter` over HIPS autograd.

    `params` maps names to floating arrays; the adapter copies them. `loss(params, batch)` gives
    the sum of the losses, differentiable, and the number of samples. `metrics(params, batch)`, if
    given, gives further sums over the samples. `batch_size(batch)` gives the number of samples
    without computing (default: the length of the batch's first array), so that empty batches never
    reach `loss`.

    autograd hands out all gradients at the end of a backward; they are reported in the reverse
    order of registration, which is the order in which they would have come.
    """

    def __init__(
        self,
        params: Mapping[str, NDArray[Any]],
        loss: Callable[[Parameters, Any], tuple[Any, float]],
        optimizer: Optimizer,
        *,
        metrics: Callable[[Parameters, Any], Mapping[str, float]] | None = None,
        batch_size: Callable[[Any], int] | None = None,
    ) -> None:
        self.params: Parameters = {name: np.array(value) for name, value in params.items()}
        self.optimizer = optimizer
        self._names = list(self.params)
        self._loss = loss
        self._metrics = metrics
        self._batch_size = batch_size or (lambda batch: len(batch[0]))
        self._gradients: Sequence[NDArray[Any]] | None = None
        self._callback: Callable[[int], None] | None = None

    def leaves(self) -> Sequence[Leaf]:
        """See `Adapter.leaves`."""
        return [Leaf(name, value.shape, value.dtype.name) for name, value in self.params.items()]

    def read_leaf(self, index: int) -> NDArray[Any]:
        """See `Adapter.read_leaf`; a view."""
        return self.params[self._names[index]]

    def write_leaf(self, index: int, value: NDArray[Any]) -> None:
        """See `Adapter.write_leaf`."""
        self.params[self._names[index]][...] = value

    def bind_gradients(self, views: Sequence[NDArray[Any]] | None) -> None:
        """See `Adapter.bind_gradients`."""
        self._gradients = views

    def on_gradient_ready(self, callback: Callable[[int], None] | None) -> None:
        """See `Adapter.on_gradient_ready`."""
        self._callback = callback

    def compute_gradients(self, batch: Any) -> BatchResult:
        """See `Adapter.compute_gradients`."""
        if self._batch_size(batch) == 0:
            return BatchResult()
        if self._gradients is None:
            raise RuntimeError("bind_gradients() comes before compute_gradients()")
        weight = 0.0

        def total_loss(params: Parameters) -> Any:
            nonlocal weight
            total, weight = self._loss(params, batch)
            return total

        backward, loss = make_vjp(total_loss, self.params)
        gradients = backward(vspace(loss).ones())
        for index in reversed(range(len(self._names))):
            self._gradients[index][...] += gradients[self._names[index]]
            if self._callback is not None:
                self._callback(index)
        metrics = self._metrics(self.params, batch) if self._metrics is not None else {}
        return BatchResult(float(weight), float(loss), metrics)

    def evaluate(self, batch: Any) -> BatchResult:
        """See `Adapter.evaluate`."""
        if self._batch_size(batch) == 0:
            return BatchResult()
        loss, weight = self._loss(self.params, batch)
        metrics = self._metrics(self.params, batch) if self._metrics is not None else {}
        return BatchResult(float(weight), float(loss), metrics)

    def apply_gradients(self, learning_rate: float | None = None) -> None:
        """See `Adapter.apply_gradients`."""
        if self._gradients is None:
            raise RuntimeError("bind_gradients() comes before apply_gradients()")
        if learning_rate is not None:
            self.optimizer.learning_rate = learning_rate
        self.optimizer.step(list(self.params.values()), self._gradients)

    def state_dict(self) -> State:
        """See `Adapter.state_dict`."""
        state: State = {f"params.{name}": value.copy() for name, value in self.params.items()}
        for name, value in self.optimizer.state_dict().items():
            state[f"optimizer.{name}"] = value
        return state

    def load_state_dict(self, state: State) -> None:
        """See `Adapter.load_state_dict`."""
        for name, value in self.params.items():
            loaded = np.asarray(state[f"params.{name}"])
            if loaded.shape != value.shape or loaded.dtype != value.dtype:
                raise ValueError(
                    f"parameter {name} is {value.dtype}{list(value.shape)}, "
                    f"but the state has {loaded.dtype}{list(loaded.shape)}"
                )
            value[...] = loaded
        prefix = "optimizer."
        self.optimizer.load_state_dict(
            {name[len(prefix) :]: v for name, v in state.items() if name.startswith(prefix)}
        )
