"""Asynchronous collectives: order, lifetime, several communicators at once."""

import gc
import threading
import time

import numpy as np
import pytest
from inputs import difference, reduced, values

import mpidp

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("wiring", ["memory", "nodes", "messages"])
def test_eight_in_flight(communicators, wiring):
    comm = communicators(wiring)
    counts = [10, 100_000, 0, 5003, 1, 70_001, 333, 20_000]
    arrays = [values("float32", count, comm.rank, salt=i) for i, count in enumerate(counts)]
    works = [comm.all_reduce_async(x) for x in arrays]
    for i in reversed(range(len(works))):
        result = works[i].wait()
        assert result is arrays[i]
        assert works[i].done()
        assert not difference(result, reduced("float32", counts[i], comm.world_size, salt=i))


def test_blocking_calls_queue_behind_asynchronous_ones(comm):
    x = values("float64", 50_000, comm.rank)
    work = comm.all_reduce_async(x)
    comm.all_reduce(x)  # the sum of the sums
    assert work.done()
    assert not difference(x, reduced("float64", 50_000, comm.world_size) * comm.world_size)


def test_every_collective_has_an_asynchronous_form(comm):
    world_size = comm.world_size
    x = np.full((world_size, 3), comm.rank, np.int32)
    works = [
        comm.reduce_scatter_async(x),
        comm.all_gather_async(x),
        comm.all_to_all_async(x),
        comm.reduce_async(x.copy(), root=0),
        comm.broadcast_async(x.copy(), root=world_size - 1),
        comm.barrier_async(),
    ]
    total = world_size * (world_size - 1) // 2
    results = [work.wait() for work in works]
    assert (results[0] == total).all()
    assert (results[1] == np.arange(world_size)[:, None, None]).all()
    assert (results[2] == np.arange(world_size)[:, None]).all()
    assert (results[3] is None) if comm.rank else (results[3] == total).all()
    assert (results[4] == world_size - 1).all()
    assert results[5] is None


def test_dropped_works_complete_and_keep_their_arrays(comm):
    for _ in range(20):
        comm.all_reduce_async(np.ones(10_000))
    gc.collect()
    x = np.ones(10_000)
    assert (comm.all_reduce_async(x).wait() == comm.world_size).all()


def test_work_keeps_the_memory_alive(comm):
    works = [comm.all_reduce_async(comm.empty(30_000)) for _ in range(5)]
    gc.collect()
    for work in works:
        work.wait()


def test_wait_with_a_timeout_can_be_repeated(comm):
    if comm.world_size == 1:
        return
    work = comm.barrier_async()  # returns at once on all; the last rank enters a second one late
    work.wait()
    if comm.rank == comm.world_size - 1:
        time.sleep(0.3)
        comm.barrier()
    else:
        work = comm.barrier_async()
        with pytest.raises(TimeoutError):
            work.wait(timeout=0.05)
        work.wait(timeout=20)


def test_a_thread_that_waits_does_not_hold_the_interpreter(comm):
    if comm.world_size == 1:
        return
    counted = 0
    finished = threading.Event()

    def count():
        nonlocal counted
        while not finished.is_set():
            counted += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    comm.barrier()
    thread.start()
    try:
        if comm.rank == comm.world_size - 1:
            time.sleep(0.3)
        comm.barrier()
    finally:
        finished.set()
        thread.join()
    assert counted > 10


@pytest.mark.parametrize("turn", range(5))
def test_four_communicators_at_once(turn):
    # New ones each time: their first calls map the peers' memory, all at once.
    comms = [mpidp.Communicator(timeout=30) for _ in range(4)]
    try:
        works, expected = [], []
        for salt_of_round in range(8):
            # Each rank goes over the communicators in another order; each keeps its own order.
            for i in range(4):
                comm = comms[(i + comms[0].rank) % 4]
                salt = (i + comms[0].rank) % 4 + salt_of_round
                x = values("float32", 20_011 + salt, comm.rank, salt=salt)
                works.append(comm.all_reduce_async(x))
                expected.append(reduced("float32", x.size, comm.world_size, salt=salt))
        for work, total in zip(works, expected, strict=True):
            assert not difference(work.wait(), total)
    finally:
        for comm in comms:
            comm.close()


def test_close_waits_for_what_is_pending():
    comm = mpidp.Communicator(timeout=30)
    x = np.ones(200_000)
    work = comm.all_reduce_async(x)
    comm.close()
    assert work.done()
    assert (x == comm.world_size).all()
