"""Each way to write what peers read, chosen by measurement or by name, moves the same bits."""

import numpy as np
import pytest
from inputs import difference, reduced, values
from mpi4py import MPI

import mpidp
from mpidp.config import STORES, Config

pytestmark = pytest.mark.mpi

# In the flag's line (4 and 32 bytes) and just not, in the mailbox, in one block of slots, in more
# than all sets of slots hold; none a multiple of a cache line but the second.
COUNTS = [1, 8, 9, 255, 2050, 20_003, 1_000_003]


@pytest.fixture(scope="module", params=STORES)
def comm(request):
    with mpidp.Communicator(config=Config(timeout=30, stores=request.param)) as communicator:
        asked = request.param
        found = communicator.describe()["stores"]
        assert found in STORES[1:] if asked == "auto" else found == asked
        assert len(set(MPI.COMM_WORLD.allgather(found))) == 1
        yield communicator


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("count", COUNTS)
def test_all_reduce(comm, count, registered):
    for turn in range(3):
        x = comm.empty((count,), "float32") if registered else np.empty(count, np.float32)
        x[:] = values("float32", count, comm.rank, salt=turn)
        comm.all_reduce(x)
        assert not difference(x, reduced("float32", count, comm.world_size, salt=turn))


@pytest.mark.parametrize("shift", [1, 3])
@pytest.mark.parametrize("count", [7, 31, 9001, 300_001])
def test_misaligned_bytes(comm, count, shift):
    whole = np.zeros(count + shift, np.uint8)
    x = whole[shift:]
    x[:] = values("uint8", count, comm.rank)
    comm.all_reduce(x, op="max")
    assert not difference(x, reduced("uint8", count, comm.world_size, "max"))


@pytest.mark.parametrize("count", [3, 1000, 50_000])
def test_the_other_collectives(comm, count):
    size, rank = comm.world_size, comm.rank
    rows = comm.all_gather(np.full(count, rank, np.int32))
    assert (rows.reshape(size, count) == np.arange(size)[:, None]).all()
    swapped = comm.all_to_all(np.repeat(np.arange(size, dtype=np.int32) + 100 * rank, count))
    assert (swapped.reshape(size, count) == 100 * np.arange(size)[:, None] + rank).all()
    x = np.full(count, rank, np.int64)
    comm.broadcast(x, root=size - 1)
    assert (x == size - 1).all()
