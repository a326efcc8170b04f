"""data_parallel with what PyTorch has besides plain layers, against one process."""

from __future__ import annotations

import copy

import pytest
from test_torch import Model, assert_same, data, loss_of, part

import mpidp

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402 (torch may be missing)

from mpidp.adapters.torch import data_parallel  # noqa: E402


def same_on_all_ranks(comm, values):
    found = comm.all_gather_object(values)
    return all(one == found[0] for one in found)


class Fails(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError("in the backward")


def shared_batch(comm):
    batch = data(2 * comm.world_size + 1, 3)
    mine = part(comm, len(batch[0]))
    return batch, (batch[0][mine], batch[1][mine]), mine.stop - mine.start


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("weighed", [True, False])
@pytest.mark.parametrize("forward_between", [True, False])
def test_a_step_after_a_failed_backward(comm, weighed, set_to_none, forward_between):
    reference = Model()
    model = data_parallel(copy.deepcopy(reference), comm, first_bucket_bytes=64, bucket_bytes=64)
    whole, mine, count = shared_batch(comm)
    if not weighed:
        whole = mine = data(4, 5)
        count = 1

    def backward(loss):
        if weighed:
            model.backward(loss, weight=count)
        else:
            loss.backward()

    def half_way(x):
        # The last layers' gradients are in flight when the first layer's backward raises.
        inner = model.module
        hidden = Fails.apply(torch.tanh(inner.first(x)))
        return inner.last(torch.tanh(inner.tied(inner.second(hidden)))).sum()

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    backward(loss_of(model, mine))
    later = loss_of(model, mine)
    optimizer.zero_grad(set_to_none=set_to_none)
    with pytest.raises(ZeroDivisionError, match="in the backward"):
        backward(half_way(mine[0]))
    optimizer.zero_grad(set_to_none=set_to_none)
    backward(loss_of(model, mine) if forward_between else later)
    loss_of(reference, whole).backward()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_an_error_in_a_users_hook_is_that_error(comm):
    model = data_parallel(Model(), comm)

    def complain(grad):
        raise LookupError("from the hook")

    handle = model.module.first.weight.register_hook(complain)
    with pytest.raises(LookupError, match="from the hook"):
        loss_of(model, data(3, 0)).backward()
    handle.remove()
    loss_of(model, data(3, 0)).backward()
    assert model.module.first.weight.grad is not None


def test_double_backward_raises_and_the_next_step_works(comm):
    model = data_parallel(Model(), comm)
    warning = pytest.warns(UserWarning, match="create_graph")
    with warning, pytest.raises(mpidp.MpidpError, match="create_graph"):
        loss_of(model, data(3, 0)).backward(create_graph=True)
    loss_of(model, data(3, 0)).backward()
    assert model.module.first.weight.grad is not None


def test_gradient_penalty(comm):
    """A gradient of a gradient, by torch.autograd.grad: only the outer one is exchanged."""
    reference = Model()
    model = data_parallel(copy.deepcopy(reference), comm)
    batch = data(2 * comm.world_size, 3)
    for one, rows in ((model, part(comm, len(batch[0]))), (reference, slice(None))):
        x = batch[0][rows].clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(one(x).sum(), x, create_graph=True)
        ((slope.norm(dim=1) - 1) ** 2).mean().backward()
    compare_gradients(model, reference)


def compare_gradients(model, reference, tolerance=1e-12):
    for (name, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        if other.grad is None:
            assert one.grad is None or not one.grad.any(), name
        else:
            torch.testing.assert_close(one.grad, other.grad, rtol=tolerance, atol=tolerance)


def test_several_weighed_backwards_in_one_step(comm):
    """Each is exchanged by itself; what is there already is not averaged again."""
    reference = Model()
    model = data_parallel(copy.deepcopy(reference), comm)
    for _ in range(2):
        for one in (model, reference):
            one.zero_grad()
        for seed in (1, 2):
            batch = data(3 * comm.world_size + 1, seed)
            mine = part(comm, len(batch[0]))
            loss = loss_of(model, (batch[0][mine], batch[1][mine]), seldom=seed == 1)
            model.backward(loss, weight=mine.stop - mine.start)
            loss_of(reference, batch, seldom=seed == 1).backward()
        compare_gradients(model, reference)


class Blocks(torch.nn.Module):
    """Two checkpointed segments: with re-entrant checkpoints, two backwards within one."""

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(2)
        self.reentrant = reentrant
        self.inner = torch.nn.ModuleList([torch.nn.Linear(6, 6).double() for _ in range(2)])
        self.last = torch.nn.Linear(6, 1).double()

    def forward(self, x):
        for layer in self.inner:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=self.reentrant))
        return self.last(x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_segments_are_exchanged_once(comm, reentrant):
    reference = Blocks(False)
    net = Blocks(reentrant)
    model = data_parallel(net, comm)
    whole, mine, count = shared_batch(comm)
    for one in (model, reference):
        one.zero_grad()
    mine[0].requires_grad_(True)  # without which re-entrant checkpoints have no gradient
    model.backward(loss_of(model, mine), weight=count)
    loss_of(reference, whole).backward()
    compare_gradients(model, reference)


@pytest.mark.parametrize("poisoned", [False, True])
def test_autocast_and_gradient_scaler(comm, poisoned):
    """A step is skipped on all ranks where one rank's gradient is not finite."""
    model = data_parallel(Model(torch.float32), comm)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    batch = data(4, comm.rank, torch.float32)
    if poisoned and comm.rank == comm.world_size - 1:
        batch = (batch[0] * float("inf"), batch[1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model, batch)
    model.backward(scaler.scale(loss), weight=4)
    scaler.step(optimizer)
    scaler.update()
    after = [p.detach() for p in model.parameters()]
    unchanged = all(bool((x == y).all()) for x, y in zip(before, after, strict=True))
    assert unchanged == poisoned
    assert scaler.get_scale() == (4.0 if poisoned else 8.0)
    assert same_on_all_ranks(comm, [p.numpy().tobytes() for p in after])


@pytest.mark.parametrize("inside", [True, False])
def test_compiled_models(comm, inside):
    """Captured by dynamo and AOTAutograd; inductor would only add minutes of C++ compilation."""
    backend = "aot_eager"
    reference = Model()
    net = copy.deepcopy(reference)
    if inside:
        model = data_parallel(torch.compile(net, backend=backend), comm)
        called = model
    else:
        model = data_parallel(net, comm)
        called = torch.compile(model, backend=backend)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (net, reference)]
    whole, mine, count = shared_batch(comm)
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model.backward(loss_of(called, mine), weight=count)
        loss_of(reference, whole).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert_same(net, reference)


def test_mixed_dtypes(comm):
    torch.manual_seed(3)
    net = torch.nn.ModuleDict(
        {
            str(i): torch.nn.Linear(6, 6, dtype=d)
            for i, d in enumerate((torch.float64, torch.float32))
        }
    )
    net["2"] = torch.nn.Linear(6, 1, dtype=torch.bfloat16)
    reference = copy.deepcopy(net)

    def loss(one, x):
        x = torch.tanh(one["0"](x)).float()
        return (one["2"](torch.tanh(one["1"](x)).bfloat16()).float() ** 2).mean()

    model = data_parallel(net, comm)
    assert len({bucket.dtype for bucket in model.reducer.plan.buckets}) == 3
    x = data(2 * comm.world_size, 4)[0]
    loss(net, x[part(comm, len(x))]).backward()
    loss(reference, x).backward()
    for one, other in zip(net.parameters(), reference.parameters(), strict=True):
        # All that passed through bfloat16 carries its rounding.
        torch.testing.assert_close(one.grad, other.grad, rtol=3e-2, atol=3e-2)
        assert same_on_all_ranks(comm, one.grad.double().numpy().tobytes())


def test_frozen_and_frozen_again(comm):
    reference = Model()
    model = data_parallel(copy.deepcopy(reference), comm)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (model, reference)]
    for trainable in (True, False, True):
        for one in (model.module, reference):
            one.frozen.requires_grad_(trainable)
            one.first.requires_grad_(not trainable)
        for optimizer in optimizers:
            optimizer.zero_grad()
        whole, mine, count = shared_batch(comm)
        model.backward(loss_of(model, mine), weight=count)
        loss_of(reference, whole).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert_same(model, reference)


