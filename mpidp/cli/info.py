"""`mpidp info`: what this library runs on here, for people and for bug reports."""

from __future__ import annotations

import json
import os
import platform
from typing import Any

import click

import mpidp
from mpidp.cli.console import Command


@click.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of text.")
def info(as_json: bool) -> None:
    """Show the MPI library, the topology, the algorithms chosen and the settings in use.

    Run it as the job would be run: mpiexec -n 4 mpidp info
    """
    from mpi4py import MPI

    from mpidp.errors import InvalidArgumentError, MismatchError

    try:
        comm = mpidp.Communicator(MPI.COMM_WORLD)
    except (InvalidArgumentError, MismatchError) as error:
        raise click.UsageError(str(error)) from None
    with comm:
        found = collect(comm)
    if found["rank"] == 0:
        click.echo(json.dumps(found, indent=2) if as_json else "\n".join(lines(found)))


def collect(comm: Any) -> dict[str, Any]:
    """Everything that is shown, as plain values. Collective, for the ranks of each node."""
    import mpi4py
    import numpy

    from mpidp import devices
    from mpidp.config import SETTINGS, Config

    config = Config.from_environment()
    nodes = comm.all_gather_object((comm.node_rank, comm.local_size))
    settings = {
        setting.field: {
            "variable": setting.variable,
            "value": getattr(config, setting.field),
            "help": setting.help,
        }
        for setting in SETTINGS
    }
    return {
        "mpidp_version": mpidp.__version__,
        "python_version": platform.python_version(),
        "mpi4py_version": mpi4py.__version__,
        "numpy_version": numpy.__version__,
        **comm.describe(),
        "gpus": devices.describe(),
        "ranks_per_node": [size for _, size in sorted(set(nodes))],
        "cores": len(os.sched_getaffinity(0)),
        "settings": settings,
    }


def lines(found: dict[str, Any]) -> list[str]:
    """The text form of what `collect` returns."""
    from mpidp.bench.text import layout, size_label

    shared = "yes" if found["shared_memory"] else "no"
    pairs = [
        ("mpidp", found["mpidp_version"]),
        ("Python", found["python_version"]),
        ("mpi4py", found["mpi4py_version"]),
        ("NumPy", found["numpy_version"]),
        ("MPI library", " ".join(found["mpi_library"].split())),
        ("built against", found["built_against"]),
        ("instruction set", found["instruction_set"]),
        ("ranks", f"{found['world_size']} on {layout(found['ranks_per_node'])}"),
        ("cores here", found["cores"]),
        ("shared memory", shared),
        ("GPUs here", _gpus(found["gpus"])),
        ("tuning table", found["tuning_table"]),
    ]
    shown = [f"{name + ':':<17}{value}" for name, value in pairs]
    shown += ["", 'What "auto" means:']
    for collective, rules in found["algorithms"].items():
        parts = [
            algorithm if limit is None else f"{algorithm} to {size_label(limit)}"
            for limit, algorithm in rules
        ]
        shown.append(f"  {collective + ':':<16}{', '.join(parts)}")
    shown += ["", "Settings:"]
    for setting in found["settings"].values():
        value = "default" if setting["value"] is None else setting["value"]
        shown.append(f"  {setting['variable'] + '=' + str(value):<30}  {setting['help']}")
    return shown


def _gpus(found: dict[str, Any]) -> str:
    if found["runtime"] is None:
        return f"none: {found['reason']}"
    return ", ".join(found["devices"]) + f" ({found['runtime']})"
