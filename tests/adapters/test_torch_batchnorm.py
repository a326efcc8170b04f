"""SyncBatchNorm against torch.nn.BatchNorm1d to 3d on the concatenated batch."""

from __future__ import annotations

import copy

import pytest

import mpidp

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

import mpidp.adapters.torch as mt  # noqa: E402 (torch may be missing)

CHANNELS = 3
KINDS = {  # trailing shape, torch's class
    "2d": ((), torch.nn.BatchNorm1d),
    "3d": ((4,), torch.nn.BatchNorm1d),
    "4d": ((3, 2), torch.nn.BatchNorm2d),
    "5d": ((2, 1, 2), torch.nn.BatchNorm3d),
}
COUNTS = {  # samples of a rank
    "even": lambda rank, size: 3,
    "uneven": lambda rank, size: 1 + 2 * rank + (size == 1),
    "empty": lambda rank, size: 0 if rank == size - 1 and size > 1 else 2 + rank,
}


def rows_of(comm, how):
    counts = [COUNTS[how](rank, comm.world_size) for rank in range(comm.world_size)]
    start = sum(counts[: comm.rank])
    return sum(counts), slice(start, start + counts[comm.rank])


def random(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def summed(comm, tensor):
    return torch.from_numpy(comm.all_reduce(tensor.detach().clone().numpy()))


@pytest.mark.parametrize("how", COUNTS)
@pytest.mark.parametrize(
    "options",
    [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}],
    ids=["default", "not affine", "plain average", "no statistics"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_big_batch(comm, kind, options, how):
    trailing, norm = KINDS[kind]
    reference = norm(CHANNELS, dtype=torch.float64, **options)
    if reference.affine:
        with torch.no_grad():
            reference.weight.copy_(random(7, CHANNELS))
            reference.bias.copy_(random(8, CHANNELS))
    layer = mt.convert_sync_batchnorm(copy.deepcopy(reference), comm)
    assert isinstance(layer, mt.SyncBatchNorm)
    total, mine = rows_of(comm, how)
    for step in range(2):
        # A mean far from zero shows what cancels.
        x = 1e3 + random(step, total, CHANNELS, *trailing)
        slope = random(10 + step, total, CHANNELS, *trailing)
        part = x[mine].clone().requires_grad_(True)
        x.requires_grad_(True)
        out, expected = layer(part), reference(x)
        torch.testing.assert_close(out, expected[mine], rtol=1e-10, atol=1e-10)
        (out * slope[mine]).sum().backward()
        (expected * slope).sum().backward()
        torch.testing.assert_close(part.grad, x.grad[mine], rtol=1e-10, atol=1e-10)
    for own, other in zip(layer.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(summed(comm, own.grad), other.grad, rtol=1e-10, atol=1e-10)
    for (name, own), other in zip(layer.named_buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-10, msg=name)
        found = comm.all_gather_object(own.numpy().tobytes())
        assert all(one == found[0] for one in found), name
    layer.eval()
    reference.eval()
    x = random(20, 4, CHANNELS, *trailing)
    torch.testing.assert_close(layer(x), reference(x), rtol=1e-10, atol=1e-10)


def make_net():
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3, padding=1, bias=False),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 6),
        torch.nn.BatchNorm1d(6),
        torch.nn.Linear(6, 1),
    ).double()


@pytest.mark.parametrize("how", COUNTS)
def test_training_equals_one_process(comm, how):
    reference = make_net()
    model = mt.data_parallel(mt.convert_sync_batchnorm(copy.deepcopy(reference), comm), comm)
    pair = (model, reference)
    optimizers = [torch.optim.SGD(one.parameters(), 0.05, momentum=0.9) for one in pair]
    total, mine = rows_of(comm, how)
    for step in range(3):
        x, y = random(step, total, 2, 4, 4), random(30 + step, total, 1)
        for optimizer in optimizers:
            optimizer.zero_grad()
        out = model(x[mine].to(memory_format=torch.channels_last))
        count = mine.stop - mine.start
        loss = torch.nn.functional.mse_loss(out, y[mine]) if count else out.sum()
        model.backward(loss, weight=count)
        torch.nn.functional.mse_loss(reference(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
    for (name, own), other in zip(
        model.module.state_dict().items(), reference.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_inputs_are_normalized_in_float32(comm, dtype):
    layer = mt.convert_sync_batchnorm(torch.nn.BatchNorm1d(CHANNELS), comm)
    total, mine = rows_of(comm, "uneven")
    x = random(1, total, CHANNELS).to(dtype)
    part = x[mine].clone().requires_grad_(True)
    out = layer(part)
    assert out.dtype == dtype
    expected = torch.nn.functional.batch_norm(x.double(), None, None, training=True)
    # The output is rounded once, to the input's dtype.
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(
        out.double(), expected[mine], rtol=rounding, atol=64 * torch.finfo(torch.float32).eps
    )
    out.float().sum().backward()
    assert part.grad.dtype == dtype


def test_one_value_per_channel_raises_on_all_ranks(comm):
    layer = mt.convert_sync_batchnorm(torch.nn.BatchNorm1d(CHANNELS), comm)
    with pytest.raises(ValueError, match="more than 1 value"):
        layer(torch.ones(1 if comm.rank == 0 else 0, CHANNELS))


def test_nothing_at_all_changes_nothing(comm):
    layer = mt.convert_sync_batchnorm(torch.nn.BatchNorm1d(CHANNELS), comm)
    x = torch.ones(0, CHANNELS, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == (0, CHANNELS)
    assert (layer.running_var == 1).all()
    assert layer.num_batches_tracked == 0


def test_conversion_keeps_what_is_shared(comm):
    norm = torch.nn.BatchNorm1d(CHANNELS).eval()
    net = torch.nn.Sequential(norm, torch.nn.InstanceNorm1d(CHANNELS), norm)
    converted = mt.convert_sync_batchnorm(net, comm)
    assert converted[0] is converted[2]
    assert converted[0].weight is norm.weight
    assert converted[0].running_mean is norm.running_mean
    assert not converted[0].training
    assert isinstance(converted[1], torch.nn.InstanceNorm1d)
    assert list(converted.state_dict()) == list(net.state_dict())
    assert mt.convert_sync_batchnorm(converted, comm)[0] is converted[0]
    assert copy.deepcopy(converted)[0].weight is not converted[0].weight


def test_bad_input(comm):
    layer = mt.convert_sync_batchnorm(torch.nn.BatchNorm1d(CHANNELS), comm)
    with pytest.raises(ValueError, match="2 or more dimensions"):
        layer(torch.ones(CHANNELS))
    with pytest.raises(ValueError, match="3 channels"):
        layer(torch.ones(2, 4))
    with pytest.raises(mpidp.InvalidArgumentError, match="lazy"):
        mt.convert_sync_batchnorm(torch.nn.LazyBatchNorm1d(), comm)
    with pytest.raises(TypeError, match="state_dict"):
        copy.copy(layer._shared).__reduce__()


def test_double_backward_raises(comm):
    layer = mt.convert_sync_batchnorm(torch.nn.BatchNorm1d(CHANNELS), comm)
    x = torch.randn(4, CHANNELS, requires_grad=True)
    (grad,) = torch.autograd.grad((layer(x) ** 3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