class Words(torch.nn.Module):
    """A sparse table, one in dense use too, and a dense layer."""

    def __init__(self, tied):
        super().__init__()
        torch.manual_seed(6)
        self.table = torch.nn.Embedding(40, 3, sparse=True, dtype=torch.float64)
        self.unused = torch.nn.Embedding(4, 3, sparse=True, dtype=torch.float64)
        self.last = torch.nn.Linear(3, 40, dtype=torch.float64)
        if tied:
            self.last.weight = self.table.weight

    def forward(self, words):
        return self.last(torch.tanh(self.table(words)))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_sparse_embeddings(comm, tied, accumulate):
    reference = Words(tied)
    model = data_parallel(copy.deepcopy(reference), comm)
    generator = torch.Generator().manual_seed(8)
    for step in range(2):
        for one in (model, reference):
            one.zero_grad()
        windows = 2 if accumulate else 1
        words = torch.randint(0, 40, (2 * comm.world_size + 1,), generator=generator)
        mine = part(comm, len(words))
        for window in range(windows):
            loss = torch.nn.functional.cross_entropy(model(words[mine]), words[mine])
            if window < windows - 1:
                with model.no_sync():
                    model.backward(loss, weight=mine.stop - mine.start)
            else:
                model.backward(loss, weight=mine.stop - mine.start)
        torch.nn.functional.cross_entropy(reference(words), words).backward()
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            if other.grad is None:
                assert one.grad is None
                continue
            assert one.grad.is_sparse == (other.grad.is_sparse and not tied), step
            torch.testing.assert_close(
                one.grad.to_dense(), other.grad.to_dense(), rtol=1e-12, atol=1e-12
            )
            assert same_on_all_ranks(comm, one.grad.to_dense().numpy().tobytes())


