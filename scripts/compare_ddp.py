#!/usr/bin/env python3
"""Step time and gradient memory of one model: local only, mpidp, and DistributedDataParallel.

Run it on 2 ranks, for example:
    OMP_NUM_THREADS=1 mpiexec -n 2 .venv/bin/python scripts/compare_ddp.py

The same model, batch and seed on four variants: local only, mpidp, DDP over Gloo, DDP over mpidp;
all in one run, in turns, so that noise hits them alike. A step is forward, backward (with its
exchange) and optimizer; its time is the slowest rank's, and the median over steps counts. "added"
is what the exchange adds to the local step. "gradient copies" is the memory of `.grad` and of the
buckets, each byte counted once, over the size of the gradients: 1.00 is no second copy.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from mpi4py import MPI

import mpidp
import mpidp.c10d
from mpidp.adapters.torch import DataParallel, data_parallel


def build(layers: int, width: int) -> torch.nn.Module:
    """The multilayer perceptron of the comparison; the same on every rank."""
    torch.manual_seed(0)
    blocks = [
        layer for _ in range(layers) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())
    ]
    return torch.nn.Sequential(*blocks)


class Variants:
    """The models by name, each with its optimizer; all start from the same weights."""

    def __init__(self, comm: mpidp.Communicator, options: argparse.Namespace) -> None:
        self.models = {
            "local": build(options.layers, options.width),
            "mpidp": data_parallel(build(options.layers, options.width), comm),
            "DDP over Gloo": self._ddp(options, None),
            "DDP over mpidp": self._ddp(options, torch.distributed.new_group(backend="mpidp")),
        }
        self.optimizers = {
            name: torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
            for name, model in self.models.items()
        }

    @staticmethod
    def _ddp(options: argparse.Namespace, group: object) -> torch.nn.Module:
        return torch.nn.parallel.DistributedDataParallel(
            build(options.layers, options.width), process_group=group, gradient_as_bucket_view=True
        )

    def step(self, name: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """One step of one variant."""
        self.optimizers[name].zero_grad()
        torch.nn.functional.mse_loss(self.models[name](x), y).backward()
        self.optimizers[name].step()


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=64, help="samples of each rank")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    world = MPI.COMM_WORLD

    store = world.bcast(tempfile.mktemp(prefix="mpidp-ddp-") if world.rank == 0 else None)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=world.rank, world_size=world.size
    )
    with mpidp.Communicator(world) as comm:
        variants = Variants(comm, options)
        generator = torch.Generator().manual_seed(world.rank)
        x = torch.randn(options.batch, options.width, generator=generator)
        y = torch.randn(options.batch, options.width, generator=generator)
        times: dict[str, list[float]] = {name: [] for name in variants.models}
        for step in range(options.warm_up + options.steps):
            for name in variants.models:
                world.Barrier()
                start = time.perf_counter()
                variants.step(name, x, y)
                taken = world.allreduce(time.perf_counter() - start, MPI.MAX)
                if step >= options.warm_up:
                    times[name].append(taken)
        compare_weights(variants.models)
        memory = {name: gradient_memory(model) for name, model in variants.models.items()}
    torch.distributed.destroy_process_group()
    if world.rank == 0:
        report(times, memory, variants.models["local"], options)
        Path(store).unlink(missing_ok=True)
    return 0


def compare_weights(models: dict[str, torch.nn.Module]) -> None:
    """All data-parallel variants must have trained the same model."""
    for name in ("DDP over Gloo", "DDP over mpidp"):
        for one, other in zip(models["mpidp"].parameters(), models[name].parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def gradient_memory(model: torch.nn.Module) -> int:
    """Bytes of `.grad` and, for mpidp, of the buckets: the union of their address ranges."""
    ranges = []
    for parameter in model.parameters():
        if parameter.grad is not None:
            storage = parameter.grad.untyped_storage()
            ranges.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    if isinstance(model, DataParallel):
        ranges += [
            (view.ctypes.data, view.ctypes.data + view.nbytes)
            for view in model.reducer.gradient_views
        ]
    total = end = 0
    for first, last in sorted(ranges):
        total += max(0, last - max(first, end))
        end = max(end, last)
    return total


def report(
    times: dict[str, list[float]],
    memory: dict[str, int],
    model: torch.nn.Module,
    options: argparse.Namespace,
) -> None:
    """Prints the table."""
    local = statistics.median(times["local"])
    gradient_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    print(f"gradients: {gradient_bytes / 1e6:.1f} MB, {options}")
    print(f"{'variant':<16} {'ms a step':>10} {'added ms':>10} {'gradient copies':>16}")
    for name, taken in times.items():
        median = statistics.median(taken)
        added = "" if name == "local" else f"{1e3 * (median - local):.2f}"
        copies = memory[name] / gradient_bytes
        print(f"{name:<16} {1e3 * median:10.2f} {added:>10} {copies:16.2f}")
    theirs = statistics.median(times["DDP over Gloo"]) - local
    for name in ("mpidp", "DDP over mpidp"):
        ours = statistics.median(times[name]) - local
        print(f"{name} adds {ours / theirs:.2f} of what DDP over Gloo adds")


if __name__ == "__main__":
    sys.exit(main())
