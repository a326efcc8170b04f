"""Order between the caller's streams and collectives: late producers, early consumers, Work."""

import gc
import time

import numpy as np
import pytest
from inputs import difference, reduced, values
from standin import Pinned, StandIn, Stream, on_device, runtime

import mpidp

pytestmark = pytest.mark.mpi

COUNT = 20_011


@pytest.fixture
def stream():
    made = Stream()
    yield made
    made.synchronize()
    made.close()


class Late:
    """An array whose values arrive on `stream` only after a long piece of other work there."""

    def __init__(self, host, stream):
        self.stream = stream
        self.x = StandIn(host.shape, host.dtype, stream=stream)
        self.pinned = Pinned(host.nbytes)
        # Some milliseconds of work: a real device fills memory far quicker.
        self.busy = StandIn((4 if runtime().name == "emulated" else 256) << 20, np.uint8)
        self.produce(host)

    def produce(self, host):
        """Poison the array at once, and have `host` arrive late."""
        self.stream.synchronize()
        self.x.fill(0xA5)
        runtime()("synchronize_stream", 0)
        self.pinned.array[:] = np.frombuffer(host.tobytes(), np.uint8)
        for byte in range(4):
            self.busy.fill(byte, self.stream)
        runtime()("copy", self.x.pointer, self.pinned.pointer, host.nbytes, self.stream.ptr)


