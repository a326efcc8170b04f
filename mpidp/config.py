"""Settings, and the only reader of environment variables.

    config = Config.from_environment()                     # what `Communicator()` uses
    config = dataclasses.replace(config, shared_memory=False)
    with mpidp.Communicator(config=config) as comm: ...

`SETTINGS` lists every setting with its variable, so that `mpidp info` and the docs cannot drift.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mpidp.errors import InvalidArgumentError

ALGORITHMS = (
    "auto",
    "direct",
    "ring",
    "recursive_halving",
    "recursive_doubling",
    "hierarchical",
    "mpi",
)
STORES = ("auto", "streaming", "loop", "library")
DEVICE_TRANSPORTS = ("auto", "staged")
OPS = ("sum", "mean", "prod", "min", "max")

_SUFFIXES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_bytes(text: str) -> int:
    """Bytes from "4096", "64K", "1M" or "2GiB"; suffixes are powers of 1024.

    Raises ValueError where the text is none of these.
    """
    stripped = text.strip().upper().removesuffix("IB").removesuffix("B")
    suffix = stripped[-1:] if stripped[-1:].isalpha() else ""
    number = stripped[: len(stripped) - len(suffix)].strip()
    if suffix not in _SUFFIXES or not (number.isascii() and number.isdigit()):
        raise ValueError("expected a number of bytes such as 65536, 64K or 1M")
    return int(number) * _SUFFIXES[suffix]


def parse_bool(text: str) -> bool:
    """True or False from 1/0, true/false, yes/no, on/off."""
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError("expected 0 or 1")


def _parse_int(text: str) -> int:
    try:
        return int(text.strip())
    except ValueError:
        raise ValueError("expected an integer") from None


def _parse_seconds(text: str) -> float:
    try:
        return float(text.strip())
    except ValueError:
        raise ValueError("expected a number of seconds") from None


@dataclass(frozen=True)
class Setting:
    """One setting: the `Config` field, its environment variable, and how the text is read."""

    field: str
    variable: str
    parse: Callable[[str], Any]
    help: str


SETTINGS = (
    Setting(
        "timeout",
        "MPIDP_TIMEOUT",
        _parse_seconds,
        "Seconds that any collective may wait before CollectiveTimeoutError.",
    ),
    Setting(
        "node_id",
        "MPIDP_NODE_ID",
        _parse_int,
        "Integer >= 0 naming this process's node, in place of what MPI says; to emulate nodes.",
    ),
    Setting(
        "shared_memory",
        "MPIDP_SHARED_MEMORY",
        parse_bool,
        "1 to exchange through shared memory inside a node, 0 to use MPI messages only.",
    ),
    Setting(
        "slot_bytes",
        "MPIDP_SLOT_BYTES",
        parse_bytes,
        "Bytes of one shared-memory staging slot, for arrays outside registered memory.",
    ),
    Setting(
        "inline_bytes",
        "MPIDP_INLINE_BYTES",
        parse_bytes,
        "Largest message, in bytes, that travels inside the flag cache lines.",
    ),
    Setting(
        "segment_bytes",
        "MPIDP_SEGMENT_BYTES",
        parse_bytes,
        "Bytes of one pipelined segment of an MPI message.",
    ),
    Setting(
        "piece_bytes",
        "MPIDP_PIECE_BYTES",
        parse_bytes,
        "Largest single MPI message in bytes; longer ones are cut (below 2^31).",
    ),
    Setting(
        "spin_us",
        "MPIDP_SPIN_US",
        _parse_int,
        "Microseconds to spin before a wait yields the core.",
    ),
    Setting(
        "stores",
        "MPIDP_STORES",
        str,
        'Stores to memory that peers read: "auto" (measured), "streaming", "loop" or "library".',
    ),
    Setting(
        "device_transport",
        "MPIDP_DEVICE_TRANSPORT",
        str,
        '"auto" for the best transport between GPUs that works, "staged" to go through the host.',
    ),
    Setting(
        "device_segment_bytes",
        "MPIDP_DEVICE_SEGMENT_BYTES",
        parse_bytes,
        "Bytes of one segment of a GPU array that is staged through pinned host memory.",
    ),
    Setting(
        "tuning_file",
        "MPIDP_TUNING_FILE",
        str,
        "JSON tuning table to use in place of the built-in one; rank 0's counts.",
    ),
    Setting(
        "algorithm",
        "MPIDP_ALGORITHM",
        str,
        'Algorithm that "auto" means, for every collective that has it; rank 0\'s counts.',
    ),
)


@dataclass(frozen=True)
class Config:
    """Validated settings of a communicator. None means the extension's own default.

    Sizes are in bytes and `timeout` in seconds. Raises `InvalidArgumentError` naming the setting
    and the value.
    """

    timeout: float = 600.0
    node_id: int | None = None
    shared_memory: bool = True
    slot_bytes: int | None = None
    inline_bytes: int | None = None
    segment_bytes: int | None = None
    piece_bytes: int | None = None
    spin_us: int | None = None
    stores: str = "auto"
    device_transport: str = "auto"
    device_segment_bytes: int | None = None
    tuning_file: str | None = None
    algorithm: str = "auto"

    def __post_init__(self) -> None:
        for setting in SETTINGS:
            value = getattr(self, setting.field)
            reason = _reason_against(setting.field, value)
            if reason:
                raise InvalidArgumentError(
                    f"{setting.field} = {value!r} ({setting.variable}): {reason}"
                )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Config:
        """The settings that the MPIDP_* variables of `environ` (default: os.environ) ask for.

        An empty variable counts as unset. Raises `InvalidArgumentError` naming variable and value.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for setting in SETTINGS:
            text = environ.get(setting.variable, "")
            if not text.strip():
                continue
            try:
                value = setting.parse(text)
            except ValueError as error:
                raise InvalidArgumentError(f"{setting.variable}={text!r}: {error}") from None
            reason = _reason_against(setting.field, value)
            if reason:
                raise InvalidArgumentError(f"{setting.variable}={text!r}: {reason}")
            values[setting.field] = value
        return cls(**values)

    def core_options(self) -> dict[str, Any]:
        """Keyword arguments of `_core.Context`; those left to its defaults are absent."""
        fields = (
            "node_id",
            "slot_bytes",
            "inline_bytes",
            "segment_bytes",
            "piece_bytes",
            "spin_us",
            "device_segment_bytes",
        )
        options = {field: getattr(self, field) for field in fields}
        options = {field: value for field, value in options.items() if value is not None}
        for field in ("stores", "device_transport"):
            if getattr(self, field) != "auto":
                options[field] = getattr(self, field)
        return {"timeout": self.timeout, "shared_memory": self.shared_memory, **options}


