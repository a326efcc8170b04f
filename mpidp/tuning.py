"""Which algorithm "auto" means: (collective, nbytes, topology, table) -> algorithm. Pure.

A table is an ordered list of entries, each a condition on the topology and a list of
(limit_bytes, algorithm) rules; the first entry that names the collective and fits the topology
decides. Nothing is measured at run time and rank 0's table counts on every rank, so all ranks agree
and a call repeats with the same algorithm, hence the same bits.

    topology = Topology(world_size=8, num_nodes=4, min_local_size=2, max_local_size=2,
                        shared_memory=True)
    select("all_reduce", 1 << 20, topology)         # -> "hierarchical"

nbytes is that of the larger of input and output: of the output for all_gather, of x for
all others.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpidp.errors import InvalidArgumentError

SCHEMA_VERSION = 1

# What the last rule's open limit becomes where a number is needed.
UNLIMITED = (1 << 63) - 1

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all")

# The algorithms that each collective has, whatever the topology.
AVAILABLE: Mapping[str, tuple[str, ...]] = {
    "all_reduce": (
        "direct",
        "ring",
        "recursive_halving",
        "recursive_doubling",
        "hierarchical",
        "mpi",
    ),
    "reduce_scatter": ("direct", "ring", "recursive_halving", "mpi"),
    "all_gather": ("direct", "ring", "recursive_doubling", "mpi"),
    "broadcast": ("direct", "ring", "recursive_doubling", "mpi"),
    "reduce": ("direct", "ring", "recursive_doubling", "mpi"),
    "all_to_all": ("direct", "mpi"),
}

Rules = tuple[tuple[int | None, str], ...]


@dataclass(frozen=True)
class Topology:
    """What the choice may depend on; the same on every rank of a communicator."""

    world_size: int
    num_nodes: int
    min_local_size: int
    max_local_size: int
    shared_memory: bool


@dataclass(frozen=True)
class Entry:
    """Rules for some collectives on the topologies that meet every condition given.

    A rule is (limit_bytes, algorithm) and covers nbytes <= limit_bytes; limits rise, and the last
    one is None.
    """

    collectives: tuple[str, ...]
    rules: Rules
    min_world_size: int = 1
    max_world_size: int | None = None
    min_nodes: int = 1
    max_nodes: int | None = None
    min_local_size: int = 1
    max_local_size: int | None = None
    shared_memory: bool | None = None

    def __post_init__(self) -> None:
        reason = self._reason_against()
        if reason:
            raise InvalidArgumentError(f"tuning entry for {self.collectives!r}: {reason}")

    def fits(self, topology: Topology) -> bool:
        """Whether the topology meets every condition."""
        return (
            _within(topology.world_size, self.min_world_size, self.max_world_size)
            and _within(topology.num_nodes, self.min_nodes, self.max_nodes)
            and topology.min_local_size >= self.min_local_size
            and _within(topology.max_local_size, 1, self.max_local_size)
            and self.shared_memory in (None, topology.shared_memory)
        )

    def _reason_against(self) -> str:
        unknown = [name for name in self.collectives if name not in AVAILABLE]
        if unknown or not self.collectives:
            return f"unknown collectives {unknown}; expected some of {', '.join(COLLECTIVES)}"
        for name in _LOWER + _UPPER:
            value = getattr(self, name)
            if not _is_whole(value, 1) and not (value is None and name in _UPPER):
                return f"{name} {value!r}: expected an integer of at least 1"
        if self.shared_memory not in (None, True, False) or _is_whole(self.shared_memory, 0):
            return f"shared_memory {self.shared_memory!r}: expected true, false or null"
        if not self.rules or self.rules[-1][0] is not None:
            return "the last rule must have the limit null, so that every size has an algorithm"
        limits = [limit for limit, _ in self.rules[:-1]]
        for limit in limits:
            if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
                return f"limit {limit!r}: expected a number of bytes >= 0"
        if limits != sorted(set(limits), key=lambda limit: limit or 0):
            return f"limits must rise, found {limits}"
        for _, algorithm in self.rules:
            for collective in self.collectives:
                if algorithm not in AVAILABLE[collective]:
                    have = ", ".join(AVAILABLE[collective])
                    return f"{collective} has no algorithm {algorithm!r}; it has {have}"
        return ""


@dataclass(frozen=True)
class Table:
    """A named list of entries; `Table.from_json` and `to_json` are its file form.

    `measured` is what `mpidp tune` found, by a label of the topology; nothing is chosen by it.
    """

    name: str
    entries: tuple[Entry, ...]
    measured: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def to_json(self) -> str:
        """The table as the text of a tuning file."""
        document: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "entries": [dataclasses.asdict(entry) for entry in self.entries],
        }
        if self.measured:
            document["measured"] = self.measured
        return json.dumps(document, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Table:
        """Read a tuning file's text. Raises `InvalidArgumentError` saying what is wrong where."""
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidArgumentError(f"not a JSON document: {error}") from None
        if not isinstance(document, dict) or document.get("schema_version") != SCHEMA_VERSION:
            raise InvalidArgumentError(
                f'not a tuning table: expected an object with "schema_version": {SCHEMA_VERSION}'
            )
        name, entries = document.get("name"), document.get("entries")
        if not isinstance(name, str) or not isinstance(entries, list):
            raise InvalidArgumentError('a tuning table needs a string "name" and a list "entries"')
        measured = document.get("measured", {})
        reason = _reason_against_measured(measured)
        if reason:
            raise InvalidArgumentError(reason)
        found = tuple(_entry(number, fields) for number, fields in enumerate(entries))
        return cls(name, found, measured)


