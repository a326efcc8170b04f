"""Builds the emulated device: the library's CUDA sources and the runtime here, for the host.

    python tests/gpu/emulated/build.py       # prints the path of the plugin

Built once for each state of the sources, into build/emulated-<hash>/, which git ignores.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
CSRC = ROOT / "csrc"
SOURCES = (
    CSRC / "reduce" / "cuda.cu",
    CSRC / "reduce" / "cuda_codec.cu",
    CSRC / "transport" / "cuda_runtime.cu",
    HERE / "streams.cc",
    HERE / "memory.cc",
)
FLAGS = (
    *("-std=c++17", "-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-pthread"),
    *("-ffp-contract=off", "-DMPIDP_EMULATED", "-Wall", "-Wextra", "-Wno-unknown-pragmas"),
)


def compiler() -> list[str]:
    """$CXX, else what there is."""
    named = os.environ.get("CXX")
    if named:
        return shlex.split(named)
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise RuntimeError("the emulated device needs a C++17 compiler: set CXX")


def build() -> Path:
    """The plugin's path. Several processes may ask at once: one builds, the others wait."""
    digest = hashlib.sha256(" ".join([*compiler(), *FLAGS]).encode())
    headers = [*CSRC.glob("reduce/*.h"), *CSRC.glob("common/*.h"), *HERE.glob("*.h")]
    headers.append(CSRC / "transport" / "device_runtime.h")
    for path in (*SOURCES, *sorted(headers)):
        digest.update(path.read_bytes())
    folder = ROOT / "build" / f"emulated-{digest.hexdigest()[:16]}"
    library = folder / "_cuda.so"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(folder, library)
    return library


def _compile(folder: Path, library: Path) -> None:
    def compile_one(source: Path) -> str:
        made = folder / (source.stem + ".o")
        flags = [*FLAGS, f"-I{CSRC}", f"-I{HERE}"]
        _run([*compiler(), *flags, "-x", "c++", "-c", str(source), "-o", str(made)])
        return str(made)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, SOURCES))
    unfinished = folder / "unfinished.so"
    _run([*compiler(), "-shared", "-pthread", *objects, "-o", str(unfinished)])
    unfinished.rename(library)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")


if __name__ == "__main__":
    print(build())