def device_plugin_path() -> str | None:
    """The file that MPIDP_DEVICE_PLUGIN names in place of the CUDA part; for tests only.

    No setting of a communicator: a process loads one plugin.
    """
    return os.environ.get("MPIDP_DEVICE_PLUGIN") or None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _reason_against(field: str, value: Any) -> str:
    """Why `value` is wrong for `field`; empty when it is right."""
    if field == "timeout":
        # bool is an int, and True seconds is surely a slip.
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value <= 0:
            return "expected a finite number of seconds above 0"
    elif field == "shared_memory":
        if not isinstance(value, bool):
            return "expected True or False"
    elif field == "stores":
        if value not in STORES:
            return f"expected one of {', '.join(STORES)}"
    elif field == "device_transport":
        if value not in DEVICE_TRANSPORTS:
            return f"expected one of {', '.join(DEVICE_TRANSPORTS)}"
    elif field == "algorithm":
        if value not in ALGORITHMS:
            return f"expected one of {', '.join(ALGORITHMS)}"
    elif value is None:
        return ""
    elif field == "tuning_file":
        if not isinstance(value, str):
            return "expected the path of a JSON file"
    elif field in ("node_id", "spin_us"):
        if not _is_int(value) or not 0 <= value < 1 << 31:
            return "expected an integer from 0 to 2^31 - 1"
    elif not _is_int(value) or value < _SMALLEST[field]:
        return f"expected at least {_SMALLEST[field]} bytes"
    elif value >= 1 << 31:
        return "expected less than 2^31 bytes"
    return ""


_SMALLEST = {
    "slot_bytes": 4096,
    "inline_bytes": 0,
    "segment_bytes": 1024,
    "piece_bytes": 1024,
    "device_segment_bytes": 1024,
}
