"""A training run as a checkpoint: what goes in, and how it is taken up again.

Shared by all ranks: the adapter's weights, buffers and optimizer, the sampler, the history, and the
sums of the epoch under way. Each rank's own: the strategy's state (residuals of lossy codecs, loss
scale) and the random number generators (Python's, NumPy's and the framework's). On another number
of ranks each rank up to the old number takes up its own part, and the others start theirs afresh.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpidp.training import checkpoint
from mpidp.training.adapter import HasRandomState
from mpidp.training.checkpoint import CheckpointError
from mpidp.training.reports import EpochReport, Running, TrainingReport

if TYPE_CHECKING:
    from mpidp.communicator import Communicator
    from mpidp.strategies.base import Strategy
    from mpidp.training.adapter import Adapter
    from mpidp.training.sampler import GlobalBatchSampler

_KIND = "mpidp.Trainer"
_ADAPTER, _STRATEGY, _RANDOM, _FRAMEWORK = "adapter.", "strategy.", "random.", "framework."


def save(
    comm: Communicator,
    directory: str | Path,
    adapter: Adapter,
    strategy: Strategy,
    sampler: GlobalBatchSampler,
    report: TrainingReport,
    running: Running,
    keep: int,
) -> Path:
    """Writes a checkpoint of the run. Collective. Raises `CheckpointError` on every rank."""
    state = adapter.state_dict()
    meta = {
        "kind": _KIND,
        "step": report.steps,
        "scalars": {k: v for k, v in state.items() if not isinstance(v, np.ndarray)},
        "sampler": sampler.state_dict(),
        "epochs": [asdict(epoch) for epoch in report.epochs if epoch.complete],
        "running": running.to_json(),
    }
    own = _prefixed(_STRATEGY, strategy.state_dict())
    own.update(_prefixed(_RANDOM, random_state()))
    if isinstance(adapter, HasRandomState):
        own.update(_prefixed(_FRAMEWORK, adapter.random_state()))
    arrays = {k: v for k, v in state.items() if isinstance(v, np.ndarray)}
    return checkpoint.save(
        comm,
        directory,
        _prefixed(_ADAPTER, arrays),
        meta,
        per_rank=own,
        step=report.steps,
        keep=keep,
    )


def resume(
    comm: Communicator,
    directory: str | Path,
    adapter: Adapter,
    strategy: Strategy,
    sampler: GlobalBatchSampler,
) -> tuple[TrainingReport, Running]:
    """Takes up the newest whole checkpoint. Collective.

    Raises `CheckpointError` where there is none or it is of another model or strategy, and
    `InvalidArgumentError` where it is of another data order; each on every rank.
    """
    loaded = checkpoint.load(comm, directory)
    meta = loaded.meta
    if meta.get("kind") != _KIND:
        raise CheckpointError(f"{loaded.path} was not written by a Trainer")
    sampler.load_state_dict(meta["sampler"])
    state = {**_stripped(_ADAPTER, loaded.arrays), **meta["scalars"]}
    fault = None
    try:
        adapter.load_state_dict(state)
        strategy.load_state_dict(_stripped(_STRATEGY, loaded.per_rank))
        if loaded.per_rank:
            load_random_state(_stripped(_RANDOM, loaded.per_rank))
            if isinstance(adapter, HasRandomState):
                adapter.load_random_state(_stripped(_FRAMEWORK, loaded.per_rank))
    except Exception as error:  # the parts differ by rank, so perhaps not all of them fail
        fault = f"{type(error).__name__}: {error}"
    faults = [one for one in comm.all_gather_object(fault) if one is not None]
    if faults:
        raise CheckpointError(f"{loaded.path} does not fit this model and strategy: {faults[0]}")
    report = TrainingReport(
        epochs=[EpochReport(**epoch) for epoch in meta["epochs"]], steps=int(meta["step"])
    )
    return report, Running.from_json(meta["running"])


def random_state() -> dict[str, NDArray[Any]]:
    """The state of Python's and NumPy's global generators, as arrays."""
    version, internal, next_gauss = random.getstate()
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    assert name == "MT19937"
    return {
        "python": np.array([version, *internal], dtype=np.int64),
        "python_gauss": np.array([] if next_gauss is None else [next_gauss], dtype=np.float64),
        "numpy": np.array([*keys, position, has_gauss], dtype=np.int64),
        "numpy_gauss": np.array([gauss], dtype=np.float64),
    }


def load_random_state(state: Mapping[str, NDArray[Any]]) -> None:
    """Restores what `random_state` gave."""
    version, *internal = state["python"].tolist()
    gauss = state["python_gauss"].tolist()
    random.setstate((version, tuple(internal), gauss[0] if gauss else None))
    *keys, position, has_gauss = state["numpy"].tolist()
    np.random.set_state(
        (
            "MT19937",
            np.array(keys, dtype=np.uint32),
            position,
            has_gauss,
            float(state["numpy_gauss"][0]),
        )
    )


def _prefixed(prefix: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {prefix + name: value for name, value in arrays.items()}


def _stripped(prefix: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    return {name[len(prefix) :]: v for name, v in arrays.items() if name.startswith(prefix)}
