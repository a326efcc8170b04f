"""Which device the GPU tests run on, and the hooks of the emulated one.

MPIDP_TEST_DEVICE is "emulated" (the default) or "cuda". The emulated device is built on first use
(tests/gpu/emulated/build.py). It runs the library's own kernels and keeps the promises that CUDA
makes, and no others. Where MPIDP_DEVICE_PLUGIN names a file, that is what is tested.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# The exact-valued inputs and the oracle are those of the host tests.
for folder in (HERE.parent / "mpi", HERE):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

COUNTERS = ("allocations", "pinned", "streams", "events", "mappings")
FAULTS = (
    "out_of_memory",
    "not_exportable",
    "ipc_export",
    "ipc_open",
    "ipc_event_open",
    "ipc_garbage",
    "launch",
    "drop_peer_waits",
    "drop_own_waits",
)


def pytest_configure(config: pytest.Config) -> None:
    """Name the plugin before any test loads one."""
    device = os.environ.get("MPIDP_TEST_DEVICE", "emulated")
    if device not in ("emulated", "cuda"):
        raise pytest.UsageError(f"MPIDP_TEST_DEVICE={device}: expected emulated or cuda")
    if device == "cuda" or os.environ.get("MPIDP_DEVICE_PLUGIN"):
        return
    from emulated.build import build

    os.environ["MPIDP_DEVICE_PLUGIN"] = str(build())


@pytest.fixture(scope="session")
def emulated() -> ctypes.CDLL:
    """The emulated device's own exports; the test is skipped on a real one."""
    from standin import runtime

    if runtime().name != "emulated":
        pytest.skip("needs the emulated device")
    library = runtime().library
    library.mpidp_emulated_set_fault.argtypes = (ctypes.c_char_p, ctypes.c_long)
    library.mpidp_emulated_counter.argtypes = (ctypes.c_char_p,)
    library.mpidp_emulated_counter.restype = ctypes.c_long
    return library


@pytest.fixture
def faults(emulated: ctypes.CDLL) -> Iterator[Callable[[str, bool], None]]:
    """Inject a fault of FAULTS into this process, or take it back; all are gone afterwards."""

    def inject(name: str, on: bool) -> None:
        assert name in FAULTS
        assert emulated.mpidp_emulated_set_fault(name.encode(), int(on)) == 0

    yield inject
    for name in FAULTS:
        inject(name, False)


@pytest.fixture
def counters(emulated: ctypes.CDLL) -> Callable[[], dict[str, int]]:
    """What this process holds of the emulated device."""

    def count() -> dict[str, int]:
        found = {name: emulated.mpidp_emulated_counter(name.encode()) for name in COUNTERS}
        assert min(found.values()) >= 0
        return found

    return count
