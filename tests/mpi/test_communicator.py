"""A communicator's life: topology, settings, split, registered arrays, objects, exits."""

import dataclasses
import gc
import warnings

import numpy as np
import pytest
from mpi4py import MPI

import mpidp
from mpidp.config import Config
from mpidp.tuning import Entry, Table

WORLD = MPI.COMM_WORLD


@pytest.mark.mpi
def test_topology_of_one_node(comm):
    assert (comm.rank, comm.world_size) == (WORLD.rank, WORLD.size)
    assert (comm.local_rank, comm.local_size) == (WORLD.rank, WORLD.size)
    assert (comm.node_rank, comm.num_nodes) == (0, 1)
    assert comm.timeout == 30
    assert not comm.closed


@pytest.mark.mpi
def test_topology_of_emulated_nodes(communicators):
    comm = communicators("nodes")
    assert comm.num_nodes == (WORLD.size + 1) // 2
    assert (comm.node_rank, comm.local_rank) == divmod(WORLD.rank, 2)
    first = 2 * comm.node_rank
    assert comm.local_size == min(2, WORLD.size - first)


@pytest.mark.mpi
def test_describe_is_plain_and_complete(communicators):
    described = communicators("messages").describe()
    assert described["world_size"] == WORLD.size
    assert described["tuning_table"] == "built-in"
    assert described["mpi_library"].split()[0] in MPI.Get_library_version()
    assert set(described["algorithms"]) >= {"all_reduce", "all_gather", "all_to_all"}
    for rules in described["algorithms"].values():
        assert rules[-1][0] is None


@pytest.mark.mpi
def test_the_users_communicator_is_left_alone():
    mine = WORLD.Dup()
    with mpidp.Communicator(mine) as comm:
        request = mine.irecv(source=(comm.rank - 1) % comm.world_size, tag=1)
        comm.all_reduce(np.ones(1000))
        mine.send("mine", dest=(comm.rank + 1) % comm.world_size, tag=1)
        assert request.wait() == "mine"
    assert mine.allreduce(1) == WORLD.size
    mine.Free()


@pytest.mark.mpi
@pytest.mark.parametrize("wrong", [MPI.COMM_NULL, 3, "world"])
def test_what_is_no_communicator_is_refused(wrong):
    with pytest.raises(mpidp.InvalidArgumentError, match="intra-communicator"):
        mpidp.Communicator(wrong)


@pytest.mark.mpi
def test_rank_0s_settings_count():
    own = Config(timeout=20 + WORLD.rank, shared_memory=WORLD.rank != 0, slot_bytes=4096)
    with mpidp.Communicator(config=own) as comm:
        assert comm.timeout == 20
        assert not comm.describe()["shared_memory"]
        x = np.full(5000, 1.0)
        assert (comm.all_reduce(x) == WORLD.size).all()
    with mpidp.Communicator(timeout=7, config=own) as comm:
        assert comm.timeout == 7


@pytest.mark.mpi
def test_a_wrong_setting_on_one_rank_is_raised_on_all(monkeypatch):
    last = WORLD.size - 1
    if WORLD.rank == last:
        monkeypatch.setenv("MPIDP_SLOT_BYTES", "tiny")
    with pytest.raises(mpidp.InvalidArgumentError, match="MPIDP_SLOT_BYTES='tiny'") as caught:
        mpidp.Communicator()
    if WORLD.rank != last:
        assert caught.value.ranks == [last]


@pytest.mark.mpi
def test_a_missing_tuning_file_is_raised_on_all():
    config = Config(tuning_file="/nowhere/table.json")
    with pytest.raises(mpidp.InvalidArgumentError, match="cannot be read"):
        mpidp.Communicator(config=config)


@pytest.mark.mpi
def test_a_tuning_file_decides(tmp_path):
    table = Table(
        "mine",
        (Entry(("all_reduce",), ((64, "recursive_doubling"), (None, "ring"))),),
    )
    path = tmp_path / "table.json"
    path.write_text(table.to_json())
    with mpidp.Communicator(config=Config(timeout=30, tuning_file=str(path))) as comm:
        described = comm.describe()
        assert described["tuning_table"] == "mine"
        assert described["algorithms"]["all_reduce"] == [[64, "recursive_doubling"], [None, "ring"]]
        for count in (4, 400):
            assert (comm.all_reduce(np.ones(count)) == WORLD.size).all()


@pytest.mark.mpi
def test_a_forced_algorithm_decides_where_it_exists():
    config = Config(timeout=30, algorithm="recursive_halving")
    with mpidp.Communicator(config=config) as comm:
        algorithms = comm.describe()["algorithms"]
        assert algorithms["all_reduce"] == [[None, "recursive_halving"]]
        assert algorithms["broadcast"] == [[None, "direct"]]
        assert (comm.all_reduce(np.ones(999)) == WORLD.size).all()


