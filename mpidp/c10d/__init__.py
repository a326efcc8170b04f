"""The torch.distributed backend "mpidp": DistributedDataParallel and its kin, unmodified, over MPI.

    import torch.distributed as dist
    import mpidp.c10d

    mpidp.c10d.init_process_group()          # rank and size from MPI: no MASTER_ADDR, no torchrun
    model = torch.nn.parallel.DistributedDataParallel(model)

Importing this module registers the backend, so `dist.init_process_group("mpidp", ...)` works too,
with any rendezvous. CPU tensors only. Collectives run asynchronously, in the order of their calls,
on the communicator's progress thread; a second thread completes their futures, and a third those of
messages (send, receive, scatter, gather, all-to-all of uneven parts), in whatever order they end.
An operation that passes the group's timeout raises `CollectiveTimeoutError` from its `wait`.
"""

from __future__ import annotations

import os
import tempfile
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from mpi4py import MPI

from mpidp.c10d.group import ProcessGroup
from mpidp.communicator import Communicator

__all__ = ["ProcessGroup", "init_process_group"]


def init_process_group(timeout: timedelta | None = None) -> None:
    """`torch.distributed.init_process_group` for the ranks of MPI.COMM_WORLD. Collective.

    The rendezvous is a file in rank 0's temporary folder, known to all by MPI; it holds no data but
    torch's own bookkeeping, and torch removes it when the last rank has destroyed the group. On
    several nodes that folder must be shared: set TMPDIR, or give torch a store of your own.
    """
    world = MPI.COMM_WORLD
    path = None
    if world.rank == 0:
        descriptor, path = tempfile.mkstemp(prefix="mpidp-c10d-")
        os.close(descriptor)
    path = world.bcast(path)
    options = {} if timeout is None else {"timeout": timeout}
    dist.init_process_group(
        "mpidp",
        store=dist.FileStore(path, world.size),
        rank=world.rank,
        world_size=world.size,
        **options,
    )


def _create(options: Any, _: Any = None) -> ProcessGroup:
    """What torch calls on every rank of a new group."""
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    world = MPI.COMM_WORLD
    if ranks == list(range(world.size)):
        base, owned = world, False
    else:
        base = world.Create_group(world.group.Incl(ranks), tag=len(ranks))
        owned = True
    timeout = options.timeout.total_seconds()
    comm = Communicator(base, timeout=timeout)
    p2p = base.Dup()
    if owned:
        base.Free()
    return ProcessGroup(comm, p2p, timeout)


dist.Backend.register_backend("mpidp", _create, extended_api=True, devices=["cpu"])
