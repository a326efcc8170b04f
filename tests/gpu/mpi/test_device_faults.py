"""Faults: every one makes all ranks fall back together or all ranks raise; none hangs."""

import time

import numpy as np
import pytest
from inputs import difference, reduced, values
from mpi4py import MPI
from standin import StandIn, Stream, on_device
from test_device_streams import Late

import mpidp

pytestmark = pytest.mark.mpi


def check(comm, count=5003):
    x = on_device(values("float32", count, comm.rank))
    comm.all_reduce(x)
    assert not difference(x.download(), reduced("float32", count, comm.world_size))


# What fails on one rank only, the last; the others must agree.
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("fault", ["ipc_export", "ipc_open", "ipc_event_open", "ipc_garbage"])
def test_ipc_that_fails_the_probe_is_not_used(faults, fault, everywhere):
    with mpidp.Communicator(timeout=30) as comm:
        if everywhere or comm.rank == comm.world_size - 1:
            faults(fault, True)
        check(comm)
        device = comm.describe()["device"]
        if comm.world_size == 1:
            assert device["transport"] == "local"
        else:
            assert device["transport"] == "staged"
            assert "rank " in device["reason"]
            reasons = comm.all_gather_object(device["reason"])
            assert len(set(reasons)) == 1
        faults(fault, False)
        check(comm)


@pytest.mark.parametrize("fault", ["ipc_export", "ipc_open"])
def test_memory_refused_later_is_staged(faults, fault):
    with mpidp.Communicator(timeout=30) as comm:
        check(comm)
        if comm.rank == 0:
            faults(fault, True)
        refused = on_device(values("float32", 5003, comm.rank))
        comm.all_reduce(refused)
        assert not difference(refused.download(), reduced("float32", 5003, comm.world_size))
        faults(fault, False)
        comm.barrier()
        check(comm)
        if comm.world_size > 1:
            assert comm.describe()["device"]["transport"] == "ipc"


def test_memory_that_cannot_be_exported_is_staged(faults, comm):
    check(comm)
    if comm.rank == 0:
        faults("not_exportable", True)
    x = on_device(values("float32", 5003, comm.rank))
    faults("not_exportable", False)
    for turn in range(2):
        comm.all_reduce(x, op="max" if turn else "sum")
    assert not difference(x.download(), reduced("float32", 5003, comm.world_size))


def test_out_of_memory(faults, comm):
    faults("out_of_memory", True)
    with pytest.raises(MemoryError, match="cuda:0"):
        comm.empty(1 << 20, device="cuda")
    faults("out_of_memory", False)
    check(comm)


def test_a_failed_launch_reaches_all_ranks(faults):
    with mpidp.Communicator(timeout=30) as comm:
        check(comm)
        x = on_device(np.ones(5003, np.float32))
        last = comm.rank == comm.world_size - 1
        if last:
            faults("launch", True)
        start = time.monotonic()
        with pytest.raises(mpidp.CudaError if last else mpidp.MpidpError):
            comm.all_reduce(x)
        assert time.monotonic() - start < 10
        faults("launch", False)
        with pytest.raises(mpidp.MpidpError, match="make a new one"):
            comm.all_reduce(x)
    with mpidp.Communicator(timeout=30) as comm:
        check(comm)


def test_host_and_gpu_arrays_on_different_ranks(fresh_comm):
    comm = fresh_comm
    if comm.world_size == 1:
        return
    check(comm)
    for _ in range(2):
        host = np.ones(100, np.float32)
        odd = comm.rank == comm.world_size - 1
        with pytest.raises(mpidp.MismatchError, match="on a GPU") as caught:
            comm.all_reduce(on_device(host) if odd else host)
        if comm.world_size > 2:
            assert caught.value.ranks == [comm.world_size - 1]
        check(comm)


def test_the_first_collective_of_all_may_be_a_mismatch():
    with mpidp.Communicator(timeout=30) as comm:
        if comm.world_size == 1:
            return
        x = on_device(np.ones(10 + comm.rank % 2, np.float32))
        with pytest.raises(mpidp.MismatchError):
            comm.all_reduce(x)
        check(comm)


@pytest.mark.parametrize("wiring", [{}, {"device_transport": "staged"}])
def test_a_late_rank_is_named(wiring):
    comm = mpidp.Communicator(config=mpidp.Config(timeout=0.6, **wiring))
    late = comm.world_size - 1
    if comm.world_size == 1:
        comm.close()
        return
    x = on_device(np.ones(100, np.float32))
    MPI.COMM_WORLD.Barrier()
    if comm.rank == late:
        time.sleep(1.5)
    with pytest.raises(mpidp.CollectiveTimeoutError) as caught:
        comm.all_reduce(x)
    if comm.rank != late:
        assert caught.value.ranks == [late]
    comm.close()


def wrong_results(comm, mutate, rounds=8):
    """How many results of late producers are wrong on this rank while `mutate` is on."""
    stream = Stream()
    count = 20_011
    late = Late(values("float32", count, comm.rank), stream)
    out = StandIn(count, np.float32)
    comm.all_reduce(late.x, out, stream=stream)  # maps the memory, which takes a while
    wrong = 0
    for turn in range(rounds):
        comm.barrier()
        late.produce(values("float32", count, comm.rank, salt=turn))
        comm.barrier()
        mutate(True)
        comm.all_reduce(late.x, out, stream=stream)
        mutate(False)
        found = out.download(stream)
        expected = reduced("float32", count, comm.world_size, salt=turn)
        wrong += bool(difference(found, expected))
    comm.barrier()
    stream.close()
    return wrong


@pytest.mark.parametrize("mutation", ["drop_own_waits", "drop_peer_waits"])
def test_a_dropped_wait_is_caught(faults, communicators, mutation):
    """Without the waits for the caller's stream, or for the peers, the data must be wrong.

    The same rounds are right with all waits in place, so it is the waits that these tests see.
    """
    comm = communicators("best")
    check(comm)
    if mutation == "drop_peer_waits" and comm.world_size == 1:
        return
    everything_in_place = wrong_results(comm, lambda on: None)
    mutated = wrong_results(comm, lambda on: faults(mutation, on))
    assert MPI.COMM_WORLD.allreduce(everything_in_place) == 0
    assert MPI.COMM_WORLD.allreduce(mutated) > 0
    check(comm)
