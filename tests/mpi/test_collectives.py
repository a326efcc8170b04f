"""The collectives other than all_reduce: every algorithm, wiring and kind of memory."""

import numpy as np
import pytest
from inputs import difference, reduced, values

PATHS = [
    ("memory", "auto"),
    ("memory", "ring"),
    ("memory", "recursive_halving"),
    ("memory", "recursive_doubling"),
    ("memory", "mpi"),
    ("slots", "auto"),
    ("nodes", "auto"),
    ("messages", "direct"),
    ("pieces", "direct"),
    ("pieces", "auto"),
]
AVAILABLE = {
    "reduce_scatter": ("ring", "recursive_halving"),
    "all_gather": ("ring", "recursive_doubling"),
    "broadcast": ("ring", "recursive_doubling"),
    "reduce": ("ring", "recursive_doubling"),
    "all_to_all": (),
}
CASES = [
    pytest.param(collective, path, id=f"{collective}-{path[0]}-{path[1]}")
    for collective, special in AVAILABLE.items()
    for path in PATHS
    if path[1] in ("auto", "direct", "mpi", *special)
]
COUNTS = [0, 1, 333, 5003, 70_001]
DTYPES = ["float32", "int8", "bfloat16", "complex128"]


def run(comm, collective, x, algorithm, salt):
    """The result of `collective` on x (one rank's input), and what it must be on this rank."""
    rank, world_size = comm.rank, comm.world_size
    count = x.size
    dtype = x.dtype.name
    root = salt % world_size
    everybody = [values(dtype, count, peer, salt=salt) for peer in range(world_size)]
    if collective == "all_gather":
        return comm.all_gather(x, algorithm=algorithm), np.stack(everybody)
    if collective == "broadcast":
        return comm.broadcast(x, root=root, algorithm=algorithm), everybody[root]
    total = reduced(dtype, count, world_size, salt=salt)
    if collective == "reduce":
        result = comm.reduce(x, root=root, algorithm=algorithm)
        if rank == root:
            return result, total
        assert result is None
        return x, everybody[rank]  # not changed
    block = count // world_size
    mine = slice(rank * block, (rank + 1) * block)
    if collective == "reduce_scatter":
        return comm.reduce_scatter(x, algorithm=algorithm), total[mine]
    return (
        comm.all_to_all(x, algorithm=algorithm),
        np.concatenate([one[mine] for one in everybody]),
    )


def counts_for(comm, collective):
    blocks = collective in ("reduce_scatter", "all_to_all")
    return [count * comm.world_size for count in COUNTS[:-1]] if blocks else COUNTS


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("collective", "path"), CASES)
def test_plain_arrays(communicators, collective, path, dtype):
    comm = communicators(path[0])
    lines = []
    for count in counts_for(comm, collective):
        if path[0] == "pieces" and count > 5003:
            continue
        for salt in range(2):  # twice, and with two roots
            found, expected = run(
                comm, collective, values(dtype, count, comm.rank, salt=salt), path[1], salt
            )
            wrong = difference(np.asarray(found), expected)
            if wrong:
                lines.append(f"{count=} {salt=}: {wrong}")
    assert not lines, "\n".join(lines)


@pytest.mark.mpi
@pytest.mark.parametrize("registered", ["all", "some"])
@pytest.mark.parametrize("collective", sorted(AVAILABLE))
def test_registered_arrays(comm, collective, registered):
    for count in counts_for(comm, collective):
        for salt in range(2):
            given = values("float32", count, comm.rank, salt=salt)
            x = given
            if registered == "all" or comm.rank % 2:
                x = comm.empty(count)
                x[:] = given
            found, expected = run(comm, collective, x, "auto", salt)
            assert not difference(np.asarray(found), expected), (count, salt)


@pytest.mark.mpi
def test_outputs_may_be_given(comm):
    world_size = comm.world_size
    x = values("float64", 12 * world_size, comm.rank)
    block = np.zeros((3, 4))
    assert comm.reduce_scatter(x, block) is block
    total = reduced("float64", 12 * world_size, world_size)
    assert not difference(block.reshape(-1), total[12 * comm.rank :][:12])
    out = np.zeros(12 * world_size * world_size)
    assert comm.all_gather(x, out) is out
    assert comm.reduce(x, np.zeros_like(x), root=0) is None or comm.rank == 0
    assert not difference(x, values("float64", 12 * world_size, comm.rank))


@pytest.mark.mpi
def test_all_gather_in_place(comm):
    out = np.zeros((comm.world_size, 40_001), np.float32)
    out[comm.rank] = values("float32", 40_001, comm.rank)
    comm.all_gather(out[comm.rank], out)
    for peer in range(comm.world_size):
        assert not difference(out[peer], values("float32", 40_001, peer))


@pytest.mark.mpi
@pytest.mark.parametrize("wiring", ["memory", "nodes", "messages"])
def test_barrier_waits_for_the_last(communicators, wiring):
    import time

    comm = communicators(wiring)
    comm.barrier()
    if comm.rank == comm.world_size - 1:
        time.sleep(0.2)
    start = time.monotonic()
    comm.barrier()
    waited = comm.all_gather(np.array([time.monotonic() - start]))[:, 0]
    assert waited[-1] < 0.15
    assert (waited[:-1] > 0.1).all()


@pytest.mark.mpi
@pytest.mark.parametrize("wiring", ["memory", "nodes"])
def test_objects(communicators, wiring):
    comm = communicators(wiring)
    given = {"rank": comm.rank, "text": "x" * (comm.rank * 5000)}
    everything = comm.all_gather_object(given)
    assert [one["rank"] for one in everything] == list(range(comm.world_size))
    assert comm.broadcast_object(given, root=comm.world_size - 1) == everything[-1]
