"""The torch.distributed backend "mpidp": DistributedDataParallel and its kin, unmodified, over MPI.

    import torch.distributed as dist
    import mpidp.c10d

    mpidp.c10d.init_process_group()          # rank and size from MPI: no MASTER_ADDR, no torchrun
    model = torch.nn.parallel.DistributedDataParallel(model)

Importing this module registers the backend, so `dist.init_process_group("mpidp", ...)` works too,
with any rendezvous. CPU tensors only. Collectives run asynchronously, in the order of their calls,
on the communicator's progress thread; a second thread completes their futures.
"""

from __future__ import annotations

import queue
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from mpidp.adapters.torch import as_array
from mpidp.communicator import Communicator
from mpidp.errors import InvalidArgumentError, MpidpError

_OPS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.PRODUCT: "prod",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
}


def init_process_group(timeout: timedelta | None = None) -> None:
    """`torch.distributed.init_process_group` for the ranks of MPI.COMM_WORLD. Collective.

    The rendezvous is a file in the temporary folder of each node's first rank, known to all by
    MPI; it holds no data but torch's own bookkeeping. On several nodes that folder must be shared:
    set TMPDIR, or give torch a store of your own.
    """
    world = MPI.COMM_WORLD
    name = tempfile.mkdtemp(prefix="mpidp-c10d-") if world.rank == 0 else None
    folder = Path(world.bcast(name))
    options = {} if timeout is None else {"timeout": timeout}
    dist.init_process_group(
        "mpidp",
        store=dist.FileStore(str(folder / "store"), world.size),
        rank=world.rank,
        world_size=world.size,
        **options,
    )


class _Completer:
    """Completes futures in the order of the collectives' calls, on a thread of its own."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="mpidp-c10d", daemon=True)
        self._thread.start()

    def submit(self, finish: Callable[[], Any]) -> Any:
        """A torch Future of what `finish` returns; it is called when its turn comes."""
        future: Any = torch.futures.Future()
        self._queue.put((finish, future))
        return future

    def close(self) -> None:
        """Ends the thread once what was submitted is done."""
        self._queue.put(None)
        self._thread.join()

    def _loop(self) -> None:
        while True:
            entry = self._queue.get()
            if entry is None:
                return
            finish, future = entry
            try:
                future.set_result(finish())
            except Exception as error:  # handed to whoever waits for the future
                # DistributedDataParallel waits in C++, which cannot show a Python error.
                traceback.print_exception(error)
                future.set_exception(error)


class ProcessGroup(dist.ProcessGroup):
    """A torch.distributed process group over an `mpidp.Communicator`."""

    def __init__(self, comm: Communicator, p2p: MPI.Comm) -> None:
        super().__init__(comm.rank, comm.world_size)
        self._comm = comm
        self._p2p = p2p
        self._completer = _Completer()

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """The name that torch shows."""
        return "mpidp"

    def shutdown(self) -> None:
        """Collective: completes what is pending and closes the communicator."""
        self._completer.close()
        self._comm.close()
        self._p2p.Free()

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """In place."""
        op = _op_of(opts.reduceOp if opts is not None else dist.ReduceOp.SUM)
        works = [self._in_place(self._comm.all_reduce_async, t, op=op) for t in tensors]
        return self._work(works, list(tensors))

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """In place, tensor by tensor."""
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        """In place."""
        root = opts.rootRank
        works = [self._in_place(self._comm.broadcast_async, t, root=root) for t in tensors]
        return self._work(works, list(tensors))

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        """In place on the root."""
        op, root = _op_of(opts.reduceOp), opts.rootRank
        works = [self._in_place(self._comm.reduce_async, t, op=op, root=root) for t in tensors]
        return self._work(works, list(tensors))

    def allgather(
        self,
        outputs: Sequence[Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        opts: Any = None,
    ) -> Any:
        """Rank r's input into outputs[i][r]."""
        finishers = []
        for out, given in zip(outputs, inputs, strict=True):
            flat = torch.empty((self._comm.world_size, given.numel()), dtype=given.dtype)
            work = self._comm.all_gather_async(_dense(given), _view(flat))
            finishers.append(self._then(work, _scatter_into, flat, out))
        return self._work(finishers, [list(out) for out in outputs])

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        flat, finish = _destination(output)
        work = self._comm.all_gather_async(_dense(given), _view(flat))
        return self._work([self._then(work, finish)], [output])

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """Several all-gathers as one work."""
        finishers = []
        for output, given in zip(outputs, inputs, strict=True):
            flat, finish = _destination(output)
            work = self._comm.all_gather_async(_dense(given), _view(flat))
            finishers.append(self._then(work, finish))
        return self._work(finishers, list(outputs))

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Any
    ) -> Any:
        """The sum over ranks of inputs[i][rank] into outputs[i]."""
        op = _op_of(opts.reduceOp)
        finishers = []
        for output, parts in zip(outputs, inputs, strict=True):
            flat, finish = _destination(output)
            whole = torch.cat([part.reshape(-1) for part in parts])
            work = self._comm.reduce_scatter_async(_dense(whole), _view(flat), op=op)
            finishers.append(self._then(work, finish))
        return self._work(finishers, list(outputs))

    def _reduce_scatter_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any) -> Any:
        return self.reduce_scatter_tensor_coalesced([output], [given], opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any
    ) -> Any:
        """Several reduce-scatters as one work."""
        op = _op_of(opts.reduceOp)
        finishers = []
        for output, given in zip(outputs, inputs, strict=True):
            flat, finish = _destination(output)
            work = self._comm.reduce_scatter_async(_dense(given), _view(flat), op=op)
            finishers.append(self._then(work, finish))
        return self._work(finishers, list(outputs))

    def alltoall_base(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> Any:
        """Equal splits only."""
        if len(set(output_split_sizes)) > 1 or len(set(input_split_sizes)) > 1:
            raise InvalidArgumentError("all_to_all_single over mpidp needs equal split sizes")
        flat, finish = _destination(output)
        work = self._comm.all_to_all_async(_dense(given), _view(flat))
        return self._work([self._then(work, finish)], [output])

    # The names of torch 2.13 and later for the same.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None) -> Any:
        """All ranks meet."""
        return self._work([self._comm.barrier_async().wait], [])

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int = 0) -> Any:
        """To one rank, through MPI."""
        buffers = [_dense(tensor) for tensor in tensors]
        requests = [self._p2p.Isend([_bytes(b), MPI.BYTE], peer, tag) for b in buffers]
        return self._work([request.wait for request in requests], [], keep=buffers)

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int = 0) -> Any:
        """From one rank, through MPI."""
        finishers = []
        for tensor in tensors:
            flat, finish = _destination(tensor)
            request = self._p2p.Irecv([_bytes(_view(flat)), MPI.BYTE], peer, tag)
            finishers.append(_Sequence(request.wait, finish))
        return self._work(finishers, list(tensors))

    def _in_place(
        self, collective: Callable[..., Any], tensor: torch.Tensor, **options: Any
    ) -> Any:
        flat, finish = _destination(tensor, copy=True)
        return self._then(collective(_view(flat), **options), finish)

    @staticmethod
    def _then(work: Any, finish: Callable[..., None], *args: Any) -> _Sequence:
        return _Sequence(work.wait, lambda: finish(*args))

    def _work(
        self, finishers: Sequence[Callable[[], Any]], result: Any, keep: object = None
    ) -> Any:
        def finish(kept: object = keep) -> Any:  # what MPI still reads lives as long as this
            for one in finishers:
                one()
            return result

        future = self._completer.submit(finish)
        return torch._C._distributed_c10d._create_work_from_future(future)


