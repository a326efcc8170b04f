"""Which GPU a rank works on: one for each communicator, the same for all its arrays."""

import numpy as np
import pytest
from inputs import difference, reduced, values
from standin import StandIn, runtime

import mpidp
from mpidp import _core

pytestmark = pytest.mark.mpi


@pytest.fixture
def two_devices(emulated, monkeypatch):
    """Two emulated GPUs; leaves the calling thread on the first."""
    monkeypatch.setenv("MPIDP_EMULATED_DEVICES", "2")
    if _core.device_count() != 2:
        pytest.skip("the number of emulated devices is fixed at the start")
    yield
    runtime()("set_device", 0)


def on_gpu(index, host):
    runtime()("set_device", index)
    x = StandIn(host.shape, host.dtype).upload(host)
    runtime()("set_device", 0)
    return x


@pytest.mark.parametrize("transport", ["auto", "staged"])
def test_ranks_on_different_devices(two_devices, transport):
    config = mpidp.Config(timeout=30, device_transport=transport)
    with mpidp.Communicator(config=config) as comm:
        mine = comm.rank % 2
        for turn in range(3):
            x = on_gpu(mine, values("float32", 5003, comm.rank, salt=turn))
            if turn == 1:
                comm.all_reduce_async(x).synchronize()
            else:
                comm.all_reduce(x)
            runtime()("set_device", mine)
            found = x.download()
            runtime()("set_device", 0)
            expected = reduced("float32", 5003, comm.world_size, salt=turn)
            assert not difference(found, expected)
            assert _core.current_device() == 0  # the caller's, as it was
        assert comm.describe()["device"]["index"] == mine


def test_arrays_on_another_device_are_refused(two_devices):
    with mpidp.Communicator(timeout=30) as comm:
        host = values("float32", 100, comm.rank)
        first, second = on_gpu(0, host), on_gpu(1, host)
        with pytest.raises(mpidp.InvalidBufferError, match="x lies on GPU 0 and out on GPU 1"):
            comm.all_reduce(first, second)
        comm.all_reduce(second)
        with pytest.raises(mpidp.InvalidBufferError, match="works on GPU 1"):
            comm.all_reduce(first)
        with pytest.raises(mpidp.InvalidBufferError, match="works on GPU 1"):
            comm.empty(3, device="cuda:0")
        comm.barrier()


def test_empty_follows_the_current_device(two_devices):
    runtime()("set_device", 1)
    with mpidp.Communicator(timeout=30) as comm:
        x = comm.empty(10, "float32", device="cuda")
        assert x.device == 1
        assert x.__dlpack_device__() == (2, 1)
        runtime()("set_device", 0)
        y = comm.empty(10, "float32", device="cuda")  # where the communicator works
        assert y.device == 1
        x.copy_from(np.ones(10, np.float32))
        comm.all_reduce(x)
        assert (x.to_host() == comm.world_size).all()
