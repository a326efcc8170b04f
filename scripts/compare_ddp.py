#!/usr/bin/env python3
"""Step time of one model: local only, with mpidp, and with DistributedDataParallel over Gloo.

Run it on 2 ranks, for example:
    OMP_NUM_THREADS=1 mpiexec -n 2 .venv/bin/python scripts/compare_ddp.py

The same model, batch and seed; all variants in one run, in turns, so that noise hits them alike.
A step is forward, backward (with its exchange) and optimizer; its time is the slowest rank's, and
the median over steps counts. "added" is what the exchange adds to the local step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from mpi4py import MPI

import mpidp
from mpidp.adapters.torch import data_parallel


def build(layers: int, width: int) -> torch.nn.Module:
    """The multilayer perceptron of the comparison; the same on every rank."""
    torch.manual_seed(0)
    blocks = [
        layer for _ in range(layers) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())
    ]
    return torch.nn.Sequential(*blocks)


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
        variants = {
            "local": build(options.layers, options.width),
            "mpidp": data_parallel(build(options.layers, options.width), comm),
            "DDP over Gloo": torch.nn.parallel.DistributedDataParallel(
                build(options.layers, options.width), gradient_as_bucket_view=True
            ),
        }
        optimizers = {
            name: torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
            for name, model in variants.items()
        }
        generator = torch.Generator().manual_seed(world.rank)
        x = torch.randn(options.batch, options.width, generator=generator)
        y = torch.randn(options.batch, options.width, generator=generator)
        times: dict[str, list[float]] = {name: [] for name in variants}
        for step in range(options.warm_up + options.steps):
            for name, model in variants.items():
                world.Barrier()
                start = time.perf_counter()
                optimizers[name].zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                optimizers[name].step()
                taken = world.allreduce(time.perf_counter() - start, MPI.MAX)
                if step >= options.warm_up:
                    times[name].append(taken)
        compare_weights(variants)
    torch.distributed.destroy_process_group()
    if world.rank == 0:
        report(times, variants["local"], options)
        os.unlink(store)
    return 0


def compare_weights(variants: dict[str, torch.nn.Module]) -> None:
    """Both data-parallel variants must have trained the same model."""
    for one, other in zip(
        variants["mpidp"].parameters(), variants["DDP over Gloo"].parameters(), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def report(times: dict[str, list[float]], model: torch.nn.Module, options: object) -> None:
    """Prints the table."""
    local = statistics.median(times["local"])
    gradient_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    print(f"gradients: {gradient_bytes / 1e6:.1f} MB, {options}")
    print(f"{'variant':<16} {'ms a step':>10} {'added ms':>10}")
    for name, taken in times.items():
        median = statistics.median(taken)
        added = "" if name == "local" else f"{1e3 * (median - local):10.2f}"
        print(f"{name:<16} {1e3 * median:10.2f} {added:>10}")
    ours = statistics.median(times["mpidp"]) - local
    theirs = statistics.median(times["DDP over Gloo"]) - local
    print(f"mpidp adds {ours / theirs:.2f} of what DDP over Gloo adds")


if __name__ == "__main__":
    sys.exit(main())
