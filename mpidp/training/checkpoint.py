"""Checkpoints: written whole or not at all, safe to load, the same for any number of ranks.

A checkpoint is one file `step-NNNNNNNNNN.safetensors`: the arrays, the metadata as JSON in its
header, and a SHA-256 of both. Loading runs no code. A file is written under a temporary name in the
same folder, flushed to the disk and renamed, so that a killed write leaves the older ones as they
were; the newest `keep` stay. Files of later steps than the one just written are of a run that this
one went back behind (another run, or a damaged file): they are set aside as `*.superseded`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpidp.errors import MpidpError

if TYPE_CHECKING:
    from mpidp.communicator import Communicator

FORMAT = "mpidp-checkpoint-2"
_NAME = re.compile(r"step-(\d{10})\.safetensors")
_SHARED = "shared/"


class CheckpointError(MpidpError):
    """A checkpoint cannot be written or read; the message names the file and the reason."""


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint held. `per_rank` is this rank's part, empty on ranks that had none."""

    path: Path
    arrays: dict[str, NDArray[Any]]
    meta: dict[str, Any]
    per_rank: dict[str, NDArray[Any]]


def save(
    comm: Communicator,
    directory: str | Path,
    arrays: Mapping[str, NDArray[Any]],
    meta: Mapping[str, Any],
    *,
    per_rank: Mapping[str, NDArray[Any]] | None = None,
    step: int = 0,
    keep: int = 2,
) -> Path:
    """Writes a checkpoint. Collective: rank 0 writes, and all ranks learn how it went.

    `arrays` and `meta` (JSON values) are rank 0's; `per_rank` holds what differs by rank, such as
    compression residuals. Raises `CheckpointError` on every rank where the write fails.
    """
    mine = {name: _plain(value) for name, value in (per_rank or {}).items()}
    parts = comm.all_gather_object(mine)
    path = Path(directory) / f"step-{step:010d}.safetensors"
    failure = None
    if comm.rank == 0:
        # Whatever goes wrong here, the other ranks wait to hear of it.
        try:
            tensors = {_SHARED + name: _plain(value) for name, value in arrays.items()}
            for rank, part in enumerate(parts):
                tensors.update((f"rank{rank}/{name}", value) for name, value in part.items())
            _write(path, tensors, {**meta}, comm.world_size)
            _prune(path, keep)
        except Exception as error:
            failure = f"cannot write checkpoint {path}: {error}"
    failure = comm.broadcast_object(failure, root=0)
    if failure is not None:
        raise CheckpointError(failure)
    return path


def load(comm: Communicator, directory: str | Path) -> Loaded:
    """Reads the newest checkpoint that is whole. Collective: rank 0 reads, all get the result.

    A truncated or foreign file is passed over in favour of the one before it; where none is left,
    every rank raises `CheckpointError` with each file's fault.
    """
    outcome: tuple[Path, dict[str, Any], dict[str, Any]] | str | None = None
    if comm.rank == 0:
        try:
            outcome = _newest_whole(Path(directory))
        except Exception as error:  # the other ranks wait to hear of it
            outcome = f"cannot read {directory}: {error}"
    outcome = comm.broadcast_object(outcome, root=0)
    if isinstance(outcome, str):
        raise CheckpointError(outcome)
    assert outcome is not None
    path, tensors, meta = outcome
    mine = f"rank{comm.rank}/"
    return Loaded(
        path,
        {k[len(_SHARED) :]: v for k, v in tensors.items() if k.startswith(_SHARED)},
        meta,
        {k[len(mine) :]: v for k, v in tensors.items() if k.startswith(mine)},
    )


def exists(comm: Communicator, directory: str | Path) -> bool:
    """Whether rank 0 sees a checkpoint file in the folder, whole or not. Collective."""
    return bool(comm.broadcast_object(bool(files(directory)) if comm.rank == 0 else None, root=0))


def read(path: str | Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """(arrays with their prefixes, metadata) of one file. Raises `CheckpointError`. Local."""
    from safetensors import safe_open

    path = Path(path)
    try:
        with safe_open(str(path), framework="numpy") as file:
            header = file.metadata() or {}
            # Before the arrays: foreign ones may be of types that NumPy does not have.
            if header.get("format") != FORMAT:
                found = header.get("format", "none")
                raise CheckpointError(
                    f"{path} is no mpidp checkpoint (format {found!r}, not {FORMAT!r})"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} is damaged or no checkpoint: {error}") from error
    if header.get("sha256") != _digest(tensors, header.get("meta", "")):
        raise CheckpointError(f"{path} is damaged: its checksum does not fit its content")
    meta: dict[str, Any] = json.loads(header["meta"])
    return tensors, meta


def files(directory: str | Path) -> list[Path]:
    """The folder's checkpoint files, newest first."""
    try:
        found = [path for path in Path(directory).iterdir() if _NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    return sorted(found, reverse=True)


def _newest_whole(directory: Path) -> tuple[Path, dict[str, Any], dict[str, Any]] | str:
    faults = []
    try:
        candidates = files(directory)
    except OSError as error:
        return f"cannot read {directory}: {error}"
    for path in candidates:
        try:
            return (path, *read(path))
        except CheckpointError as error:
            faults.append(str(error))
    if not faults:
        return f"no checkpoint in {directory}"
    return "no whole checkpoint: " + "; ".join(faults)


def _write(
    path: Path, tensors: dict[str, NDArray[Any]], meta: dict[str, Any], world_size: int
) -> None:
    from safetensors.numpy import save as serialize

    text = json.dumps({**meta, "world_size": world_size})
    header = {"format": FORMAT, "meta": text, "sha256": _digest(tensors, text)}
    data = serialize(tensors, metadata=header)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # The rename itself must reach the disk too.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _prune(newest: Path, keep: int) -> None:
    found = files(newest.parent)
    here = found.index(newest)
    for later in found[:here]:
        later.replace(later.with_name(later.name + ".superseded"))
    for old in found[here:][max(keep, 1) :]:
        old.unlink(missing_ok=True)
    # What killed writers left behind. Only rank 0 of one job writes to a folder.
    for stray in newest.parent.glob(".step-*.safetensors.*.tmp"):
        stray.unlink(missing_ok=True)


def _digest(tensors: Mapping[str, NDArray[Any]], meta: str) -> str:
    digest = hashlib.sha256(meta.encode())
    for name in sorted(tensors):
        array = _plain(tensors[name])
        digest.update(f"{name} {array.dtype.name} {array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _plain(value: NDArray[Any]) -> NDArray[Any]:
    """The array in C and native byte order, as it is stored; a scalar stays of no dimensions."""
    array = np.asarray(value, order="C")
    return array.astype(array.dtype.newbyteorder("="), copy=False)
