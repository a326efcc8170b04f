"""Optimizers on NumPy arrays, for frameworks that bring none.

The update rules are those of PyTorch, so that a run can be compared with one there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Arrays = Sequence[NDArray[Any]]


class Optimizer(Protocol):
    """Updates parameters in place and keeps its state as named arrays and numbers."""

    learning_rate: float

    def step(self, parameters: Arrays, gradients: Arrays) -> None:
        """Updates `parameters` in place; arrays in the same order at every call."""

    def state_dict(self) -> dict[str, Any]:
        """Enough to go on bit for bit."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave."""


class SGD:
    """Stochastic gradient descent with momentum (Polyak) and L2 weight decay.

    v <- momentum * v + g + weight_decay * w;  w <- w - learning_rate * v
    """

    def __init__(
        self, learning_rate: float = 0.1, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.weight_decay = weight_decay
        self._velocity: list[NDArray[Any]] = []

    def step(self, parameters: Arrays, gradients: Arrays) -> None:
        """See `Optimizer.step`."""
        if self.momentum and not self._velocity:
            self._velocity = [np.zeros_like(parameter) for parameter in parameters]
        for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            update = gradient
            if self.weight_decay:
                update = update + parameter.dtype.type(self.weight_decay) * parameter
            if self.momentum:
                velocity = self._velocity[index]
                velocity *= parameter.dtype.type(self.momentum)
                velocity += update
                update = velocity
            parameter -= parameter.dtype.type(self.learning_rate) * update

    def state_dict(self) -> dict[str, Any]:
        """See `Optimizer.state_dict`."""
        state: dict[str, Any] = {"learning_rate": self.learning_rate}
        state.update((f"velocity.{i}", array.copy()) for i, array in enumerate(self._velocity))
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Optimizer.load_state_dict`."""
        self.learning_rate = float(state["learning_rate"])
        self._velocity = _numbered(state, "velocity")


class Adam:
    """Adam (Kingma and Ba 2015, algorithm 1), with decoupled weight decay where asked (AdamW)."""

    def __init__(
        self,
        learning_rate: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self.learning_rate = learning_rate
        self.beta1 = beta1
        self.beta2 = beta2
        self.epsilon = epsilon
        self.weight_decay = weight_decay
        self._steps = 0
        self._mean: list[NDArray[Any]] = []
        self._square: list[NDArray[Any]] = []

    def step(self, parameters: Arrays, gradients: Arrays) -> None:
        """See `Optimizer.step`."""
        if not self._mean:
            self._mean = [np.zeros_like(parameter) for parameter in parameters]
            self._square = [np.zeros_like(parameter) for parameter in parameters]
        self._steps += 1
        mean_scale = 1 - self.beta1**self._steps
        square_scale = 1 - self.beta2**self._steps
        for parameter, gradient, mean, square in zip(
            parameters, gradients, self._mean, self._square, strict=True
        ):
            number = parameter.dtype.type
            mean += number(1 - self.beta1) * (gradient - mean)
            square += number(1 - self.beta2) * (gradient * gradient - square)
            if self.weight_decay:
                parameter *= number(1 - self.learning_rate * self.weight_decay)
            scale = np.sqrt(square / number(square_scale)) + number(self.epsilon)
            parameter -= number(self.learning_rate / mean_scale) * mean / scale

    def state_dict(self) -> dict[str, Any]:
        """See `Optimizer.state_dict`."""
        state: dict[str, Any] = {"learning_rate": self.learning_rate, "steps": self._steps}
        state.update((f"mean.{i}", array.copy()) for i, array in enumerate(self._mean))
        state.update((f"square.{i}", array.copy()) for i, array in enumerate(self._square))
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Optimizer.load_state_dict`."""
        self.learning_rate = float(state["learning_rate"])
        self._steps = int(state["steps"])
        self._mean = _numbered(state, "mean")
        self._square = _numbered(state, "square")


def _numbered(state: Mapping[str, Any], prefix: str) -> list[NDArray[Any]]:
    count = sum(name.startswith(f"{prefix}.") for name in state)
    return [np.array(state[f"{prefix}.{i}"]) for i in range(count)]