class _Sequence:
    """Calls one thing after another."""

    def __init__(self, *steps: Callable[[], Any]) -> None:
        self._steps = steps

    def __call__(self) -> None:
        for step in self._steps:
            step()


def _op_of(op: Any) -> str:
    for known, name in _OPS.items():
        if op == known:
            return name
    raise InvalidArgumentError(
        f"reduction {op} is not supported: use SUM, AVG, PRODUCT, MIN or MAX"
    )


def _view(tensor: torch.Tensor) -> Any:
    return as_array(tensor.detach())


def _dense(tensor: torch.Tensor) -> Any:
    if tensor.device.type != "cpu":
        raise MpidpError(f"the mpidp backend has no CUDA part, and a tensor is on {tensor.device}")
    return _view(tensor.detach().contiguous())


def _destination(
    tensor: torch.Tensor, copy: bool = False
) -> tuple[torch.Tensor, Callable[[], None]]:
    """(contiguous memory, what brings it back to the tensor). `copy` fills it from the tensor."""
    if tensor.device.type != "cpu":
        raise MpidpError(f"the mpidp backend has no CUDA part, and a tensor is on {tensor.device}")
    data = tensor.detach()
    if data.is_contiguous():
        return data, lambda: None
    dense = data.contiguous() if copy else torch.empty(data.shape, dtype=data.dtype)

    def bring_back() -> None:
        data.copy_(dense)

    return dense, bring_back


def _scatter_into(flat: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for row, output in zip(flat, outputs, strict=True):
            output.copy_(row.view(output.shape))


def _bytes(array: Any) -> Any:
    return array.reshape(-1).view("uint8")


def _create(options: Any, _: Any = None) -> ProcessGroup:
    """What torch calls on every rank of a new group."""
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    world = MPI.COMM_WORLD
    if len(ranks) == world.size:
        base, owned = world, False
    else:
        base = world.Create_group(world.group.Incl(ranks), tag=len(ranks))
        owned = True
    comm = Communicator(base, timeout=options.timeout.total_seconds())
    p2p = base.Dup()
    if owned:
        base.Free()
    return ProcessGroup(comm, p2p)


dist.Backend.register_backend("mpidp", _create, extended_api=True, devices=["cpu"])
