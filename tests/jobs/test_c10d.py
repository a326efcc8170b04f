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


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("body", [COLLECTIVES, DDP], ids=["collectives", "ddp"])
def test_unmodified_torch_distributed(world_size, body):
    done = launch(world_size, "-c", PREAMBLE + body, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fine") == world_size
