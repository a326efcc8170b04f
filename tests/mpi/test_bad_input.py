"""Bad input raises the right error, saying what to do, on the rank that gave it."""

import numpy as np
import pytest

import mpidp

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("no_cuda_part")]

GOOD = np.ones(12)


def read_only():
    x = np.ones(12)
    x.flags.writeable = False
    return x


def overlapping():
    x = np.ones(20)
    return x[:12], x[4:16]


BUFFERS = {
    "object": (lambda c: c.all_reduce(np.array([1, None])), "object"),
    "string": (lambda c: c.all_reduce(np.array(["a"])), "not supported"),
    "structured": (lambda c: c.all_reduce(np.zeros(3, "i4,f4")), "structured"),
    "longdouble": (lambda c: c.all_reduce(np.zeros(3, np.longdouble)), "not supported"),
    "byte order": (lambda c: c.all_reduce(np.zeros(3, ">f4")), "byte order"),
    "list": (lambda c: c.all_reduce([1.0, 2.0]), "not an array"),
    "none": (lambda c: c.all_reduce(None), "not an array"),
    "number": (lambda c: c.all_reduce(3.0), "not an array"),
    "read-only": (lambda c: c.all_reduce(read_only()), "read-only"),
    "bytes": (lambda c: c.all_reduce(b"abc"), "read-only"),
    "read-only out": (lambda c: c.all_reduce(GOOD, read_only()), "read-only"),
    "strided": (lambda c: c.all_reduce(np.ones(12)[::2]), "ascontiguousarray"),
    "transposed": (lambda c: c.all_reduce(np.ones((3, 4)).T), "ascontiguousarray"),
    "overlap": (lambda c: c.all_reduce(*overlapping()), "overlap"),
    "out shape": (lambda c: c.all_reduce(GOOD, np.ones(13)), "13"),
    "out shape of equal size": (lambda c: c.all_reduce(GOOD, np.ones((3, 4))), "shape"),
    "out dtype": (lambda c: c.all_reduce(GOOD, np.ones(12, np.float32)), "float32"),
    "gathered size": (lambda c: c.all_gather(GOOD, np.ones(12 * c.world_size + 1)), "elements"),
    "scattered size": (lambda c: c.reduce_scatter(GOOD, np.ones(13)), "elements"),
    "exchanged size": (lambda c: c.all_to_all(GOOD, np.ones(13)), "elements|equal size"),
    "cuda": (lambda c: c.all_reduce(OnGpu()), "no CUDA part"),
}


class OnGpu:
    """What a GPU array shows of itself."""

    shape = (4,)
    __cuda_array_interface__ = {  # noqa: RUF012 (the protocol wants a dict)
        "shape": (4,),
        "typestr": "<f4",
        "data": (4096, False),
        "version": 3,
    }


ARGUMENTS = {
    "op": (lambda c: c.all_reduce(GOOD, op="average"), "average"),
    "op type": (lambda c: c.all_reduce(GOOD, op=3), "3"),
    "algorithm": (lambda c: c.all_reduce(GOOD, algorithm="tree"), "tree"),
    "algorithm of another": (
        lambda c: c.all_to_all(GOOD.repeat(c.world_size), algorithm="ring"),
        "no algorithm",
    ),
    "integer mean": (lambda c: c.all_reduce(np.ones(3, int), op="mean"), "mean"),
    "integer scale": (lambda c: c.all_reduce(np.ones(3, int), scale=0.5), "scale"),
    "complex order": (lambda c: c.all_reduce(np.ones(3, complex), op="max"), "order"),
    "negative timeout": (lambda c: c.all_reduce(GOOD, timeout=-1), "timeout"),
    "nan timeout": (lambda c: c.all_reduce(GOOD, timeout=float("nan")), "timeout"),
    "root": (lambda c: c.broadcast(GOOD, root=c.world_size), "root"),
    "negative root": (lambda c: c.reduce(GOOD, root=-1), "root"),
    "root type": (lambda c: c.broadcast(GOOD, root="0"), "root"),
    "deterministic ring": (
        lambda c: c.all_reduce(GOOD, algorithm="ring", deterministic=True),
        "deterministic",
    ),
    "color": (lambda c: c.split(-3), "color"),
    "device": (lambda c: c.empty(3, device="tpu"), "device"),
}


@pytest.mark.parametrize("what", BUFFERS)
def test_bad_buffers(comm, what):
    call, message = BUFFERS[what]
    with pytest.raises(mpidp.InvalidBufferError, match=message):
        call(comm)


@pytest.mark.parametrize("what", BUFFERS)
def test_bad_buffers_of_asynchronous_calls(comm, what):
    class Asynchronous:
        world_size = comm.world_size

        def __getattr__(self, name):
            return lambda *args, **options: getattr(comm, f"{name}_async")(*args, **options).wait()

    call, message = BUFFERS[what]
    with pytest.raises(mpidp.InvalidBufferError, match=message):
        call(Asynchronous())


@pytest.mark.parametrize("what", ARGUMENTS)
def test_bad_arguments(comm, what):
    call, message = ARGUMENTS[what]
    with pytest.raises((mpidp.InvalidArgumentError, ValueError), match=message):
        call(comm)


def test_the_communicator_goes_on_afterwards(comm):
    x = np.ones(12)
    assert (comm.all_reduce(x) == comm.world_size).all()


def test_a_closed_communicator(fresh_comm):
    fresh_comm.close()
    calls = [
        lambda: fresh_comm.all_reduce(np.ones(3)),
        lambda: fresh_comm.all_reduce_async(np.ones(3)),
        lambda: fresh_comm.barrier(),
        lambda: fresh_comm.empty(3),
        lambda: fresh_comm.split(0),
        lambda: fresh_comm.all_gather(np.ones(3)),
        lambda: fresh_comm.describe(),
    ]
    for call in calls:
        with pytest.raises(mpidp.ClosedError, match="closed"):
            call()


def test_registered_memory_outlives_its_communicator():
    with mpidp.Communicator(timeout=30) as one:
        x = one.empty(50_000)
    x[:] = 1
    with mpidp.Communicator(timeout=30) as two:
        two.all_reduce(x)
        assert (x == two.world_size).all()
