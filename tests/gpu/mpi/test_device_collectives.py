"""Every collective on GPU arrays: transports, algorithms, dtypes, ops, counts, in place or not."""

import numpy as np
import pytest
from inputs import DTYPES, difference, has_op, reduced, small_counts, values
from standin import StandIn, on_device

import mpidp

pytestmark = pytest.mark.mpi

WIRINGS = ("best", "staged", "nodes")
PAIRS = [
    (dtype, op)
    for dtype in DTYPES
    for op in ("sum", "mean", "prod", "min", "max")
    if has_op(dtype, op)
]


def typed(array):
    """NumPy's CUDA array interface has no bfloat16, so those go through DLPack elsewhere."""
    return array.dtype.name != "bfloat16"


@pytest.mark.parametrize("wiring", ["best", "staged"])
@pytest.mark.parametrize(("dtype", "op"), [pair for pair in PAIRS if pair[0] != "bfloat16"])
def test_all_reduce(communicators, wiring, dtype, op):
    comm = communicators(wiring)
    for turn, count in enumerate(small_counts(comm.world_size)):
        expected = reduced(dtype, count, comm.world_size, op)
        host = values(dtype, count, comm.rank, op)
        x = on_device(host, misaligned=turn % 2 == 1)
        if turn % 2:
            assert comm.all_reduce(x, op=op) is x
            assert not difference(x.download(), expected)
        else:
            out = StandIn(count, host.dtype)
            assert comm.all_reduce(x, out, op=op) is out
            assert not difference(out.download(), expected)
            assert not difference(x.download(), host)


@pytest.mark.parametrize("wiring", ["best", "staged"])
@pytest.mark.parametrize("op", ["sum", "mean", "prod", "min", "max"])
def test_bfloat16(communicators, wiring, op):
    comm = communicators(wiring)
    for count in small_counts(comm.world_size):
        host = values("bfloat16", count, comm.rank, op)
        x = comm.empty(count, "bfloat16", device="cuda")
        x.copy_from(host.view(np.uint16))
        comm.all_reduce(x, op=op)
        found = x.to_host().view(host.dtype)
        assert not difference(found, reduced("bfloat16", count, comm.world_size, op))


@pytest.mark.parametrize("wiring", WIRINGS)
@pytest.mark.parametrize("count", [4099, 50_021])
def test_large_arrays(communicators, wiring, count):
    # Several segments of the staged rung, and several blocks of every kernel's grid.
    comm = communicators(wiring)
    for turn in range(3):
        x = on_device(values("float32", count, comm.rank, salt=turn), misaligned=turn == 1)
        comm.all_reduce(x)
        assert not difference(x.download(), reduced("float32", count, comm.world_size, salt=turn))


@pytest.mark.parametrize(
    "algorithm",
    ["direct", "ring", "recursive_halving", "recursive_doubling", "hierarchical", "mpi"],
)
@pytest.mark.parametrize("wiring", WIRINGS)
def test_algorithms(communicators, wiring, algorithm):
    comm = communicators(wiring)
    if algorithm == "direct" and wiring == "nodes" and comm.num_nodes > 1:
        algorithm = "auto"
    for dtype in ("float32", "int16", "complex64"):
        x = on_device(values(dtype, 5003, comm.rank))
        comm.all_reduce(x, algorithm=algorithm)
        assert not difference(x.download(), reduced(dtype, 5003, comm.world_size))


