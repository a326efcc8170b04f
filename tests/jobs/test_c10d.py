"""The torch.distributed backend, in jobs of its own: a process has one default group."""

from __future__ import annotations

import pytest
from launching import launch

pytest.importorskip("torch")

PREAMBLE = """
import copy, warnings
import torch
import torch.distributed as dist
import mpidp.c10d

warnings.simplefilter("ignore")
torch.set_num_threads(1)
mpidp.c10d.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
"""

COLLECTIVES = """
for dtype in (torch.float32, torch.bfloat16, torch.int64):
    total = size * (size - 1) // 2
    t = torch.full((5,), rank, dtype=dtype)
    dist.all_reduce(t)
    assert (t == total).all()
    rows = [torch.zeros(3, dtype=dtype) for _ in range(size)]
    dist.all_gather(rows, torch.full((3,), rank, dtype=dtype))
    assert all((row == i).all() for i, row in enumerate(rows))
    whole = torch.zeros(4 * size, dtype=dtype)
    dist.all_gather_into_tensor(whole, torch.full((4,), rank, dtype=dtype))
    assert (whole.view(size, 4) == torch.arange(size)[:, None]).all()
    part = torch.zeros(2, dtype=dtype)
    dist.reduce_scatter_tensor(part, torch.full((2 * size,), rank, dtype=dtype))
    assert (part == total).all()
    dist.reduce_scatter(part, [torch.full((2,), rank + i, dtype=dtype) for i in range(size)])
    assert (part == total + size * rank).all()
    swapped = torch.zeros(size, dtype=dtype)
    dist.all_to_all_single(swapped, torch.full((size,), rank, dtype=dtype))
    assert (swapped == torch.arange(size)).all()
    b = torch.full((3,), rank, dtype=dtype)
    dist.broadcast(b, size - 1)
    assert (b == size - 1).all()
    r = torch.full((3,), rank, dtype=dtype)
    dist.reduce(r, 0)
    assert (r == (total if rank == 0 else rank)).all()
t = torch.full((4,), float(rank))
dist.all_reduce(t, op=dist.ReduceOp.AVG)
assert (t == (size - 1) / 2).all()
t = torch.arange(6.0).reshape(2, 3).t()
dist.all_reduce(t)
assert (t == size * torch.arange(6.0).reshape(2, 3).t()).all()
works = [dist.all_reduce(torch.ones(10_000), async_op=True) for _ in range(8)]
for work in works:
    work.wait()
if size > 1:
    if rank == 0:
        dist.send(torch.arange(4.0), 1)
    if rank == 1:
        x = torch.zeros(4)
        dist.recv(x, 0)
        assert (x == torch.arange(4.0)).all()
everything = [None] * size
dist.all_gather_object(everything, {"rank": rank})
assert [one["rank"] for one in everything] == list(range(size))
dist.barrier()
group = dist.new_group(list(range((size + 1) // 2)))
if rank < (size + 1) // 2:
    t = torch.ones(2)
    dist.all_reduce(t, group=group)
    assert (t == (size + 1) // 2).all()
dist.destroy_process_group()
print("fine")
"""

DDP = """
torch.manual_seed(0)
reference = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
reference = reference.double()
model = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(reference), bucket_cap_mb=0.0001)
x = torch.randn(4 * size, 6, dtype=torch.float64)
mine = x[4 * rank : 4 * rank + 4]
optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, reference)]
for step in range(4):
    for optimizer in optimizers:
        optimizer.zero_grad()
    if step == 2:
        with model.no_sync():
            (model(mine) ** 2).mean().backward()
        (reference(x) ** 2).mean().backward()
    (model(mine) ** 2).mean().backward()
    (reference(x) ** 2).mean().backward()
    for optimizer in optimizers:
        optimizer.step()
for one, other in zip(model.parameters(), reference.parameters()):
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
dist.destroy_process_group()
print("fine")
"""

