"""The report as JSON, with nccl-tests' names where it has them (version 2 of its layout).

Unlike there, booleans and numbers are real ones, a time that was not measured is null, and the
environment is left out. Times are in microseconds, bandwidths in GB/s (1e9 bytes).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpidp.bench.driver import (
    Measurement,
    Plan,
    Report,
    Row,
    Variant,
    average_bus_bandwidth,
    out_of_bounds,
)
from mpidp.bench.text import ratios

LAYOUT_VERSION = 2


def build(
    plan: Plan,
    variants: Sequence[Variant],
    algorithms: Sequence[str],
    report: Report,
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """The whole document, without the times of start and end."""
    first = report.section(variants[0])
    return {
        "version": LAYOUT_VERSION,
        "mpidp_version": facts["version"],
        "args": list(facts["args"]),
        "start_time": facts["start_time"],
        "config": _config(plan, facts),
        "results": [_result(row, report) for row in report.rows],
        "out_of_bounds": _out_of_bounds(report.rows),
        # Of the first section, the others having their own below.
        "average_bus_bandwidth": {"bandwidth": average_bus_bandwidth(first), "okay": None},
        "sections": [
            {
                "backend": variant.backend.name,
                "memory": variant.memory,
                "algorithm": algorithm,
                "out_of_bounds": _out_of_bounds(report.section(variant)),
                "average_bus_bandwidth": {
                    "bandwidth": average_bus_bandwidth(report.section(variant)),
                    "okay": None,
                },
            }
            for variant, algorithm in zip(variants, algorithms, strict=True)
        ],
        "ratios": _ratios(variants, report),
        "errors": [],
        "end_time": facts["end_time"],
    }


def _config(plan: Plan, facts: Mapping[str, Any]) -> dict[str, Any]:
    step = {"step_factor": plan.factor} if plan.step is None else {"step_bytes": plan.step}
    return {
        "nthreads": 1,
        "ngpus": 0,
        "minimum_bytes": plan.min_bytes,
        "maximum_bytes": plan.max_bytes,
        **step,
        "warmup_iters": plan.warmup,
        "iterations": plan.iterations,
        "aggregated_iterations": 1,
        "validation": plan.check,
        "blocking_collectives": True,
        "per_iter_timing": True,
        "devices": facts["devices"],
        "collective": plan.collective,
        "cadence": plan.cadence,
        "ranks": facts["world_size"],
        "ranks_per_node": facts["local_sizes"],
        "cores": facts["cores"],
        "oversubscribed": facts["oversubscribed"],
        "mpi_library": facts["mpi_library"],
        "instruction_set": facts["instruction_set"],
        "device_transport": facts.get("device_transport"),
    }


def _out_of_bounds(rows: Sequence[Row]) -> dict[str, Any]:
    wrong = out_of_bounds(rows)
    return {"count": wrong, "okay": wrong == 0}


def _result(row: Row, report: Report) -> dict[str, Any]:
    case, measured = row.case, row.measured()
    floor = report.floors.get(case)
    ours = row.variant.backend.name == "mpidp"
    result: dict[str, Any] = {
        "size": case.nbytes,
        "count": case.count,
        "type": case.dtype,
        "redop": case.op,
        "root": case.root,
        "out_of_place": _mode(row, row.out_of_place),
        "out_of_place_per_iter": _per_iteration(row.out_of_place),
        "in_place": _mode(row, row.in_place),
        "in_place_per_iter": _per_iteration(row.in_place),
        "actual_iterations": max((m.statistics.iterations for m in measured), default=0),
        "experiment_name": f"{case.collective.name} {row.variant.label}",
        "backend": row.variant.backend.name,
        "memory": row.variant.memory,
        "note": row.note,
    }
    if floor is not None and ours:
        result["memory_floor_us"] = floor.p50 * 1e6
        for key, measurement in (("out_of_place", row.out_of_place), ("in_place", row.in_place)):
            if measurement is not None:
                result[key]["memory_floor_efficiency"] = floor.p50 / measurement.statistics.p50
    return result


def _mode(row: Row, measurement: Measurement | None) -> dict[str, Any] | None:
    if measurement is None:
        return None
    algorithm, bus = row.case.bandwidths(measurement.statistics.p50)
    return {
        "time": measurement.statistics.p50 * 1e6,
        "alg_bw": algorithm,
        "bus_bw": bus,
        "nwrong": measurement.wrong,
    }


def _per_iteration(measurement: Measurement | None) -> dict[str, Any] | None:
    if measurement is None:
        return None
    statistics = measurement.statistics
    return {
        "iterations": statistics.iterations,
        "min_us": statistics.min * 1e6,
        "max_us": statistics.max * 1e6,
        "avg_us": statistics.mean * 1e6,
        "p50_us": statistics.p50 * 1e6,
        "p90_us": statistics.p90 * 1e6,
        "p95_us": statistics.p95 * 1e6,
        "p99_us": statistics.p99 * 1e6,
        "stdev_us": statistics.stdev * 1e6,
        "cv_pct": 100 * statistics.stdev / statistics.mean if statistics.mean else 0.0,
    }


def _ratios(variants: Sequence[Variant], report: Report) -> list[dict[str, Any]]:
    found = []
    for other in variants:
        for variant in variants:
            if other.backend.name == "mpidp" or variant.backend.name != "mpidp":
                continue
            pairs = zip(report.section(variant), report.section(other), strict=True)
            for mine, theirs in pairs:
                out_of_place, in_place = ratios(mine, theirs)
                found.append(
                    {
                        "size": mine.case.nbytes,
                        "type": mine.case.dtype,
                        "redop": mine.case.op,
                        "numerator": variant.label,
                        "denominator": other.label,
                        "out_of_place": out_of_place,
                        "in_place": in_place,
                    }
                )
    return found


def unwritable(path: Path) -> str | None:
    """Why a file cannot be put at `path`, or None. Leaves nothing behind."""
    target = _resolved(path)
    if target.is_dir():
        return f"{path} is a directory"
    if not target.parent.is_dir():
        return f"{path}: the folder {path.parent} does not exist"
    if target.exists() and not target.is_file():
        return None if os.access(target, os.W_OK) else f"{path} is not writable"
    try:
        with _sibling(target).open("xb"):
            pass
        _sibling(target).unlink()
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Has `write` write a file that takes the place of `path` in one step, or not at all."""
    target = _resolved(path)
    if target.exists() and not target.is_file():
        write(target)  # a pipe or /dev/null must not be replaced
        return
    temporary = _sibling(target)
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Writes `document` to `path`, whole or not at all."""
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    write_whole(path, lambda temporary: _write_text(temporary, text))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _resolved(path: Path) -> Path:
    # A symbolic link stays one: its target is replaced.
    return Path(os.path.realpath(path))


def _sibling(target: Path) -> Path:
    # Keeps the suffix, by which a plot's format is chosen.
    return target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
