"""Fixtures of the GPU tests that run under mpiexec."""

from __future__ import annotations

import pytest
from mpi4py import MPI

import mpidp
from agreement import pytest_pyfunc_call  # noqa: F401 (pytest finds the hook here)
from mpidp.config import Config

TIMEOUT = 30.0

WIRINGS = {
    # One node, the best transport that works.
    "best": lambda rank: Config(timeout=TIMEOUT),
    # One node, through pinned memory, in segments so small that every array has several.
    "staged": lambda rank: Config(
        timeout=TIMEOUT, device_transport="staged", device_segment_bytes=4096
    ),
    # Emulated nodes of two ranks: staged, with messages between them.
    "nodes": lambda rank: Config(timeout=TIMEOUT, node_id=rank // 2, device_segment_bytes=16 << 10),
}


@pytest.fixture(scope="session")
def communicators():
    """One communicator for each way to be wired, made on first use."""
    made: dict[str, mpidp.Communicator] = {}

    def get(wiring: str) -> mpidp.Communicator:
        if wiring not in made:
            made[wiring] = mpidp.Communicator(config=WIRINGS[wiring](MPI.COMM_WORLD.rank))
        return made[wiring]

    yield get
    for communicator in reversed(made.values()):
        communicator.close()


@pytest.fixture
def comm(communicators):
    """One node, the best transport."""
    return communicators("best")


@pytest.fixture
def fresh_comm():
    """A communicator for tests that may break it."""
    with mpidp.Communicator(timeout=TIMEOUT) as communicator:
        yield communicator