MESSAGES = """
# To each rank a number of rows of its own, from none on.
def rows(sender, receiver):
    return torch.full((sender + 2 * receiver, 2), 10.0 * sender + receiver)

given, expected = [[rows(rank, i) for i in range(size)], [rows(i, rank) for i in range(size)]]
out = torch.zeros(sum(len(one) for one in expected), 2)
dist.all_to_all_single(
    out, torch.cat(given), [len(one) for one in expected], [len(one) for one in given]
)
assert (out == torch.cat(expected)).all()
parts = [torch.zeros_like(one) for one in expected]
dist.all_to_all(parts, given)
assert all((one == other).all() for one, other in zip(parts, expected))
root = size - 1
one = torch.zeros(2, 3).t()
slices = [torch.full((3, 2), float(i)) for i in range(size)]
dist.scatter(one, slices if rank == root else None, root)
assert (one == rank).all()
found = [torch.zeros(3, 2) for _ in range(size)] if rank == root else None
dist.gather(one, found, root)
assert rank != root or all((x == i).all() for i, x in enumerate(found))
objects = [None]
dist.scatter_object_list(objects, [{"to": i} for i in range(size)], src=0)
assert objects[0] == {"to": rank}
came = torch.zeros(3)
ring = [
    dist.P2POp(dist.isend, torch.full((3,), float(rank)), (rank + 1) % size),
    dist.P2POp(dist.irecv, came, (rank - 1) % size),
]
for work in dist.batch_isend_irecv(ring):
    work.wait()
assert (came == (rank - 1) % size).all()
if size > 1:
    # A receive that waits for what follows the collective holds up neither it nor its future.
    if rank == 0:
        last = torch.zeros(1)
        receive = dist.irecv(last, 1, tag=7)
    dist.all_reduce(torch.ones(1))
    if rank == 0:
        dist.send(torch.ones(1), 1)
        receive.wait()
        assert last == 5
        total = sum(dist.recv(torch.zeros(1)) for _ in range(size - 1))
        assert total == size * (size - 1) // 2
    else:
        if rank == 1:
            dist.recv(torch.zeros(1), 0)
            dist.send(torch.full((1,), 5.0), 0, tag=7)
        dist.send(torch.ones(1), 0)
work = dist.all_reduce(torch.ones(2), async_op=True)
assert (work.get_future().then(lambda done: 2 * done.value()[0]).wait() == 2 * size).all()
assert work.is_completed()
dist.destroy_process_group()
print("fine")
"""

FUNCTIONAL = """
import torch.distributed._functional_collectives as fc
from torch.distributed.distributed_c10d import _coalescing_manager

group = dist.group.WORLD
assert (fc.all_reduce(torch.ones(3), "sum", group) == size).all()
assert (fc.broadcast(torch.full((2,), float(rank)), 0, group) == 0).all()
whole = fc.all_gather_tensor(torch.full((2, 1), float(rank)), 1, group)
assert (whole == torch.arange(float(size))).all()
assert (fc.reduce_scatter_tensor(torch.ones(2 * size), "avg", 0, group) == 1).all()
assert (fc.all_to_all_single(torch.full((size,), float(rank)), None, None, group)
        == torch.arange(float(size))).all()
for x, n in zip(fc.all_reduce_coalesced([torch.ones(3), torch.ones(2)], "sum", group), (3, 2)):
    assert len(x) == n and (x == size).all()
for x, n in zip(fc.all_gather_into_tensor_coalesced([torch.ones(3), torch.ones(2)], group), (3, 2)):
    assert len(x) == n * size and (x == 1).all()
(x,) = fc.reduce_scatter_tensor_coalesced([torch.ones(size)], "sum", [0], group)
assert x == size
a, b = torch.ones(2), torch.ones(3)
with _coalescing_manager(group):
    dist.all_reduce(a)
    dist.all_reduce(b)
assert (a == size).all() and (b == size).all()
parts = [torch.zeros(1), torch.zeros(2)]
with _coalescing_manager(group, async_ops=True) as works:
    dist.reduce_scatter_tensor(parts[0], torch.ones(size))
    dist.reduce_scatter_tensor(parts[1], torch.ones(2 * size))
works.wait()
assert all((part == size).all() for part in parts)
dist.destroy_process_group()
print("fine")
"""

