"""MPI-based collectives and data-parallel training.

    from mpi4py import MPI
    import mpidp

    with mpidp.Communicator(MPI.COMM_WORLD) as comm:
        comm.all_reduce(x, op="mean")

The names below load on first use, so that `import mpidp` stays light and needs no MPI.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mpidp._extension_path import search_path
from mpidp.errors import (
    BuildMismatchError,
    ClosedError,
    CollectiveTimeoutError,
    CudaError,
    InvalidArgumentError,
    InvalidBufferError,
    MismatchError,
    MpidpError,
    MpiError,
    RankFailedError,
)

if TYPE_CHECKING:
    from mpidp import strategies
    from mpidp.communicator import Communicator
    from mpidp.config import Config
    from mpidp.training.trainer import Trainer
    from mpidp.work import Work

__path__ = search_path(__path__)

__version__ = "0.1.0"

__all__ = [
    "BuildMismatchError",
    "ClosedError",
    "CollectiveTimeoutError",
    "Communicator",
    "Config",
    "CudaError",
    "InvalidArgumentError",
    "InvalidBufferError",
    "MismatchError",
    "MpiError",
    "MpidpError",
    "RankFailedError",
    "Trainer",
    "Work",
    "strategies",
]

# Where each lazily loaded name lives; an empty attribute means the module itself.
_LAZY = {
    "Communicator": ("mpidp.communicator", "Communicator"),
    "Config": ("mpidp.config", "Config"),
    "Trainer": ("mpidp.training.trainer", "Trainer"),
    "Work": ("mpidp.work", "Work"),
    "strategies": ("mpidp.strategies", ""),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module_name, attribute = _LAZY[name]
    module = importlib.import_module(module_name)
    value = getattr(module, attribute) if attribute else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
