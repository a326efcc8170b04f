"""What every test run says about itself: which extension it tests, on which MPI, as which rank."""

from __future__ import annotations

import importlib.util

import pytest


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Name the extension and, under `--with-mpi`, the MPI, this rank and the world's size.

    Without `--with-mpi` MPI stays untouched: importing mpi4py.MPI would initialise it.
    """
    found = importlib.util.find_spec("mpidp._core")
    lines = [f"mpidp._core: {found.origin if found else 'not built'}"]
    if config.getoption("--with-mpi"):
        from mpi4py import MPI

        vendor, version = MPI.get_vendor()
        name = f"{vendor} {'.'.join(map(str, version))}"
        comm = MPI.COMM_WORLD
        lines.append(
            f"MPI: {name}, rank {comm.rank} of {comm.size}, thread level {MPI.Query_thread()}"
        )
    return lines


@pytest.fixture
def no_cuda_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build without the CUDA part, whatever this one has."""
    from mpidp import devices

    monkeypatch.setattr(devices, "find_plugin", lambda: None)