HOOKS = """
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join

def custom(state, bucket):
    future = dist.all_reduce(bucket.buffer().div_(size), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])

def bfloat16(state, bucket):  # torch refuses its own hook of this kind, by name, without CUDA
    return default_hooks.bf16_compress_hook(state, bucket)

torch.manual_seed(0)
net = torch.nn.Linear(6, 3)
x = torch.randn(2 * size, 6)
mine = x[2 * rank : 2 * rank + 2]
(net(x) ** 2).mean().backward()
hooks = ((custom, 1e-6), (bfloat16, 2**-7), (default_hooks.fp16_compress_hook, 2**-9))
for hook, tolerance in hooks:
    model = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(net))
    model.zero_grad()
    model.register_comm_hook(None, hook)
    (model(mine) ** 2).mean().backward()
    for one, other in zip(model.parameters(), net.parameters()):
        scale = float(other.grad.abs().max())
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=tolerance * scale)

# Rank r has r + 1 batches; DDP divides by the ranks that are still there.
model = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(net))
reference = copy.deepcopy(net)
optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (model, reference)]
with Join([model], divide_by_initial_world_size=False):
    for step in range(rank + 1):
        optimizers[0].zero_grad()
        (model(mine) ** 2).mean().backward()
        optimizers[0].step()
for step in range(size):
    optimizers[1].zero_grad()
    (reference(x[2 * step :]) ** 2).mean().backward()
    optimizers[1].step()
if rank == size - 1:  # who stays to the end; the others have stopped taking steps
    for one, other in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
dist.destroy_process_group()
print("fine")
"""

SHARDED = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module
)

mesh = init_device_mesh("cpu", (size,))
left, right = torch.arange(35.0).reshape(5, 7), torch.arange(21.0).reshape(7, 3)
for first in (Shard(0), Shard(1), Replicate()):
    one = distribute_tensor(left, mesh, [first])
    for then in (Shard(0), Shard(1), Replicate()):
        assert (one.redistribute(mesh, [then]).full_tensor() == left).all(), (first, then)
        product = one @ distribute_tensor(right, mesh, [then])
        for last in (Shard(0), Replicate()):
            found = product.redistribute(mesh, [last]).full_tensor()
            assert (found == left @ right).all(), (first, then, last)

torch.manual_seed(0)
def net():
    return torch.nn.Sequential(
        torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 7), torch.nn.Tanh(),
        torch.nn.Linear(7, 3),
    ).double()

reference = net()
model = copy.deepcopy(reference)
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
x = torch.randn(4 * size, 6, dtype=torch.float64)
optimizers = [torch.optim.AdamW(one.parameters(), 0.1) for one in (model, reference)]
for step in range(3):
    for one, optimizer, rows in (
        (model, optimizers[0], x[4 * rank : 4 * rank + 4]), (reference, optimizers[1], x)
    ):
        optimizer.zero_grad()
        (one(rows) ** 2).mean().backward()
        torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5)
        optimizer.step()
for one, other in zip(model.parameters(), reference.parameters()):
    assert one.to_local().numel() <= -(-other.shape[0] // size) * other[0].numel()
    torch.testing.assert_close(one.full_tensor(), other, rtol=1e-10, atol=1e-12)

reference = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.ReLU(), torch.nn.Linear(12, 6))
model = copy.deepcopy(reference)
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
rows = torch.randn(4, 6)
torch.testing.assert_close(model(rows), reference(rows))
model(rows).sum().backward()
reference(rows).sum().backward()
torch.testing.assert_close(model[0].weight.grad.full_tensor(), reference[0].weight.grad)
dist.destroy_process_group()
print("fine")
"""

TIMEOUT = """
import datetime, time
import mpidp

group = dist.new_group(list(range(size)), timeout=datetime.timedelta(seconds=1))
late = rank == size - 1
for what in (lambda: dist.all_reduce(torch.ones(2), group=group),
             lambda: dist.recv(torch.ones(2), size - 1, group=group)):
    if not late:
        start = time.monotonic()
        try:
            what()
        except mpidp.CollectiveTimeoutError as error:
            assert str(size - 1) in str(error), error
            assert 0.5 < time.monotonic() - start < 20
        else:
            raise AssertionError("no error")
print("fine", flush=True)
dist.barrier()
import os
os._exit(0)  # the group's collective cannot be completed any more
"""

CASES = {
    "collectives": COLLECTIVES,
    "messages": MESSAGES,
    "functional": FUNCTIONAL,
    "ddp": DDP,
    "hooks": HOOKS,
    "sharded": SHARDED,
}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_unmodified_torch_distributed(world_size, case):
    body = PREAMBLE + CASES[case]
    done = launch(world_size, "-c", body, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fine") == world_size


def test_an_error_on_one_rank_ends_the_job():
    body = "if rank == 1:\n    raise RuntimeError('no data')\ndist.all_reduce(torch.ones(2))"
    done = launch(2, "-c", PREAMBLE + body, timeout=60)
    assert done.returncode != 0
    assert "[rank 1] RuntimeError: no data" in done.stderr


def test_a_late_rank_is_named():
    done = launch(2, "-c", PREAMBLE + TIMEOUT, timeout=100)
    assert done.stdout.count("fine") == 2, done.stderr
