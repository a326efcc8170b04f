"""Fixtures of the conformance suite: the communicators, and every adapter that is installed."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from kits import KITS
from mpi4py import MPI

import mpidp
from agreement import pytest_pyfunc_call  # noqa: F401 (pytest finds the hook here)


@pytest.fixture(scope="session")
def comm():
    """All ranks."""
    with mpidp.Communicator(timeout=60) as communicator:
        yield communicator


@pytest.fixture(scope="session")
def alone():
    """This rank by itself: the single process that the others are compared with."""
    with mpidp.Communicator(MPI.COMM_SELF, timeout=60) as communicator:
        yield communicator


@pytest.fixture(params=sorted(KITS))
def kit(request):
    """One framework's way to build a model; skipped where the framework is not installed."""
    return KITS[request.param]()