def test_sparse_optimizers_and_rows_of_one_rank(comm):
    """One rank's words alone; the others' tables take the same step."""
    reference = torch.nn.Embedding(20, 2, sparse=True, dtype=torch.float64)
    with torch.no_grad():
        reference.weight.copy_(torch.arange(40.0).view(20, 2))
    model = data_parallel(copy.deepcopy(reference), comm)
    optimizers = [torch.optim.SparseAdam(one.parameters()) for one in (model, reference)]
    words = torch.tensor([3, 5, 3])
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        used = words if comm.rank == 0 else words[:0]
        model.backward((model(used) ** 2).sum() / 3, weight=3 if comm.rank == 0 else 0)
        ((reference(words) ** 2).sum() / 3).backward()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(model.module.weight, reference.weight, rtol=1e-12, atol=0)


@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_buffers(comm, broadcast_buffers):
    """All start from rank 0's; afterwards they follow it where that is asked for."""
    net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5))
    with torch.no_grad():
        net[1].running_mean += comm.rank
    model = data_parallel(net, comm, broadcast_buffers=broadcast_buffers)
    assert (net[1].running_mean == 0).all()
    with model.no_sync():
        model(data(4, comm.rank, torch.float32)[0]).sum().backward()
    own = comm.all_gather_object(net[1].running_mean.tolist())
    assert (len({tuple(one) for one in own}) == 1) == (comm.world_size == 1)
    seen = []
    net[1].register_forward_pre_hook(lambda module, _: seen.append(module.running_mean.tolist()))
    model(data(4, comm.rank, torch.float32)[0]).sum().backward()
    assert seen == ([own[0]] if broadcast_buffers else [own[comm.rank]])
