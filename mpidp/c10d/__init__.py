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

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from mpi4py import MPI

from mpidp.c10d.group import ProcessGroup
from mpidp.communicator import Communicator
from mpidp.config import Config
from mpidp.launch import install_excepthook

__all__ = ["ProcessGroup", "init_process_group"]


def init_process_group(timeout: timedelta | None = None) -> None:
    """`torch.distributed.init_process_group` for the ranks of MPI.COMM_WORLD. Collective.

    torch's own bookkeeping goes through a TCPStore that rank 0 serves, on the loopback interface
    where all ranks share a node. MPI tells its port, so no MASTER_ADDR is needed; on several nodes
    all must resolve and reach rank 0's host name. An uncaught exception on one rank ends the job
    from here on (see `mpidp.launch`).
    """
    world = MPI.COMM_WORLD
    options = {} if timeout is None else {"timeout": timeout}
    dist.init_process_group(
        "mpidp",
        store=_store(world),
        rank=world.rank,
        world_size=world.size,
        **options,
    )
    # After torch, whose own hook would keep the text from being seen before the job ends.
    install_excepthook()


def _store(world: MPI.Comm) -> dist.Store:
    node = (socket.gethostname(), Config.from_environment().node_id)
    host = "127.0.0.1" if len(set(world.allgather(node))) == 1 else node[0]
    if world.rank == 0:
        # Bound here, so that no other program can take the port in between.
        listener = socket.create_server((host if host == "127.0.0.1" else "", 0))
        host, port = world.bcast((host, listener.getsockname()[1]))
        return dist.TCPStore(
            host, port, world.size, True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    host, port = world.bcast(None)
    return dist.TCPStore(host, port, world.size, False)


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
