"""data_parallel in the user's own loop: what PyTorch users do, against one process."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import mpidp

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from mpidp.adapters.torch import TorchAdapter, data_parallel  # noqa: E402 (torch may be missing)

RTOL = {torch.float64: 1e-12, torch.float32: 1e-5}


class Model(torch.nn.Module):
    """Tied, frozen and sometimes unused parameters, and a normalization."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(4)
        self.first = torch.nn.Linear(6, 8, dtype=dtype)
        self.second = torch.nn.Linear(8, 8, dtype=dtype)
        self.tied = torch.nn.Linear(8, 8, dtype=dtype)
        self.tied.weight = self.second.weight
        self.frozen = torch.nn.Linear(8, 8, dtype=dtype).requires_grad_(False)
        self.seldom = torch.nn.Linear(8, 8, dtype=dtype)
        self.never = torch.nn.Linear(3, 3, dtype=dtype)
        self.last = torch.nn.Linear(8, 1, dtype=dtype)

    def forward(self, x, seldom=False):
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.tied(torch.tanh(self.second(x))))
        if seldom:
            x = x + self.seldom(x)
        return self.last(torch.tanh(self.frozen(x)))


def data(count, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return x.to(dtype), x.sum(1, keepdim=True).to(dtype)


def part(comm, count):
    return slice(count * comm.rank // comm.world_size, count * (comm.rank + 1) // comm.world_size)


def assert_same(model, reference, dtype=torch.float64):
    for (name, mine), expected in zip(
        model.named_parameters(), reference.parameters(), strict=True
    ):
        torch.testing.assert_close(
            mine,
            expected,
            rtol=RTOL[dtype],
            atol=RTOL[dtype],
            msg=lambda text, n=name: f"{n}: {text}",
        )


def loss_of(model, batch, **options):
    return torch.nn.functional.mse_loss(model(batch[0], **options), batch[1])


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_weighed_loop_equals_one_process(comm, dtype, optimizer, set_to_none):
    def make(parameters):
        if optimizer == "adam":
            return torch.optim.AdamW(parameters, 0.01)
        return torch.optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=0.01)

    reference = Model(dtype)
    model = data_parallel(copy.deepcopy(reference), comm, bucket_bytes=512, first_bucket_bytes=128)
    steps = [(make(model.parameters())), make(reference.parameters())]
    for step in range(4):
        batch = data(comm.world_size + 3 * step + 1, step, dtype)
        mine = part(comm, len(batch[0]))
        for one in steps:
            one.zero_grad(set_to_none=set_to_none)
        loss = loss_of(model, (batch[0][mine], batch[1][mine]), seldom=step % 2 == 1)
        model.backward(loss, weight=mine.stop - mine.start)
        loss_of(reference, batch, seldom=step % 2 == 1).backward()
        for one in steps:
            one.step()
    assert_same(model, reference, dtype)
    if set_to_none:
        assert model.module.never.weight.grad is None


def test_equal_batches_need_no_weights(comm):
    reference = Model()
    model = data_parallel(copy.deepcopy(reference), comm)
    batch = data(4 * comm.world_size, 1)
    mine = part(comm, len(batch[0]))
    loss_of(model, (batch[0][mine], batch[1][mine])).backward()
    loss_of(reference, batch).backward()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_gradients_are_views_of_the_buckets(comm):
    model = data_parallel(Model(), comm)
    for _ in range(2):
        loss_of(model, data(5, comm.rank)).backward()
        views = {view.ctypes.data for view in model.reducer.gradient_views}
        for parameter in model.parameters():
            if parameter.grad is not None:
                assert parameter.grad.data_ptr() in views
        model.zero_grad()


def test_accumulation_with_varying_token_counts(comm):
    reference = Model()
    model = data_parallel(copy.deepcopy(reference), comm)
    pieces = [data(2 + i + comm.world_size * i, i) for i in range(3)]
    for number, batch in enumerate(pieces):
        mine = part(comm, len(batch[0]))
        loss = (
            loss_of(model, (batch[0][mine], batch[1][mine]))
            if mine.stop > mine.start
            else (sum(p.sum() for p in model.parameters() if p.requires_grad) * 0.0)
        )
        if number < 2:
            with model.no_sync():
                model.backward(loss, weight=mine.stop - mine.start)
        else:
            model.backward(loss, weight=mine.stop - mine.start)
    whole = [torch.cat(tensors) for tensors in zip(*pieces, strict=True)]
    loss_of(reference, whole).backward()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_a_parameter_used_on_one_rank_only(comm):
    model = data_parallel(Model(), comm)
    used = comm.rank == 0
    loss_of(model, data(3, 0), seldom=used).backward()
    assert model.module.never.weight.grad is None
    gradients = comm.all_gather(model.module.seldom.weight.grad.numpy())
    assert (gradients == gradients[0]).all()
    assert np.abs(gradients[0]).max() > 0


def test_two_backwards_in_one_step(comm):
    """As GANs do: both are exchanged, and the sum is that of one process."""
    reference = Model()
    model = data_parallel(copy.deepcopy(reference), comm)
    batch = data(2 * comm.world_size, 3)
    mine = part(comm, len(batch[0]))
    for one, x, y in ((model, batch[0][mine], batch[1][mine]), (reference, *batch)):
        loss_of(one, (x, y)).backward()
        (one(x) ** 2).mean().backward()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-11, atol=1e-12)