@pytest.mark.parametrize("wiring", ["best", "staged"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_late_producer_is_waited_for(communicators, stream, wiring, asynchronous):
    comm = communicators(wiring)
    for turn in range(3):
        late = Late(values("float32", COUNT, comm.rank, salt=turn), stream)
        if asynchronous:
            comm.all_reduce_async(late.x).wait(stream=stream)
        else:
            comm.all_reduce(late.x)  # the array names its stream
        expected = reduced("float32", COUNT, comm.world_size, salt=turn)
        assert not difference(late.x.download(stream), expected)


@pytest.mark.parametrize("wiring", ["best", "staged"])
def test_a_late_producer_on_one_rank_only(communicators, stream, wiring):
    comm = communicators(wiring)
    for late_rank in range(comm.world_size):
        host = values("float32", COUNT, comm.rank, salt=late_rank)
        late = Late(host, stream) if comm.rank == late_rank else None
        x = on_device(host) if late is None else late.x
        comm.all_reduce(x, stream=stream)
        expected = reduced("float32", COUNT, comm.world_size, salt=late_rank)
        assert not difference(x.download(stream), expected)


@pytest.mark.parametrize("wiring", ["best", "staged"])
def test_an_early_consumer_sees_the_result(communicators, stream, wiring):
    # Everything is queued on one stream; the host waits once, at the end.
    comm = communicators(wiring)
    copies = []
    x = StandIn(COUNT, np.float32, stream=stream)
    pinned = []
    for turn in range(4):
        host = values("float32", COUNT, comm.rank, salt=turn)
        pinned.append(Pinned(host.nbytes))
        pinned[-1].array[:] = np.frombuffer(host.tobytes(), np.uint8)
        # Overwrites what the peers read in the collective before.
        runtime()("copy", x.pointer, pinned[-1].pointer, host.nbytes, stream.ptr)
        comm.all_reduce(x)
        copies.append(StandIn(COUNT, np.float32))
        x.copy_to(copies[-1], stream)
        x.fill(0x5A, stream)
    stream.synchronize()
    for turn, copy in enumerate(copies):
        expected = reduced("float32", COUNT, comm.world_size, salt=turn)
        assert not difference(copy.download(stream), expected)


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_to_all", "broadcast"])
def test_an_input_may_be_overwritten_afterwards(comm, stream, collective):
    # Peers read this rank's input: what the caller queues next must wait for them too.
    block = 3001
    whole = collective in ("reduce_scatter", "all_to_all")
    count = block * (comm.world_size if whole else 1)
    for turn in range(3):
        late = Late(values("float32", count, comm.rank, salt=turn), stream)
        everybody = [values("float32", count, r, salt=turn) for r in range(comm.world_size)]
        mine = slice(comm.rank * block, (comm.rank + 1) * block)
        size = block * (comm.world_size if collective in ("all_gather", "all_to_all") else 1)
        found = StandIn(size, np.float32)
        if collective == "broadcast":
            comm.broadcast(late.x, root=0, stream=stream)
            late.x.copy_to(found, stream)
            expected = everybody[0]
        else:
            getattr(comm, collective)(late.x, found, stream=stream)
            if collective == "all_gather":
                expected = np.concatenate(everybody)
            elif collective == "all_to_all":
                expected = np.concatenate([one[mine] for one in everybody])
            else:
                expected = reduced("float32", count, comm.world_size, salt=turn)[mine]
        late.x.fill(0x77, stream)
        assert not difference(found.download(stream), expected)


@pytest.mark.parametrize("wiring", ["best", "staged"])
def test_eight_in_flight(communicators, stream, wiring):
    comm = communicators(wiring)
    counts = [10, 50_000, 0, 5003, 1, 30_001, 333, 20_000]
    arrays = [on_device(values("float32", n, comm.rank, salt=i)) for i, n in enumerate(counts)]
    works = [comm.all_reduce_async(x, stream=stream) for x in arrays]
    for i in reversed(range(len(works))):
        assert works[i].wait(stream=stream) is arrays[i]
        expected = reduced("float32", counts[i], comm.world_size, salt=i)
        assert not difference(arrays[i].download(stream), expected)
        assert works[i].done()


def test_wait_does_not_block_the_host_and_synchronize_does(comm, stream):
    late = Late(values("float32", COUNT, comm.rank), stream)
    for byte in range(40):
        late.busy.fill(byte, stream)
    runtime()("copy", late.x.pointer, late.pinned.pointer, late.x.nbytes, stream.ptr)
    work = comm.all_reduce_async(late.x)
    start = time.monotonic()
    work.wait(stream=stream)
    waited = time.monotonic() - start
    if comm.world_size == 1 and runtime().name == "emulated":
        # Nobody else delays the issue, so the device must still be at it.
        assert not work.done()
    work.synchronize()
    assert work.done()
    assert time.monotonic() - start > waited
    assert not difference(late.x.download(), reduced("float32", COUNT, comm.world_size))


def test_a_consumer_on_another_stream(comm, stream):
    other = Stream()
    late = Late(values("float32", COUNT, comm.rank), stream)
    copy = StandIn(COUNT, np.float32)
    work = comm.all_reduce_async(late.x)
    work.wait(stream=other)
    late.x.copy_to(copy, other)
    assert not difference(copy.download(other), reduced("float32", COUNT, comm.world_size))
    stream.synchronize()
    other.close()


def test_two_communicators_at_once(stream):
    comms = [mpidp.Communicator(timeout=30) for _ in range(2)]
    streams = [stream, Stream()]
    try:
        for turn in range(4):
            works = []
            for i in range(2):
                # Each rank goes over the communicators in another order.
                which = (i + comms[0].rank) % 2
                late = Late(
                    values("float32", COUNT, comms[0].rank, salt=turn + which), streams[which]
                )
                works.append((which, late, comms[which].all_reduce_async(late.x)))
            for which, late, work in works:
                work.wait(stream=streams[which])
                expected = reduced("float32", COUNT, comms[0].world_size, salt=turn + which)
                assert not difference(late.x.download(streams[which]), expected)
    finally:
        streams[1].synchronize()
        streams[1].close()
        for comm in comms:
            comm.close()


@pytest.mark.parametrize("wiring", ["best", "staged"])
def test_dropped_works_keep_their_arrays(communicators, wiring):
    comm = communicators(wiring)
    for turn in range(10):
        comm.all_reduce_async(on_device(values("float32", 5003, comm.rank, salt=turn)))
        gc.collect()
    x = on_device(values("float32", 5003, comm.rank))
    work = comm.all_reduce_async(x)
    del x
    gc.collect()
    result = work.synchronize()
    assert not difference(result.download(), reduced("float32", 5003, comm.world_size))


def test_host_and_gpu_work_share_the_queue(comm):
    host = values("float64", 3001, comm.rank)
    x = on_device(host)
    works = [comm.all_reduce_async(host), comm.all_reduce_async(x), comm.barrier_async()]
    for work in works:
        work.wait()
    expected = reduced("float64", 3001, comm.world_size)
    assert not difference(host, expected)
    assert not difference(x.download(), expected)
    assert all(work.done() for work in works) or works[1].synchronize() is x


def test_streams_that_are_none(comm):
    x = on_device(np.ones(3))
    for stream in ("main", -1, 1.5, True):
        with pytest.raises(mpidp.InvalidArgumentError, match="expected a CUDA stream"):
            comm.all_reduce(x, stream=stream)
    comm.barrier()