@pytest.mark.mpi
def test_split_by_parity(comm):
    part = comm.split(comm.rank % 2)
    members = list(range(comm.rank % 2, comm.world_size, 2))
    with part:
        assert part.world_size == len(members)
        assert members[part.rank] == comm.rank
        assert part.timeout == comm.timeout
        x = np.full(3000, comm.rank, np.int64)
        assert (part.all_reduce(x) == sum(members)).all()
    # The parent is as before.
    assert (comm.all_reduce(np.ones(3)) == comm.world_size).all()


@pytest.mark.mpi
def test_split_orders_by_key_and_leaves_out_none(comm):
    reverse = comm.split(0, key=-comm.rank)
    assert reverse.rank == comm.world_size - 1 - comm.rank
    reverse.close()
    without_0 = comm.split(None if comm.rank == 0 else 5)
    assert (without_0 is None) == (comm.rank == 0)
    if without_0 is not None:
        with without_0:
            assert without_0.world_size == comm.world_size - 1
            assert without_0.all_gather_object(comm.rank) == list(range(1, comm.world_size))


@pytest.mark.mpi
def test_split_by_node_and_again(communicators):
    comm = communicators("nodes")
    with comm.split(comm.node_rank) as node, node.split(node.rank) as alone:
        assert node.world_size == comm.local_size
        assert node.rank == comm.local_rank
        assert alone.world_size == 1
        assert (alone.all_reduce(np.ones(3), op="mean") == 1).all()


@pytest.mark.mpi
def test_split_waits_for_pending_work(comm):
    arrays = [np.ones(50_000) for _ in range(4)]
    works = [comm.all_reduce_async(x) for x in arrays]
    with comm.split(0) as part:
        assert (part.all_reduce(np.ones(3)) == comm.world_size).all()
    assert all(work.done() for work in works)
    assert all((x == comm.world_size).all() for x in arrays)


@pytest.mark.mpi
@pytest.mark.parametrize(("color", "key"), [(-1, 0), (1.5, 0), (True, 0), ("a", 0), (0, "b")])
def test_split_refuses(comm, color, key):
    with pytest.raises(mpidp.InvalidArgumentError, match="expected an integer"):
        comm.split(color, key)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3, 5), "float32"), (7, "bfloat16"), ((), "int64"), ((0,), "float64"), ((2, 0, 3), "bool")],
)
def test_registered_arrays(comm, shape, dtype):
    x = comm.empty(shape, dtype)
    assert x.shape == (shape if isinstance(shape, tuple) else (shape,))
    assert x.dtype.name == dtype
    assert x.flags.c_contiguous
    assert x.flags.writeable
    x.fill(1)
    comm.broadcast(x)
    assert (x == 1).all()


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (((3,), "float99"), mpidp.InvalidBufferError, "not supported"),
        (((3,), object), mpidp.InvalidBufferError, "object"),
        (((-3,), "float32"), mpidp.InvalidArgumentError, ">= 0"),
        (((1.5,), "float32"), mpidp.InvalidArgumentError, "integers"),
        (((3,), "float32", "tpu"), mpidp.InvalidArgumentError, "device 'tpu'"),
        (((3,), "float32", "cuda:0"), mpidp.CudaError, "no CUDA part"),
    ],
)
def test_empty_refuses(comm, no_cuda_part, arguments, error, message):
    with pytest.raises(error, match=message):
        comm.empty(*arguments)


class Unpicklable:
    def __reduce__(self):
        raise RuntimeError("not me")


@pytest.mark.mpi
def test_an_object_that_cannot_be_pickled_is_an_error_on_all_ranks(comm):
    last = comm.world_size - 1
    obj = Unpicklable() if comm.rank == last else comm.rank
    with pytest.raises(mpidp.MpidpError, match="cannot pickle"):
        comm.broadcast_object(obj, root=last)
    with pytest.raises(mpidp.MpidpError, match="cannot pickle") as caught:
        comm.all_gather_object(obj)
    assert caught.value.ranks == [last]
    assert comm.all_gather_object(comm.rank) == list(range(comm.world_size))


@pytest.mark.mpi
def test_leaving_by_an_exception_does_not_wait():
    comm = mpidp.Communicator(timeout=30)

    def leave():
        with comm:
            comm.all_reduce(np.ones(3))
            raise KeyError

    with pytest.raises(KeyError):
        leave()
    assert comm.closed
    assert repr(comm) == "<mpidp.Communicator, closed>"


@pytest.mark.mpi
def test_a_communicator_that_is_dropped_says_so():
    comm = mpidp.Communicator(timeout=30)
    assert f"rank {WORLD.rank} of {WORLD.size}" in repr(comm)
    comm.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del comm
        gc.collect()
    assert any("unclosed <mpidp.Communicator" in str(warning.message) for warning in caught)


@pytest.mark.mpi
def test_config_survives_its_trip_between_ranks():
    config = Config(timeout=3, slot_bytes=8192)
    assert WORLD.bcast(config) == dataclasses.replace(config)
