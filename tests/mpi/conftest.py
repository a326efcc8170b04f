"""Fixtures of the tests that run under mpiexec, and their common outcome on all ranks."""

from __future__ import annotations

import os

# Four bytes of shared memory or a message are all the same to BLAS threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from mpi4py import MPI

import mpidp
from agreement import pytest_pyfunc_call  # noqa: F401 (pytest finds the hook here)
from mpidp.config import Config

# Deadline of every collective: a rank that went astray fails the others, and never hangs them.
TIMEOUT = 30.0

WIRINGS = {
    # One node, shared memory.
    "memory": lambda rank: Config(timeout=TIMEOUT),
    # One node, MPI messages only.
    "messages": lambda rank: Config(timeout=TIMEOUT, shared_memory=False),
    # Emulated nodes of two ranks, the last one perhaps of one.
    "nodes": lambda rank: Config(timeout=TIMEOUT, node_id=rank // 2),
    # Segments, pieces and slots so small that every message is cut.
    "pieces": lambda rank: Config(
        timeout=TIMEOUT,
        slot_bytes=4096,
        inline_bytes=64,
        segment_bytes=1024,
        piece_bytes=1024,
        shared_memory=False,
    ),
    # The same through shared memory.
    "slots": lambda rank: Config(timeout=TIMEOUT, slot_bytes=4096, inline_bytes=64),
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
    """The plain communicator: one node, shared memory."""
    return communicators("memory")


@pytest.fixture
def fresh_comm():
    """A communicator for tests that may break it."""
    with mpidp.Communicator(timeout=TIMEOUT) as communicator:
        yield communicator
