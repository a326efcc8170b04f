"""PyTorch's CUDA tensors, where there is a real GPU and a PyTorch that can use it."""

import numpy as np
import pytest
from inputs import difference, reduced, values

import mpidp

pytestmark = pytest.mark.mpi


@pytest.fixture
def torch():
    from mpidp import devices

    if devices.describe()["runtime"] != "cuda":
        pytest.skip("needs a real GPU")
    found = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not found.cuda.is_available():
        pytest.skip("this PyTorch cannot use the GPU")
    return found


def tensor_of(torch, host):
    if host.dtype.name == "bfloat16":
        return torch.from_numpy(host.view(np.int16)).view(torch.bfloat16).cuda()
    return torch.from_numpy(host).cuda()


def values_of(torch, tensor, dtype):
    tensor = tensor.cpu()
    if dtype.name == "bfloat16":
        return tensor.view(torch.int16).numpy().view(dtype)
    return tensor.numpy()


@pytest.mark.parametrize("wiring", ["best", "staged"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "complex64", "bool"])
def test_tensors(communicators, torch, wiring, dtype):
    comm = communicators(wiring)
    host = values(dtype, 5003, comm.rank)
    x = tensor_of(torch, host)
    assert comm.all_reduce(x) is x
    assert not difference(values_of(torch, x, host.dtype), reduced(dtype, 5003, comm.world_size))


def test_the_current_stream_is_followed(comm, torch):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for turn in range(5):
            x = torch.zeros(1 << 20, device="cuda")
            for _ in range(50):
                x += 1.0  # a producer that the host is well ahead of
            work = comm.all_reduce_async(x)
            work.wait()
            doubled = x * 2
            x.fill_(-1.0)
            assert (doubled == 100.0 * comm.world_size).all(), turn


def test_results_are_tensors(comm, torch):
    x = torch.arange(4 * comm.world_size, dtype=torch.float32, device="cuda")
    out = comm.reduce_scatter(x)
    assert out.is_cuda
    assert out.shape == (4,)
    assert torch.equal(out, comm.world_size * x[4 * comm.rank : 4 * comm.rank + 4])
    assert comm.all_gather(x).shape == (comm.world_size, 4 * comm.world_size)


def test_registered_memory_as_a_tensor(comm, torch):
    tensor = torch.from_dlpack(comm.empty(1001, "float32", device="cuda"))
    tensor.fill_(comm.rank + 1.0)
    comm.all_reduce(tensor, op="max")
    assert (tensor == comm.world_size).all()


def test_tensors_that_cannot_take_part(comm, torch):
    x = torch.zeros(4, 6, device="cuda")
    with pytest.raises(mpidp.InvalidBufferError, match="contiguous"):
        comm.all_reduce(x.T)
    with pytest.raises(mpidp.InvalidBufferError, match="require"):
        comm.all_reduce(x.requires_grad_())
