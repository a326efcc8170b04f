"""Sparse gradients of embeddings: exchanged as rows, and sparse again after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from mpidp.adapters.torch.tensors import as_array, as_tensor
from mpidp.reducer.sparse import SparseRows, all_reduce_rows, coalesce

if TYPE_CHECKING:
    from mpidp.communicator import Communicator


def sparse_parameters(module: torch.nn.Module) -> set[int]:
    """The ids of the parameters whose gradients are sparse: tables of embeddings made so.

    A table that another module uses too, such as a tied output layer, gets dense gradients.
    """
    sparse: set[int] = set()
    dense: set[int] = set()
    for part in module.modules():
        is_sparse = isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.sparse
        ids = {id(parameter) for parameter in part.parameters(recurse=False)}
        (sparse if is_sparse else dense).update(ids)
    return sparse - dense


def all_reduce_sparse(
    comm: Communicator, parameters: Sequence[torch.nn.Parameter], divisor: float
) -> None:
    """Sets each `.grad` to the ranks' sum over `divisor`, coalesced. Collective.

    Where no rank has a gradient it stays None.
    """
    if not parameters:
        return
    used = np.array([p.grad is not None for p in parameters], dtype=np.int64)
    comm.all_reduce(used)
    for parameter, users in zip(parameters, used, strict=True):
        if users:
            reduced = all_reduce_rows(comm, _rows_of(parameter)).rows
            values = as_tensor(np.ascontiguousarray(reduced.values))
            if divisor not in (0, 1):
                values = values / divisor
            indices = torch.from_numpy(reduced.indices)[None]
            parameter.grad = torch.sparse_coo_tensor(
                indices, values, parameter.shape, is_coalesced=True, check_invariants=False
            )


def _rows_of(parameter: torch.nn.Parameter) -> SparseRows:
    gradient = parameter.grad
    if gradient is None:
        gradient = torch.sparse_coo_tensor(
            torch.empty((1, 0), dtype=torch.int64),
            torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype),
            parameter.shape,
            check_invariants=False,
        )
    if not gradient.is_sparse:
        gradient = gradient.to_sparse(1)
    gradient = gradient.detach()
    indices, values = gradient._indices()[0], gradient._values().contiguous()
    return coalesce(parameter.shape[0], indices.numpy(), as_array(values))
