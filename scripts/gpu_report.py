"""Puts what scripts/gpu_check.sh found into one table and one JSON file.

python scripts/gpu_report.py FOLDER      # steps.tsv and *.json of the steps lie there
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# What issue "GPU buffers" asks of a real device.
KERNEL_GOAL = 0.85  # of the copy's rate, from 64 MiB
IPC_GOAL = 10.0  # times as fast as the staged path, from 16 MiB
KERNEL_BYTES = 64 << 20
IPC_BYTES = 16 << 20


def read_json(path: Path) -> Any:
    """The document, or None where a step did not get to writing one."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """One record a step: name, outcome, seconds, detail."""
    steps = []
    for line in (folder / "steps.tsv").read_text().splitlines():
        name, outcome, seconds, detail = ([*line.split("\t"), "", "", ""])[:4]
        steps.append(
            {"step": name, "outcome": outcome, "seconds": int(seconds or 0), "detail": detail}
        )
    return steps


def times(document: Any, backend: str) -> dict[int, float]:
    """Bytes -> seconds in place, of one backend in a report of `mpidp bench -J`."""
    found = {}
    for result in (document or {}).get("results", []):
        place = result.get("in_place") or {}
        if result.get("backend", "mpidp") == backend and place.get("time"):
            found[int(result["size"])] = float(place["time"]) * 1e-6
    return found


def table(steps: list[dict[str, Any]], kernels: Any, benches: dict[str, Any]) -> list[str]:
    """Everything for people."""
    lines = ["", "step                       outcome   seconds  detail"]
    lines += [
        f"{s['step']:<26} {s['outcome']:<9} {s['seconds']:>7}  {s['detail']}".rstrip()
        for s in steps
    ]
    if kernels:
        lines += ["", f"reduce kernel on {kernels['device']['name']} ({kernels['runtime']}), GB/s"]
        for size in kernels["sizes"]:
            lines.append(f"  {size['bytes'] >> 20} MiB, copy {size['copy_GBps']:.1f}")
            for row in size["reduce"]:
                below = size["bytes"] >= KERNEL_BYTES and row["of_copy"] < KERNEL_GOAL
                lines.append(
                    f"    {row['dtype']:>8} x {row['sources']}  {row['GBps']:8.1f}  "
                    f"{row['of_copy']:6.1%} of copy{'  BELOW THE GOAL' if below else ''}"
                )
    ipc, staged = times(benches["best"], "mpidp"), times(benches["staged"], "mpidp")
    mpi = times(benches["best"], "mpi")
    if ipc:
        lines += [
            "",
            "all_reduce in place, 2 ranks, microseconds: best transport, staged, MPI staged",
            f"  {'bytes':>11} {'best':>10} {'staged':>10} {'MPI':>10} {'staged/best':>12}",
        ]
        for nbytes in sorted(ipc):
            row = [ipc.get(nbytes), staged.get(nbytes), mpi.get(nbytes)]
            cells = [f"{t * 1e6:>10.1f}" if t else f"{'-':>10}" for t in row]
            ratio = staged[nbytes] / ipc[nbytes] if nbytes in staged else None
            shown = "-" if ratio is None else f"{ratio:.1f}x"
            below = nbytes >= IPC_BYTES and ratio is not None and ratio < IPC_GOAL
            lines.append(
                f"  {nbytes:>11} {' '.join(cells)} {shown:>12}{'  BELOW THE GOAL' if below else ''}"
            )
    for name, document in benches.items():
        if document:
            count = document["out_of_bounds"]["count"]
            transport = document["config"].get("device_transport")
            lines.append(f"wrong elements, {name} ({transport}): {count}")
    failed = [s["step"] for s in steps if s["outcome"] not in ("ok", "absent")]
    lines += ["", f"NOT OK: {', '.join(failed)}" if failed else "all steps ok"]
    return lines


def main() -> int:
    """Runs as a script; status 1 where a step failed."""
    folder = Path(sys.argv[1])
    steps = read_steps(folder)
    kernels = read_json(folder / "kernels.json")
    benches = {name: read_json(folder / f"bench-{name}.json") for name in ("best", "staged")}
    lines = table(steps, kernels, benches)
    report = {"steps": steps, "kernels": kernels, "all_reduce": benches}
    (folder / "gpu_check.json").write_text(json.dumps(report, indent=1))
    print("\n".join(lines))
    print(f"JSON: {folder / 'gpu_check.json'}")
    return 1 if lines[-1].startswith("NOT OK") else 0


if __name__ == "__main__":
    sys.exit(main())
