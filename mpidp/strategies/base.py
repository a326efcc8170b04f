"""The strategy protocol: when and what the ranks exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

from mpidp.training.adapter import Adapter, BatchResult

if TYPE_CHECKING:
    from mpidp.communicator import Communicator


@dataclass(frozen=True)
class StepReport:
    """One step; the same on all ranks but for `wait_seconds`.

    `result` is summed over all ranks. `applied` is False where the step was skipped. `stop` tells
    that some rank asked to stop. `gradient_norm` is that of the averaged gradient before clipping.
    `active` is the number of ranks that had not run out of data. `loss_scale` is what this step
    used.
    """

    result: BatchResult
    applied: bool
    stop: bool
    gradient_norm: float
    wire_bytes: int
    wait_seconds: float
    active: int = 1
    loss_scale: float = 1.0


class Strategy(Protocol):
    """Runs the steps of a training run on one rank."""

    def attach(self, adapter: Adapter, comm: Communicator) -> None:
        """Before the first step, with equal replicas on all ranks. Collective."""

    def step(
        self, batches: Sequence[Any], *, learning_rate: float | None = None, stop: bool = False
    ) -> StepReport:
        """One step on this rank's micro-batches (possibly empty ones). Collective."""

    def state_dict(self) -> Mapping[str, NDArray[Any]]:
        """This rank's state, beyond the adapter's."""

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restores what `state_dict` gave on this rank; an empty mapping starts afresh.

        Collective: what must be equal on all ranks is rank 0's.
        """

    def close(self) -> None:
        """Gives the adapter its gradients' memory back. Twice is fine."""
