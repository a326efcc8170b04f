"""Tensors as NumPy arrays and back, and what ranks exchange of a module besides its gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpidp.errors import InvalidArgumentError, MpidpError
from mpidp.training.adapter import Leaf

if TYPE_CHECKING:
    from mpidp.communicator import Communicator

_DTYPES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
}


def as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """A tensor on the memory of `array`."""
    if array.dtype.name == "bfloat16":  # NumPy's and PyTorch's do not know each other
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """A NumPy array on the memory of a CPU tensor."""
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        tensor_bits: NDArray[Any] = tensor.view(torch.int16).numpy()
        return tensor_bits.view(ml_dtypes.bfloat16)
    array: NDArray[Any] = tensor.numpy()
    return array


def leaf_of(name: str, parameter: torch.nn.Parameter) -> Leaf:
    """What the reducer knows of a parameter. Raises where it cannot be exchanged."""
    if parameter.device.type != "cpu":
        raise MpidpError(f"parameter {name} is on {parameter.device}: this build has no CUDA part")
    if parameter.dtype not in _DTYPES:
        raise InvalidArgumentError(f"parameter {name} has dtype {parameter.dtype}")
    return Leaf(name, tuple(parameter.shape), _DTYPES[parameter.dtype])


def broadcast_module(module: torch.nn.Module, comm: Communicator, root: int = 0) -> None:
    """Gives every rank the root's parameters and buffers. Collective."""
    broadcast_tensors([*module.parameters(), *module.buffers()], comm, root)


def broadcast_tensors(tensors: Iterable[torch.Tensor], comm: Communicator, root: int = 0) -> None:
    """Gives every rank the root's values, with one broadcast for each dtype. Collective."""
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor.detach())
    for group in groups.values():
        alone = len(group) == 1 and group[0].is_contiguous()
        flat = group[0] if alone else torch.cat([tensor.reshape(-1) for tensor in group])
        comm.broadcast(as_array(flat), root=root)
        if not alone and comm.rank != root:
            offset = 0
            for tensor in group:
                tensor.copy_(flat[offset : offset + tensor.numel()].view(tensor.shape))
                offset += tensor.numel()