def load_table(path: str) -> Table:
    """The table in a file. Raises `InvalidArgumentError` naming the file."""
    try:
        return Table.from_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"tuning file {path}: cannot be read: {error}") from None
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"tuning file {path}: {error}") from None


def rules_for(
    collective: str, topology: Topology, table: Table | None = None, algorithm: str = "auto"
) -> list[tuple[int, str]]:
    """[(limit_bytes, algorithm)] with rising limits, the last `UNLIMITED`.

    `table` defaults to the built-in one, which also decides where the table has no fitting entry.
    An `algorithm` other than "auto" decides every size of the collectives that have it here.
    """
    if collective not in AVAILABLE:
        raise InvalidArgumentError(
            f"collective {collective!r}: expected one of {', '.join(COLLECTIVES)}"
        )
    if algorithm in AVAILABLE[collective]:
        return [(UNLIMITED, algorithm)]
    for entry in (*(table.entries if table else ()), *BUILT_IN.entries):
        if collective in entry.collectives and entry.fits(topology):
            return [(UNLIMITED if limit is None else limit, name) for limit, name in entry.rules]
    raise InvalidArgumentError(f"no tuning entry fits {collective} on {topology}")


def select(collective: str, nbytes: int, topology: Topology, table: Table | None = None) -> str:
    """The algorithm for one call, as the extension picks it from the same rules."""
    return next(name for limit, name in rules_for(collective, topology, table) if nbytes <= limit)


def _within(value: int, smallest: int, largest: int | None) -> bool:
    return smallest <= value and (largest is None or value <= largest)


_LOWER = ("min_world_size", "min_nodes", "min_local_size")
_UPPER = ("max_world_size", "max_nodes", "max_local_size")
_MEASURED_KEYS = ("cores", "mpi", "alpha", "beta", "gamma", "collectives")


