"""Starts MPI jobs from a test, with the MPI of this environment, whatever started the test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

# What a launcher tells its processes; a job started from within one must not inherit it.
_LAUNCHERS = ("PMI", "PMIX", "OMPI_", "PRTE_", "HYDRA_", "HYDI_", "MPIR_", "SLURM_", "I_MPI_")

# Open MPI asks to be told that more ranks than cores, and root, are meant. Others do not look.
_ALLOWED = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


def mpiexec() -> str:
    """The launcher beside this Python, else the one on PATH."""
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    assert found, "there is no mpiexec beside this Python nor on PATH"
    return found


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without a launcher's traces, plus `extra`."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS)}
    return {**clean, **_ALLOWED, **extra}


def command(world_size: int, *args: str) -> list[str]:
    """The command line that runs this Python with `args` on `world_size` ranks."""
    return [mpiexec(), "-n", str(world_size), sys.executable, *args]


def launch(
    world_size: int, *args: str, timeout: float = 60, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Runs this Python with `args` on `world_size` ranks to its end; `extra` goes to environ."""
    return subprocess.run(
        command(world_size, *args),
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(**extra),
        check=False,
    )
