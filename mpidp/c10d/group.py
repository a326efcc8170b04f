"""The process group: torch's collectives and messages, in terms of a Communicator and of MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from mpidp.adapters.torch import as_array
from mpidp.c10d.works import Completer, Messenger
from mpidp.communicator import Communicator
from mpidp.errors import InvalidArgumentError, MpidpError

# MPI counts in int: longer messages go in pieces.
_PIECE_BYTES = 1 << 30

_OPS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.PRODUCT: "prod",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
}


class ProcessGroup(dist.ProcessGroup):
    """A torch.distributed process group over an `mpidp.Communicator`."""

    def __init__(self, comm: Communicator, p2p: MPI.Comm, timeout: float) -> None:
        super().__init__(comm.rank, comm.world_size)
        self._comm = comm
        self._p2p = p2p
        self._completer = Completer()
        self._messenger = Messenger(timeout)
        # Messages of collectives take the one tag that users must not.
        self._own_tag = int(p2p.Get_attr(MPI.TAG_UB) or 0)
        self._name = self._description = ""

    # torch's names.
    def getBackendName(self) -> str:  # noqa: N802
        """The name that torch shows."""
        return "mpidp"

    def getGroupName(self) -> str:  # noqa: N802
        """By which functional collectives and DTensor find the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """torch chooses the name."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """What the group is for."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """torch describes the group."""
        self._description = description

    def shutdown(self) -> None:
        """Collective: completes what is pending and closes the communicator."""
        self._completer.close()
        self._messenger.close()
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
        """Rows of `given` to the ranks. Without split sizes all ranks get equally many.

        Split sizes are given on all ranks or on none.
        """
        flat, finish = _destination(output)
        if not output_split_sizes and not input_split_sizes:
            work = self._comm.all_to_all_async(_dense(given), _view(flat))
            return self._work([self._then(work, finish)], [output])
        size = self._comm.world_size
        sent = given.detach().contiguous()
        return self._exchange(
            "all_to_all_single",
            dict(enumerate(sent.split(_splits(input_split_sizes, sent, size)))),
            dict(enumerate(flat.split(_splits(output_split_sizes, flat, size)))),
            [output],
            finish,
        )

    def alltoall(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """inputs[r] to rank r; sizes may differ."""
        pairs = [_destination(output) for output in outputs]
        return self._exchange(
            "all_to_all",
            {peer: tensor.detach().contiguous() for peer, tensor in enumerate(inputs)},
            {peer: flat for peer, (flat, _) in enumerate(pairs)},
            list(outputs),
            *(finish for _, finish in pairs),
        )

    def scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Any
    ) -> Any:
        """inputs[0][r] of the root into outputs[0] of rank r."""
        flat, finish = _destination(outputs[0])
        mine = inputs[0] if self._comm.rank == opts.rootRank else []
        return self._exchange(
            "scatter",
            {peer: tensor.detach().contiguous() for peer, tensor in enumerate(mine)},
            {opts.rootRank: flat},
            list(outputs),
            finish,
        )

    def gather(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any
    ) -> Any:
        """inputs[0] of rank r into outputs[0][r] of the root."""
        mine = outputs[0] if self._comm.rank == opts.rootRank else []
        pairs = [_destination(output) for output in mine]
        return self._exchange(
            "gather",
            {opts.rootRank: inputs[0].detach().contiguous()},
            {peer: flat for peer, (flat, _) in enumerate(pairs)},
            list(mine),
            *(finish for _, finish in pairs),
        )

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
        self._check_tag(tag)
        buffers = [tensor.detach().contiguous() for tensor in tensors]
        requests = [r for b in buffers for r in self._requests(self._p2p.Isend, b, peer, tag)]
        return self._messenger.submit(
            requests, keep=buffers, finish=_nothing, what=f"send to rank {peer}", result=[]
        )

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int = 0) -> Any:
        """From one rank, through MPI."""
        self._check_tag(tag)
        pairs = [_destination(tensor) for tensor in tensors]
        requests = [r for b, _ in pairs for r in self._requests(self._p2p.Irecv, b, peer, tag)]
        return self._messenger.submit(
            requests,
            keep=pairs,
            finish=_Sequence(*(finish for _, finish in pairs)),
            what=f"receive from {'any rank' if peer == MPI.ANY_SOURCE else f'rank {peer}'}",
            result=list(tensors),
        )

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> Any:
        """From whoever sends first; the work's `_source_rank()` tells who did."""
        if len(tensors) != 1 or tensors[0].nbytes > _PIECE_BYTES:
            raise InvalidArgumentError(
                f"a receive from any rank takes one tensor of up to {_PIECE_BYTES} bytes"
            )
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    def _exchange(
        self,
        what: str,
        sends: dict[int, torch.Tensor],
        receives: dict[int, torch.Tensor],
        result: Any,
        *finish: Callable[[], None],
    ) -> Any:
        """A collective made of messages, for sizes that differ by rank."""
        tag = self._own_tag
        requests = [
            request
            for start, tensors in ((self._p2p.Irecv, receives), (self._p2p.Isend, sends))
            for peer, tensor in tensors.items()
            for request in self._requests(start, tensor, peer, tag)
        ]
        return self._messenger.submit(
            requests, keep=(sends, receives), finish=_Sequence(*finish), what=what, result=result
        )

    @staticmethod
    def _requests(
        start: Callable[..., MPI.Request], tensor: torch.Tensor, peer: int, tag: int
    ) -> list[MPI.Request]:
        data = _bytes(_dense(tensor))
        return [
            start([data[offset : offset + _PIECE_BYTES], MPI.BYTE], peer, tag)
            for offset in range(0, max(data.size, 1), _PIECE_BYTES)
        ]

    def _check_tag(self, tag: int) -> None:
        if not 0 <= tag < self._own_tag:
            raise InvalidArgumentError(f"tag={tag}: expected 0 <= tag < {self._own_tag}")

    def _in_place(
        self, collective: Callable[..., Any], tensor: torch.Tensor, **options: Any
    ) -> Any:
        flat, finish = _destination(tensor, copy=True)
        return self._then(collective(_view(flat), **options), finish)

    @staticmethod
    def _then(work: Any, finish: Callable[..., None], *args: Any) -> _Sequence:
        return _Sequence(work.wait, lambda: finish(*args))

    def _work(self, finishers: Sequence[Callable[[], Any]], result: Any) -> Any:
        return self._completer.submit(_Sequence(*finishers), result)


class _Sequence:
    """Calls one thing after another."""

    def __init__(self, *steps: Callable[[], Any]) -> None:
        self._steps = steps

    def __call__(self) -> None:
        for step in self._steps:
            step()


def _nothing() -> None:
    pass


def _splits(sizes: Sequence[int], tensor: torch.Tensor, world_size: int) -> list[int]:
    """The rows for each rank."""
    rows = tensor.shape[0]
    if not sizes:
        if rows % world_size:
            raise InvalidArgumentError(f"{rows} rows cannot be split evenly by {world_size} ranks")
        return [rows // world_size] * world_size
    if len(sizes) != world_size or sum(sizes) != rows:
        raise InvalidArgumentError(
            f"split sizes {list(sizes)}: expected {world_size} that add up to {rows} rows"
        )
    return list(sizes)


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