def _is_whole(value: Any, smallest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= smallest


def _is_seconds(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= 0


def _reason_against_measured(measured: Any) -> str:
    """Where the object "measured" of a file is wrong; empty when it is right."""
    if not isinstance(measured, dict):
        return "measured: expected an object"
    for label, found in measured.items():
        place = f"measured: {label!r}"
        if not isinstance(found, dict) or sorted(found) != sorted(_MEASURED_KEYS):
            return f"{place}: expected an object with exactly {', '.join(_MEASURED_KEYS)}"
        if not _is_whole(found["cores"], 1):
            return f"{place}: cores: expected an integer of at least 1"
        if not isinstance(found["mpi"], str):
            return f"{place}: mpi: expected a string"
        for key in ("alpha", "beta", "gamma"):
            if found[key] is not None and not _is_seconds(found[key]):
                return f"{place}: {key}: expected a number >= 0 or null"
        if not isinstance(found["collectives"], dict):
            return f"{place}: collectives: expected an object"
        for name, times in found["collectives"].items():
            reason = _reason_against_times(name, times)
            if reason:
                return f"{place}: collectives: {name}: {reason}"
    return ""


def _reason_against_times(collective: str, times: Any) -> str:
    if collective not in AVAILABLE:
        return f"expected one of {', '.join(COLLECTIVES)}"
    if not isinstance(times, dict) or sorted(times) != ["nbytes", "seconds"]:
        return 'expected an object with exactly "nbytes" and "seconds"'
    sizes, seconds = times["nbytes"], times["seconds"]
    if not isinstance(sizes, list) or not all(_is_whole(size, 0) for size in sizes):
        return "nbytes: expected a list of integers >= 0"
    if sizes != sorted(set(sizes)):
        return "nbytes: sizes must rise"
    if not isinstance(seconds, dict):
        return "seconds: expected an object"
    for algorithm, column in seconds.items():
        if algorithm not in AVAILABLE[collective]:
            return f"seconds: there is no algorithm {algorithm!r}"
        if not isinstance(column, list) or len(column) != len(sizes):
            return f"seconds: {algorithm}: expected a list of {len(sizes)} times"
        if not all(_is_seconds(value) for value in column):
            return f"seconds: {algorithm}: expected numbers >= 0"
    return ""


def _entry(number: int, fields: Any) -> Entry:
    if not isinstance(fields, dict):
        raise InvalidArgumentError(f"entry {number}: expected an object")
    known = {field.name for field in dataclasses.fields(Entry)}
    unknown = sorted(set(fields) - known)
    if unknown:
        raise InvalidArgumentError(
            f"entry {number}: unknown keys {', '.join(unknown)}; "
            f"expected {', '.join(sorted(known))}"
        )
    try:
        rules = tuple((limit, str(name)) for limit, name in fields["rules"])
        return Entry(**{**fields, "collectives": tuple(fields["collectives"]), "rules": rules})
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, InvalidArgumentError):
            raise InvalidArgumentError(f"entry {number}: {error}") from None
        raise InvalidArgumentError(
            f'entry {number}: expected "collectives": [names] and "rules": [[limit, algorithm]]'
        ) from None


_KIB = 1 << 10

_BY_SIZE: Rules = (
    (4 * _KIB, "recursive_doubling"),
    (256 * _KIB, "recursive_halving"),
    (None, "ring"),
)

# One node: every rank reads its neighbours' memory, the lower bound at every size. Several nodes
# with several ranks each: the hierarchy, so that a node's share crosses the wire once. Otherwise
# the classic switch: fewest rounds while latency counts, then halving, then the ring, whose
# neighbours-only traffic holds up best on real networks.
BUILT_IN = Table(
    name="built-in",
    entries=(
        Entry(COLLECTIVES, ((None, "direct"),), max_nodes=1, shared_memory=True),
        Entry(("all_reduce",), _BY_SIZE, max_local_size=1),
        Entry(("all_reduce",), ((None, "hierarchical"),), shared_memory=True),
        Entry(("all_reduce",), _BY_SIZE),
        Entry(("reduce_scatter",), ((256 * _KIB, "recursive_halving"), (None, "ring"))),
        Entry(("all_gather",), ((128 * _KIB, "recursive_doubling"), (None, "ring"))),
        Entry(("broadcast",), ((64 * _KIB, "recursive_doubling"), (None, "ring"))),
        Entry(("reduce",), ((16 * _KIB, "recursive_doubling"), (None, "ring"))),
        Entry(("all_to_all",), ((None, "direct"),)),
    ),
)
