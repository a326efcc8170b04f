"""Registered GPU memory, DLPack, and what is given back at the end."""

import gc

import numpy as np
import pytest
from inputs import difference, reduced, values
from standin import DLPackOnly, StandIn, Stream, on_device

import mpidp
from mpidp import devices
from mpidp.devices import DeviceArray

pytestmark = pytest.mark.mpi


def test_empty(comm):
    x = comm.empty((3, 5), "float32", device="cuda")
    assert x.shape == (3, 5)
    assert x.nbytes == 60
    host = values("float32", 15, comm.rank).reshape(3, 5)
    x.copy_from(host)
    assert not difference(x.to_host(), host)
    assert comm.all_reduce(x, op="max") is x
    assert not difference(x.to_host().reshape(-1), reduced("float32", 15, comm.world_size, "max"))


def test_empty_of_nothing(comm):
    x = comm.empty(0, "int8", device="cuda")
    assert comm.all_reduce(x).to_host().size == 0


def test_memory_outlives_its_communicator(communicators):
    with mpidp.Communicator(timeout=30) as short:
        x = short.empty(1001, "int32", device="cuda")
        x.copy_from(values("int32", 1001, short.rank))
        short.all_reduce(x)
    comm = communicators("best")
    comm.all_reduce(x, op="max")
    assert not difference(x.to_host(), reduced("int32", 1001, comm.world_size))


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cuda:-1", "cuda:99", 1])
def test_devices_that_are_none(comm, device):
    with pytest.raises(mpidp.InvalidArgumentError, match="device"):
        comm.empty(3, device=device)


def test_dlpack_in_and_out(comm):
    x = comm.empty(2003, "float64", device="cuda")
    x.copy_from(values("float64", 2003, comm.rank))
    other = DLPackOnly(x)
    stream = Stream()
    assert comm.all_reduce(other, stream=stream) is other
    assert other.streams[-1] == stream.ptr  # the exporter orders itself with the stream
    found = x.to_host(stream)
    assert not difference(found, reduced("float64", 2003, comm.world_size))
    comm.all_reduce(other)
    assert other.streams[-1] == 1  # DLPack's name for the legacy default stream
    stream.synchronize()
    stream.close()


def test_dlpack_keeps_the_memory(comm):
    x = comm.empty(16, "bfloat16", device="cuda")
    x.copy_from(np.arange(16, dtype=np.uint16))
    capsule = x.__dlpack__(stream=-1)
    weight = x._buffer
    del x
    gc.collect()
    again = DeviceArray(weight, (16,), 0)
    assert (again.to_host() == np.arange(16)).all()
    del capsule


def test_the_array_interface_is_complete(comm):
    x = comm.empty((2, 3), "complex64", device="cuda")
    interface = x.__cuda_array_interface__
    assert interface["version"] == 3
    assert interface["shape"] == (2, 3)
    assert interface["typestr"] == "<c8"
    assert interface["data"] == (x.pointer, False)
    assert interface["stream"] == 1
    assert x.__dlpack_device__() == (2, 0)
    with pytest.raises(AttributeError, match="DLPack"):
        _ = comm.empty(2, "bfloat16", device="cuda").__cuda_array_interface__


class Interface:
    """A GPU array with another interface than the stand-in's."""

    def __init__(self, array, **changes):
        self.array = array
        self.shape = array.shape
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, **changes}


def test_arrays_that_cannot_take_part(comm):
    x = on_device(np.zeros((4, 6), np.float32))
    cases = {
        "not C-contiguous": {"strides": (4, 16)},
        "masked": {"mask": x},
        "dtype": {"typestr": "<U4"},
        "read-only": {"data": (x.pointer, True)},
        "freed, or is it host memory": {"data": (np.zeros(24).ctypes.data, False)},
    }
    for message, changes in cases.items():
        with pytest.raises(mpidp.InvalidBufferError, match=message):
            comm.all_reduce(Interface(x, **changes))
    # Version 2 has no stream, and C order may be spelled out.
    comm.all_reduce(Interface(x, version=2, strides=(24, 4)))
    comm.reduce(Interface(x, data=(x.pointer, comm.rank != 0)), root=0)  # only the root writes


def test_overlap_is_refused(comm):
    x = on_device(np.zeros(8, np.float32))
    shifted = Interface(x, data=(x.pointer + 4, False), shape=(4,))
    first = Interface(x, shape=(4,))
    first.shape = shifted.shape = (4,)
    with pytest.raises(mpidp.InvalidBufferError, match="overlap"):
        comm.all_reduce(first, shifted)


def test_nothing_is_left_after_close(counters):
    gc.collect()
    before = counters()
    for transport in ("auto", "staged"):
        config = mpidp.Config(timeout=30, device_transport=transport, device_segment_bytes=4096)
        with mpidp.Communicator(config=config) as comm:
            for turn in range(3):
                x = on_device(values("float32", 5003 + turn, comm.rank))
                y = comm.empty(77, "int8", device="cuda")
                comm.all_reduce(x)
                comm.all_reduce(y)
                comm.all_gather(x)
                work = comm.all_reduce_async(x)
            work.wait()
            if comm.world_size > 1:
                assert counters() != before
        del work, x, y
        gc.collect()
        assert counters() == before


def test_freed_arrays_are_unmapped_by_peers(counters):
    with mpidp.Communicator(timeout=30) as comm:
        comm.all_reduce(on_device(np.ones(64)))
        comm.barrier()
        gc.collect()
        first = counters()
        for turn in range(50):
            x = on_device(np.full(64 + turn, 1.0))
            comm.all_reduce(x)
            assert (x.download() == comm.world_size).all()
            x.close()
        comm.all_reduce(on_device(np.ones(64)))  # an exchange, after which the dead are unmapped
        comm.barrier()
        gc.collect()
        last = counters()
        # One or two of each peer's are alive at a time.
        assert last["mappings"] <= first["mappings"] + 2 * comm.world_size


def test_the_runtime_is_named(comm):
    found = devices.describe()
    assert found["runtime"] in ("emulated", "cuda")
    assert found["devices"]
    assert found["reason"] == ""


def test_results_are_made_where_the_input_is(comm):
    x = on_device(np.arange(4 * comm.world_size, dtype=np.int32))
    out = comm.reduce_scatter(x)
    assert isinstance(out, DeviceArray)
    assert out.shape == (4,)
    assert out.dtype == "int32"
    assert isinstance(x, StandIn)
