"""PyTorch: `data_parallel` for your own loop, and `TorchAdapter` for the Trainer.

    import mpidp.adapters.torch as mt

    model = mt.data_parallel(model, comm)               # the four lines that change
    for x, y in loader_of_this_rank:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        model.backward(loss, weight=len(x))             # or loss.backward(), for equal batches
        optimizer.step()

Gradients live in the reducer's buckets: `.grad` of every parameter is a view of registered memory,
so there is no second copy, and the exchange of a bucket starts while the backward still runs.
`convert_sync_batchnorm` makes batch normalization see the batch of all ranks.
"""

from mpidp.adapters.torch.adapter import TorchAdapter
from mpidp.adapters.torch.batchnorm import SyncBatchNorm, convert_sync_batchnorm
from mpidp.adapters.torch.parallel import DataParallel, data_parallel
from mpidp.adapters.torch.tensors import as_array, as_tensor, broadcast_module

__all__ = [
    "DataParallel",
    "SyncBatchNorm",
    "TorchAdapter",
    "as_array",
    "as_tensor",
    "broadcast_module",
    "convert_sync_batchnorm",
    "data_parallel",
]
