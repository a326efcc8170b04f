"""`TorchAdapter`: a PyTorch module and its optimizer, for the Trainer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpidp.adapters.torch.tensors import as_array, as_tensor, leaf_of
from mpidp.training.adapter import BatchResult, Leaf, State


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
        return [leaf_of(name, parameter) for name, parameter in self._named]

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

    def random_state(self) -> Mapping[str, NDArray[Any]]:
        """PyTorch's own generator, which draws dropout."""
        return {"cpu": torch.get_rng_state().numpy()}

    def load_random_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restores what `random_state` gave."""
        torch.set_rng_state(torch.from_numpy(np.array(state["cpu"])))

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