@pytest.mark.parametrize("wiring", ["best", "staged"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64"])
def test_scale(communicators, wiring, dtype):
    comm = communicators(wiring)
    scales = [0.5 if rank % 2 else 2.0 for rank in range(comm.world_size)]
    x = on_device(values(dtype, 1001, comm.rank))
    out = StandIn(1001, x.dtype)
    comm.all_reduce(x, out, scale=scales[comm.rank], op="mean")
    assert not difference(
        out.download(), reduced(dtype, 1001, comm.world_size, "mean", scales=scales)
    )


def run(comm, collective, host, salt):
    """(the result on the device, what it must be), None for no result."""
    rank, world_size = comm.rank, comm.world_size
    count, dtype = host.size, host.dtype.name
    root = salt % world_size
    everybody = [values(dtype, count, peer, salt=salt) for peer in range(world_size)]
    x = on_device(host, misaligned=bool(salt % 2))
    if collective == "broadcast":
        assert comm.broadcast(x, root=root) is x
        return x, everybody[root]
    if collective == "all_gather":
        return comm.all_gather(x), np.stack(everybody)
    total = reduced(dtype, count, world_size, salt=salt)
    if collective == "reduce":
        result = comm.reduce(x, root=root)
        assert (result is x) == (rank == root)
        return x, total if rank == root else host
    block = count // world_size
    mine = slice(rank * block, (rank + 1) * block)
    if collective == "reduce_scatter":
        return comm.reduce_scatter(x), total[mine]
    return comm.all_to_all(x), np.concatenate([one[mine] for one in everybody])


@pytest.mark.parametrize("wiring", WIRINGS)
@pytest.mark.parametrize("dtype", ["bool", "int8", "float16", "float32", "complex128"])
@pytest.mark.parametrize(
    "collective", ["broadcast", "all_gather", "reduce", "reduce_scatter", "all_to_all"]
)
def test_other_collectives(communicators, wiring, collective, dtype):
    comm = communicators(wiring)
    whole = collective in ("reduce_scatter", "all_to_all")
    for salt, count in enumerate([0, 1, 333, 7001]):
        count *= comm.world_size if whole else 1
        host = values(dtype, count, comm.rank, salt=salt)
        result, expected = run(comm, collective, host, salt)
        found = result.download() if isinstance(result, StandIn) else result.to_host()
        assert not difference(found, expected)


@pytest.mark.parametrize("wiring", ["best", "staged"])
def test_all_gather_in_place(communicators, wiring):
    comm = communicators(wiring)
    block = 4099
    host = np.zeros(block * comm.world_size, np.float32)
    mine = slice(comm.rank * block, (comm.rank + 1) * block)
    host[mine] = values("float32", block, comm.rank)
    out = on_device(host)
    part = Part(out, mine.start, block)
    comm.all_gather(part, out)
    expected = [values("float32", block, peer) for peer in range(comm.world_size)]
    assert not difference(out.download(), np.concatenate(expected))


class Part:
    """A range of a GPU array."""

    def __init__(self, whole, first, count):
        self.whole = whole
        self.shape = (count,)
        self.__cuda_array_interface__ = {
            **whole.__cuda_array_interface__,
            "shape": (count,),
            "data": (whole.pointer + first * whole.dtype.itemsize, False),
        }


def test_transports_give_the_same_bits(communicators):
    # Sums that round, so that an order of terms other than the ranks' would show.
    rng = np.random.default_rng(communicators("best").rank)
    host = rng.standard_normal(30_011).astype(np.float32)
    found = []
    for wiring in ("best", "staged"):
        comm = communicators(wiring)
        x = on_device(host)
        comm.all_reduce(x, deterministic=True)
        found.append(x.download())
        on_host = host.copy()
        comm.all_reduce(on_host, deterministic=True)
        found.append(on_host)
    assert all(one.tobytes() == found[0].tobytes() for one in found)


def test_host_and_gpu_calls_alternate(communicators):
    comm = communicators("best")
    for turn in range(6):
        host = values("float32", 2003, comm.rank, salt=turn)
        expected = reduced("float32", 2003, comm.world_size, salt=turn)
        x = on_device(host)
        comm.all_reduce(x)
        comm.all_reduce(host)
        comm.barrier()
        assert not difference(x.download(), expected)
        assert not difference(host, expected)


def test_many_arrays_come_and_go(communicators):
    # Handles of arrays that are gone must not be mistaken for those of new ones at their address.
    comm = communicators("best")
    for turn in range(40):
        count = 100 + turn % 3
        x = on_device(values("int32", count, comm.rank, salt=turn))
        comm.all_reduce(x)
        assert not difference(x.download(), reduced("int32", count, comm.world_size, salt=turn))
        x.close()


def test_kinds_of_memory_do_not_mix(communicators):
    comm = communicators("best")
    x = on_device(np.zeros(8, np.float32))
    with pytest.raises(mpidp.InvalidBufferError, match="same kind"):
        comm.all_reduce(x, np.zeros(8, np.float32))
    with pytest.raises(mpidp.InvalidBufferError, match="same kind"):
        comm.all_reduce(np.zeros(8, np.float32), x)
    comm.barrier()


def test_describe_tells_the_transport(communicators):
    for wiring, transport in (("best", "ipc"), ("staged", "staged")):
        comm = communicators(wiring)
        comm.all_reduce(on_device(np.ones(4)))
        device = comm.describe()["device"]
        assert device["index"] == 0
        assert device["transport"] == ("local" if comm.world_size == 1 else transport)
        if comm.world_size > 1:
            assert bool(device["reason"]) == (wiring == "staged")
