"""Which samples a rank works on: global batches, cut into one part for each rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mpidp import _core
from mpidp.errors import InvalidArgumentError


class Dataset(Protocol):
    """Samples by number: `dataset[indices]` is the batch of those samples, in that order."""

    def __len__(self) -> int:
        """Samples."""

    def __getitem__(self, indices: NDArray[Any]) -> Any:
        """A batch, as the adapter takes it; empty for no indices."""


class GlobalBatchSampler:
    """Yields this rank's part of every global batch of an epoch, as arrays of sample numbers.

    Each epoch visits each of `num_samples` samples exactly once: nothing is padded or repeated, and
    nothing dropped unless `drop_last` leaves out the last, smaller batch. The global order depends
    on (seed, epoch) alone, not on `world_size`; a global batch is cut into `world_size` contiguous
    parts whose sizes differ by one at most, some of them empty where samples are few.

    Iterating goes from the current position to the end of the epoch, and then on to the next epoch
    by itself. The state is two numbers and does not depend on `world_size`: a run resumed in the
    middle of an epoch on another number of ranks goes on with the very next global batch.

        sampler = GlobalBatchSampler(1797, 128, rank=comm.rank, world_size=comm.world_size)
        for indices in sampler:                   # one epoch
            batch = data[indices]
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        rank: int,
        world_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        if num_samples < 0 or batch_size < 1 or not 0 <= rank < world_size or seed < 0:
            raise InvalidArgumentError(
                f"num_samples={num_samples}, batch_size={batch_size}, rank={rank} of "
                f"{world_size}, seed={seed}: need num_samples >= 0, batch_size >= 1, "
                "0 <= rank < world_size and seed >= 0"
            )
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.epoch = 0
        self._position = 0  # global batches of this epoch that were handed out

    def __len__(self) -> int:
        """Global batches of an epoch."""
        whole, rest = divmod(self.num_samples, self.batch_size)
        return whole + (1 if rest and not self.drop_last else 0)

    @property
    def batches_left(self) -> int:
        """Global batches until the epoch ends."""
        return len(self) - self._position

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        order = self._order()
        while self._position < len(self):
            batch = order[self._position * self.batch_size :][: self.batch_size]
            offset, count = _core.chunk_of(len(batch), self.world_size, self.rank)
            # Counted before it is worked on: a checkpoint after a step must not repeat it.
            self._position += 1
            yield batch[offset : offset + count]
        self.epoch += 1
        self._position = 0

    def _order(self) -> NDArray[np.int64]:
        if not self.shuffle:
            return np.arange(self.num_samples, dtype=np.int64)
        return np.random.default_rng((self.seed, self.epoch)).permutation(self.num_samples)

    def state_dict(self) -> dict[str, int]:
        """Where the sampler stands, and what the numbers mean."""
        return {
            "epoch": self.epoch,
            "position": self._position,
            "num_samples": self.num_samples,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
            "drop_last": int(self.drop_last),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state`. Raises InvalidArgumentError where it is of another data order."""
        own = self.state_dict()
        differing = [
            f"{name} is {own[name]}, was {state.get(name)}"
            for name in own
            if name not in ("epoch", "position") and state.get(name) != own[name]
        ]
        if differing:
            raise InvalidArgumentError(
                f"the checkpoint's sampler does not fit: {'; '.join(differing)}"
            )
        self.epoch = int(state["epoch"])
        self._position = int(state["position"])
