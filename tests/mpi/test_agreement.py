"""Ranks that disagree all raise, quickly, and go on afterwards; late ranks are named."""

import time

import numpy as np
import pytest
from inputs import difference, reduced, values

import mpidp

pytestmark = pytest.mark.mpi


def odd_one(comm):
    return comm.rank == comm.world_size - 1


DISAGREEMENTS = {
    "count": lambda c: c.all_reduce(np.zeros(10 + odd_one(c))),
    "large count": lambda c: c.all_reduce(np.zeros(100_000 + odd_one(c))),
    "dtype": lambda c: c.all_reduce(np.zeros(10, "int64" if odd_one(c) else "float64")),
    "op": lambda c: c.all_reduce(np.zeros(10), op="max" if odd_one(c) else "sum"),
    "mean": lambda c: c.all_reduce(np.zeros(10), op="mean" if odd_one(c) else "sum"),
    "root": lambda c: c.broadcast(np.zeros(10), root=1 if odd_one(c) else 0),
    "algorithm": lambda c: c.all_reduce(np.zeros(9), algorithm="ring" if odd_one(c) else "mpi"),
    "collective": lambda c: c.barrier() if odd_one(c) else c.all_reduce(np.zeros(50_000)),
    "determinism": lambda c: c.all_reduce(
        np.zeros(9), deterministic=odd_one(c), algorithm="ring" if not odd_one(c) else "auto"
    ),
    "empty": lambda c: c.all_reduce(np.zeros(0 if odd_one(c) else 3)),
}


@pytest.mark.parametrize("wiring", ["memory", "nodes", "messages"])
@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_all_ranks_raise_and_go_on(communicators, wiring, what):
    comm = communicators(wiring)
    if comm.world_size == 1:
        return
    comm.barrier()
    start = time.monotonic()
    with pytest.raises(mpidp.MismatchError) as caught:
        DISAGREEMENTS[what](comm)
    assert time.monotonic() - start < 1
    text = str(caught.value)
    assert f"rank {comm.world_size - 1}: " in text
    assert "rank 0: " in text or f"ranks 0-{comm.world_size - 2}: " in text
    assert comm.world_size == 2 or caught.value.ranks == [comm.world_size - 1]
    # Plain arrays in blocks: stale slots of the failed call would show here.
    for count in (3, 70_001):
        x = values("float32", count, comm.rank)
        comm.all_reduce(x)
        assert not difference(x, reduced("float32", count, comm.world_size))


def test_asynchronous_disagreement_reaches_the_waiter(comm):
    if comm.world_size == 1:
        return
    work = comm.all_reduce_async(np.zeros(10 + odd_one(comm)))
    later = comm.all_reduce_async(np.ones(10))
    with pytest.raises(mpidp.MismatchError):
        work.wait()
    assert (later.wait() == comm.world_size).all()


@pytest.mark.parametrize("wiring", [{}, {"shared_memory": False}])
def test_a_late_rank_is_named(wiring):
    from mpi4py import MPI

    comm = mpidp.Communicator(config=mpidp.Config(timeout=0.5, **wiring))
    if comm.world_size == 1:
        comm.close()
        return
    late = comm.rank == comm.world_size - 1
    MPI.COMM_WORLD.Barrier()
    if late:
        time.sleep(1.2)
    start = time.monotonic()
    with pytest.raises(mpidp.CollectiveTimeoutError) as caught:
        comm.all_reduce(np.zeros(10))
    # The late one learns at once, where memory is shared, that the others gave up.
    waited = time.monotonic() - start
    assert waited < 3
    assert late or waited > 0.4
    if not late and not wiring:
        assert caught.value.ranks == [comm.world_size - 1]
    assert isinstance(caught.value, TimeoutError)
    with pytest.raises(mpidp.MpidpError, match="make a new one"):
        comm.all_reduce(np.zeros(10))
    comm.close()


def test_timeout_of_one_call(fresh_comm):
    comm = fresh_comm
    if comm.world_size == 1:
        return
    if comm.rank == 0:
        start = time.monotonic()
        with pytest.raises(mpidp.CollectiveTimeoutError):
            comm.barrier(timeout=0.2)
        assert time.monotonic() - start < 2