def test_unfreezing_plans_anew(comm):
    reference = Model()
    model = data_parallel(copy.deepcopy(reference), comm)
    batch = data(2 * comm.world_size, 3)
    mine = part(comm, len(batch[0]))
    for one in (model.module, reference):
        one.frozen.requires_grad_(True)
        one.first.requires_grad_(False)
    loss_of(model, (batch[0][mine], batch[1][mine])).backward()
    loss_of(reference, batch).backward()
    assert model.module.first.weight.grad is None
    torch.testing.assert_close(
        model.module.frozen.weight.grad, reference.frozen.weight.grad, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_parameters_stay_equal(comm, dtype):
    model = data_parallel(Model(dtype), comm)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, data(4, 10 * step + comm.rank, dtype)).backward()
        optimizer.step()
    found = comm.all_gather_object(
        [p.detach().float().numpy().tobytes() for p in model.parameters()]
    )
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("compression", ["float16", "bfloat16"])
def test_compression_keeps_replicas_equal(comm, compression):
    model = data_parallel(Model(torch.float32), comm, compression=compression)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, data(4, 10 * step + comm.rank, torch.float32)).backward()
        optimizer.step()
    found = comm.all_gather_object([p.detach().numpy().tobytes() for p in model.parameters()])
    assert all(one == found[0] for one in found)


def test_replicas_and_buffers_follow_rank_0(comm):
    torch.manual_seed(comm.rank)
    net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5))
    model = data_parallel(net, comm)
    for step in range(3):
        model(data(4, comm.rank + step, torch.float32)[0]).sum().backward()
    model(data(4, 0, torch.float32)[0])
    state = {name: value.numpy().tobytes() for name, value in net.state_dict().items()}
    found = comm.all_gather_object(state)
    assert all(one["0.weight"] == found[0]["0.weight"] for one in found)
    assert net[1].num_batches_tracked == 4


def test_channels_last_and_complex_parameters(comm):
    torch.manual_seed(1)
    net = torch.nn.Conv2d(3, 4, 3, dtype=torch.float64).to(memory_format=torch.channels_last)
    net.scale = torch.nn.Parameter(torch.tensor([1.0 + 2.0j], dtype=torch.complex128))
    reference = copy.deepcopy(net)
    model = data_parallel(net, comm)
    x = torch.randn(2 * comm.world_size, 3, 5, 5, dtype=torch.float64)
    x = torch.from_numpy(comm.broadcast(x.numpy(), root=0))

    def loss(one, values):
        return ((one(values) ** 2).mean(dim=(1, 2, 3)) * one_scale(one).abs() ** 2).mean()

    def one_scale(one):
        return getattr(one, "module", one).scale

    loss(model, x[part(comm, len(x))]).backward()
    loss(reference, x).backward()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(comm, reentrant):
    from torch.utils.checkpoint import checkpoint

    reference = Model()
    model = data_parallel(copy.deepcopy(reference), comm)
    batch = data(2 * comm.world_size, 3)
    mine = part(comm, len(batch[0]))
    for one, x, y in ((model, batch[0][mine], batch[1][mine]), (reference, *batch)):
        x = x.clone().requires_grad_(True)
        out = checkpoint(one, x, use_reentrant=reentrant)
        torch.nn.functional.mse_loss(out, y).backward()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_clip_grad_norm_and_schedulers_work_as_ever(comm):
    reference = Model()
    model = data_parallel(copy.deepcopy(reference), comm)
    batch = data(2 * comm.world_size, 3)
    mine = part(comm, len(batch[0]))
    loss_of(model, (batch[0][mine], batch[1][mine])).backward()
    loss_of(reference, batch).backward()
    norms = [torch.nn.utils.clip_grad_norm_(one.parameters(), 0.01) for one in (model, reference)]
    torch.testing.assert_close(*norms, rtol=1e-12, atol=0)


def test_an_error_in_the_exchange_reaches_the_user(comm):
    if comm.world_size == 1:
        return
    models = [data_parallel(Model(), comm) for _ in range(2)]
    small = data_parallel(torch.nn.Linear(6, 1, dtype=torch.float64), comm)
    # The last rank runs another model's backward.
    chosen = small if comm.rank == comm.world_size - 1 else models[0]
    loss = chosen(data(3, 0)[0]).sum()
    with pytest.raises(mpidp.MismatchError):
        loss.backward()


def test_different_models_are_refused(comm):
    if comm.world_size == 1:
        return
    net = torch.nn.Linear(6, 1 + (comm.rank == 1))
    with pytest.raises(mpidp.MismatchError):
        data_parallel(net, comm)


def test_bad_weight(alone):
    model = data_parallel(Model(), alone)
    with pytest.raises(mpidp.InvalidArgumentError):
        model.backward(loss_of(model, data(2, 0)), weight=-1)


def test_detach_gives_the_module_back(alone):
    net = Model()
    model = data_parallel(net, alone)
    loss_of(model, data(2, 0)).backward()
    assert model.detach() is net
    loss_of(net, data(2, 0)).backward()


def test_an_adapter_keeps_scalars_scalar(comm):
    """Batch normalization counts its batches in an array of no dimensions."""
    net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5))
    net.scale = torch.nn.Parameter(torch.tensor(2.0))

    def loss(model, batch):
        return (model(batch[0]) * model.scale).sum(), len(batch[0]), {}

    adapter = TorchAdapter(net, loss, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9))
    trainer = mpidp.Trainer(adapter, comm)
    trainer.strategy.step([(data(4, comm.rank, torch.float32)[0],)])
    state = adapter.state_dict()
    adapter.load_state_dict(state)
    for name, value in adapter.state_dict().items():
        assert np.shape(value) == np.shape(state[name]), name
    index = [leaf.name for leaf in adapter.leaves()].index("scale")
    adapter.write_leaf(index, np.array(3.0, np.float32))
    assert adapter.read_leaf(index).shape == ()
    assert net.scale.item() == 3
