"""The adapter protocol: what the trainer needs from an autograd framework.

An adapter holds one replica of a model and its optimizer. The reducer lends it memory for the
gradients, is told when each is ready, averages them over all ranks in place, and the adapter then
applies them. Everything that is summed over ranks is a sum over samples (or tokens), never a mean,
so that uneven and empty batches weigh what they should.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

# What `state_dict` holds: arrays by name, and plain numbers or strings.
State = dict[str, "NDArray[Any] | int | float | str"]


@dataclass(frozen=True)
class Leaf:
    """One trainable array: its unique name, shape, dtype name and device."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str = "cpu"

    @property
    def count(self) -> int:
        """Elements."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class BatchResult:
    """What one local batch gave, as sums over its samples or tokens.

    `weight` is how many there were (0 for an empty batch), `loss` the sum of their losses, and
    `metrics` further sums, such as the number of correct answers. Add results with `+`.
    """

    weight: float = 0.0
    loss: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: BatchResult) -> BatchResult:
        names = [*self.metrics, *(name for name in other.metrics if name not in self.metrics)]
        return BatchResult(
            self.weight + other.weight,
            self.loss + other.loss,
            {name: self.metrics.get(name, 0.0) + other.metrics.get(name, 0.0) for name in names},
        )


@runtime_checkable
class Adapter(Protocol):
    """One replica of a model and its optimizer, in some framework."""

    def leaves(self) -> Sequence[Leaf]:
        """The trainable arrays in registration order, which is the same on all ranks."""

    def read_leaf(self, index: int) -> NDArray[Any]:
        """The current value of leaf `index`; a view or a copy."""

    def write_leaf(self, index: int, value: NDArray[Any]) -> None:
        """Sets leaf `index` to `value`, of its shape and dtype."""

    def bind_gradients(self, views: Sequence[NDArray[Any]] | None) -> None:
        """Lends memory for the gradients: one array for each leaf, of its shape and dtype.

        The adapter accumulates gradients there and reads them there in `apply_gradients`. None
        takes the memory back.
        """

    def on_gradient_ready(self, callback: Callable[[int], None] | None) -> None:
        """`callback(i)` is to run when leaf i's gradient of the running backward is complete.

        It runs at most once for each leaf and backward, on the thread that runs the backward; what
        it raises must reach the caller of `compute_gradients`. None takes the callback away.
        """

    def compute_gradients(self, batch: Any) -> BatchResult:
        """Forward and backward. Adds the gradient of the summed loss to the lent memory.

        Leaves that this batch does not use get no gradient and no callback. An empty batch gives
        `BatchResult()` and no callbacks.
        """

    def evaluate(self, batch: Any) -> BatchResult:
        """Loss and metrics of a batch, without gradients."""

    def apply_gradients(self, learning_rate: float | None = None) -> None:
        """One optimizer step with the gradients in the lent memory; None keeps the rate."""

    def state_dict(self) -> State:
        """Weights, buffers and optimizer state, by unique names; enough to go on bit for bit."""

    def load_state_dict(self, state: State) -> None:
        """Restores what `state_dict` gave. Raises KeyError or ValueError where it does not fit."""


@runtime_checkable
class HasRandomState(Protocol):
    """What an adapter has besides, if its framework has random number generators of its own.

    The trainer puts each rank's state into its checkpoints, so that dropout and the like go on
    where they were.
    """

    def random_state(self) -> Mapping[str, NDArray[Any]]:
        """This rank's generators' state, as arrays by name."""

    def load_random_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restores what `random_state` gave."""


def broadcast_state(adapter: Adapter, comm: Any, root: int = 0) -> None:
    """Gives every rank the root's weights, buffers and optimizer state. Collective.

    Replicas that start from different seeds never meet again, so training begins with this.
    """
    adapter.load_state_dict(
        comm.broadcast_object(adapter.state_dict() if comm.rank == root else None, root=root)
    )
