"""The common outcome of a test that runs on several ranks; for the conftest files of such tests."""

from __future__ import annotations

import pytest
from mpi4py import MPI


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """Fail a test on all ranks where it failed on one, so that no rank runs ahead alone."""
    error = None
    result = None
    try:
        result = yield
    except (Exception, pytest.fail.Exception) as caught:
        error = caught
    failed = MPI.COMM_WORLD.allreduce(0 if error is None else 1)
    if failed:
        ranks = MPI.COMM_WORLD.allgather(None if error is None else repr(error)[:300])
        if error is None:
            others = [f"rank {rank}: {text}" for rank, text in enumerate(ranks) if text]
            raise AssertionError("passed on this rank, but failed on\n" + "\n".join(others))
        raise error
    return result
