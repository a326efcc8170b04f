"""Batch normalization over the batch of all ranks.

Each rank computes count, mean and sum of squared deviations of its own part; all ranks gather them
and combine them in rank order by the pairwise formula of Chan, Golub and LeVeque ("Updating
formulae and a pairwise algorithm for computing sample variances", 1979), in float64. So all ranks
have the same bits, large means lose nothing to cancellation, and uneven parts weigh as they should.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from mpidp.errors import InvalidArgumentError

if TYPE_CHECKING:
    from mpidp.communicator import Communicator


class SyncBatchNorm(_BatchNorm):
    """Batch normalization of (N, C), (N, C, L), (N, C, H, W) or (N, C, D, H, W) over all ranks.

    In training mode its forward and its backward are collective, and give what
    `torch.nn.BatchNorm1d` to `3d` give for the concatenated batch: outputs, gradients and running
    statistics, the last with equal bits on all ranks. N may differ by rank and may be 0; such a
    rank must still run the backward, from a loss of zero that depends on the output. In eval mode
    nothing is exchanged, also where no running statistics are tracked.

    `comm` may be shared by many layers. It must not be the communicator that exchanges gradients,
    for those are launched by hooks in an order that may differ by rank; `convert_sync_batchnorm`
    sees to that. The other arguments are those of `torch.nn.BatchNorm2d`.

    Raises ValueError on all ranks where there is only one value per channel on all of them.
    """

    def __init__(
        self,
        num_features: int,
        comm: Communicator,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self._shared = _Shared(comm)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of 2 or more dimensions, got {input.dim()}")
        if input.shape[1] != self.num_features:
            raise ValueError(f"expected {self.num_features} channels, got {input.shape[1]}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The normalized input, of its shape and dtype."""
        self._check_input_dim(input)
        if not self.training:
            if self.running_mean is None and input.numel() == 0:
                return input
            return torch.nn.functional.batch_norm(
                input,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                self.running_mean is None,
                0.0,
                self.eps,
            )
        output, statistics = _normalize(input, self.weight, self.bias, self.eps, self._shared.comm)
        if self.running_mean is not None:
            self._track(statistics)
        return output

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _track(self, statistics: torch.Tensor) -> None:
        mean, biased, count = statistics[0], statistics[1], float(statistics[2, 0])
        if count == 0:
            return
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:  # the plain average over batches
                momentum = 1.0 / float(self.num_batches_tracked)
        assert momentum is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        variance = biased * (count / (count - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)


class _Shared:
    """A communicator that copies of a module share, since it cannot be copied."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def __deepcopy__(self, memo: Any) -> _Shared:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a module with a communicator cannot be pickled: save its state_dict()")


def convert_sync_batchnorm(model: torch.nn.Module, comm: Communicator) -> torch.nn.Module:
    """`model` with every BatchNorm1d to 3d (and torch's SyncBatchNorm) as a SyncBatchNorm.

    Collective: makes one communicator for all of them from `comm`. The parameters and buffers stay
    the same objects, so an optimizer may be made before or after. Modules inside `model` are
    replaced in place; use the returned one, since `model` itself may be a normalization.

        model = mt.data_parallel(mt.convert_sync_batchnorm(model, comm), comm)

    Raises `InvalidArgumentError` for a lazy layer that has not seen an input yet.
    """
    own = comm.split(0, comm.rank)
    assert own is not None  # every rank has the same color
    return _converted(model, own, {})


def _converted(
    module: torch.nn.Module, comm: Communicator, done: dict[int, torch.nn.Module]
) -> torch.nn.Module:
    if id(module) in done:  # one layer in two places stays one
        return done[id(module)]
    result = module
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        if isinstance(module, _LazyNormBase) and module.has_uninitialized_params():
            raise InvalidArgumentError("run one batch through a lazy layer before converting it")
        result = SyncBatchNorm(
            module.num_features,
            comm,
            module.eps,
            module.momentum,
            affine=False,
            track_running_stats=False,
        )
        result.affine, result.track_running_stats = module.affine, module.track_running_stats
        for name in ("weight", "bias"):
            setattr(result, name, getattr(module, name))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            setattr(result, name, getattr(module, name))
        result.training = module.training
    done[id(module)] = result
    # Not named_children, which leaves out the second place of a layer in two places.
    for name, child in list(module._modules.items()):
        replaced = None if child is None else _converted(child, comm, done)
        if replaced is not child:
            setattr(module, name, replaced)
    return result


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _normalize(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    comm: Communicator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, rows of mean, biased variance and count over all ranks, in float64)."""
    results: tuple[torch.Tensor, torch.Tensor] = _SyncBatchNormFunction.apply(
        x, weight, bias, eps, comm
    )
    return results


class _SyncBatchNormFunction(torch.autograd.Function):
    """With d = dL/dy and averages over the batch of all ranks, per channel:

    dL/dx = weight / std * (d - mean(d) - x_hat * mean(d * x_hat))

    dL/dweight = sum(d * x_hat) and dL/dbias = sum(d) stay sums over the rank's own part: they are
    exchanged like all other gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        comm: Communicator,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = _wide(x)
        statistics = _combine(_statistics_of_ranks(wide, comm))
        mean, variance = statistics[0].to(wide.dtype), statistics[1].to(wide.dtype)
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(statistics[1] + eps).to(wide.dtype))
        ctx.comm, ctx.count = comm, float(statistics[2, 0])
        ctx.mark_non_differentiable(statistics)
        if x.numel() == 0:
            return x.clone(), statistics
        output = torch.nn.functional.batch_norm(
            wide,
            mean,
            variance,
            None if weight is None else weight.to(wide.dtype),
            None if bias is None else bias.to(wide.dtype),
            False,
            0.0,
            eps,
        )
        return output.to(x.dtype), statistics

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        wide, d = _wide(x), _wide(grad)
        axes = [axis for axis in range(d.dim()) if axis != 1]
        centred = wide - _row(mean, wide)
        sums = torch.stack([d.sum(axes), (d * centred).sum(axes) * inverse])
        grad_weight = None if weight is None else sums[1].to(weight.dtype)
        grad_bias = sums[0].to(weight.dtype) if ctx.needs_input_grad[2] else None
        grad_x = None
        # All ranks freeze alike, so all of them come here or none.
        if ctx.needs_input_grad[0]:
            total: NDArray[Any] = sums.to(torch.float64, copy=True).numpy()
            if ctx.comm.world_size > 1:
                ctx.comm.all_reduce(total, deterministic=True)
            averages = torch.from_numpy(total).to(d.dtype) / max(ctx.count, 1.0)
            grad_x = d - _row(averages[0], d) - centred * _row(averages[1] * inverse, d)
            scale = inverse if weight is None else inverse * weight.to(d.dtype)
            grad_x = (grad_x * _row(scale, d)).to(x.dtype)
        return grad_x, grad_weight, grad_bias, None, None


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _row(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Per-channel values, shaped to broadcast over `like`."""
    return values.view(1, -1, *[1] * (like.dim() - 2))


def _statistics_of_ranks(x: torch.Tensor, comm: Communicator) -> NDArray[np.float64]:
    """(world_size, 3, C): each rank's means, sums of squared deviations, and counts."""
    channels = x.shape[1]
    mine = np.zeros((3, channels))
    count = x.numel() // channels if channels else 0
    if count:
        axes = [axis for axis in range(x.dim()) if axis != 1]
        variance, mean = torch.var_mean(x, axes, correction=0)
        mine[0], mine[1] = mean.double().numpy(), variance.double().numpy() * count
        mine[2] = count
    return mine[None] if comm.world_size == 1 else comm.all_gather(mine)


def _combine(parts: NDArray[np.float64]) -> torch.Tensor:
    """(3, C): mean, biased variance and count of all parts together."""
    mean, squares, count = np.zeros_like(parts[0])
    for other_mean, other_squares, other_count in parts:
        total = count + other_count
        share = np.divide(other_count, total, out=np.zeros_like(total), where=total > 0)
        shift = other_mean - mean
        mean = mean + shift * share
        squares = squares + other_squares + shift * shift * count * share
        count = total
    if count.size and count[0] == 1:
        raise ValueError("expected more than 1 value per channel over all ranks when training")
    return torch.from_numpy(np.stack([mean, squares / np.maximum(count, 1.0), count]))
