#!/usr/bin/env python3
"""All-reduce with mpidp on top of each MPI against the best of the MPIs' own, on one machine.

    scripts/compare_mpi.py                        # some minutes
    scripts/compare_mpi.py --quick --mpi mpich,openmpi
    scripts/compare_mpi.py -J compare.json --plot compare.svg

Each MPI gets an environment of its own through scripts/setup.sh --mpi; existing ones are used
again. The sweep is `mpidp bench --backend mpidp,mpi --memory both`, float32, blocking, in place: a
run's time is the median over iterations of the slowest rank's. The MPIs take turns in rounds, so
that noise hits all alike, and the median over rounds counts. Gloo is measured too where the first
environment has torch. A ratio is the best MPI's time at that size over mpidp's: above 1 mpidp is
faster. Exit status: 0, also where figures fall short; 1 where a run failed; 2 for bad usage.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MPIS = ("mpich", "openmpi", "impi")
MEMORIES = ("registered", "plain")
KIB, MIB = 1 << 10, 1 << 20
# Of the memory floor, for registered memory at 2 ranks from 4 MiB.
FLOOR_SHARE = 0.85

# {size in bytes: microseconds}
Times = dict[int, float]
# {"mpich" (its own), "mpich registered" (mpidp on top of it), "mpich plain", "gloo", ...: Times}
Series = dict[str, Times]


@dataclass(frozen=True)
class Case:
    """What must show at a world size and a range of sizes: the least ratio for each memory."""

    label: str
    world_size: int
    smallest: int
    largest: int
    least: Mapping[str, float]


ANY = 1 << 62
MUST_SHOW = (
    Case("2 ranks, <= 4 KiB", 2, 0, 4 * KIB, {"registered": 1.0, "plain": 1 / 1.2}),
    Case("2 ranks, 16 KiB to 1 MiB", 2, 16 * KIB, MIB, {"registered": 2.0, "plain": 1.2}),
    Case("2 ranks, >= 1 MiB", 2, MIB, ANY, {"registered": 3.0, "plain": 2.0}),
    Case("4 ranks, every size", 4, 0, ANY, {"registered": 1.0, "plain": 1.0}),
    Case("4 ranks, >= 256 KiB", 4, 256 * KIB, ANY, {"registered": 3.0, "plain": 1.5}),
)


def times_of(document: Mapping[str, Any], mpi: str) -> Series:
    """The in-place times in one `mpidp bench` report on top of `mpi`."""
    series: Series = {}
    for result in document["results"]:
        if result["in_place"] is None:
            continue
        ours = result["backend"] == "mpidp"
        name = f"{mpi} {result['memory']}" if ours else mpi
        series.setdefault(name, {})[result["size"]] = result["in_place"]["time"]
    return series


def floors_of(document: Mapping[str, Any]) -> dict[int, float]:
    """{size: share of the memory floor} of registered memory, from one report."""
    return {
        result["size"]: result["in_place"]["memory_floor_efficiency"]
        for result in document["results"]
        if result["memory"] == "registered"
        and "memory_floor_efficiency" in (result["in_place"] or {})
    }


def medians(rounds: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """By size, the median over the rounds that have the size."""
    found = sorted({size for times in rounds for size in times})
    return {size: statistics.median(t[size] for t in rounds if size in t) for size in found}


def merge(rounds: Sequence[Series]) -> Series:
    """The medians over rounds of every series."""
    names = dict.fromkeys(name for series in rounds for name in series)
    return {n: medians([series[n] for series in rounds if n in series]) for n in names}


def best_of(series: Series, mpis: Sequence[str]) -> dict[int, tuple[float, str]]:
    """By size, the time of the fastest MPI's own all-reduce, and which it is."""
    best: dict[int, tuple[float, str]] = {}
    for mpi in mpis:
        for size, taken in series.get(mpi, {}).items():
            best[size] = min(best.get(size, (math.inf, "")), (taken, mpi))
    return best


def ratios(series: Series, mpis: Sequence[str]) -> dict[str, dict[int, float]]:
    """For every series, the best MPI's time over its own, by size."""
    best = best_of(series, mpis)
    return {
        name: {size: best[size][0] / taken for size, taken in times.items() if size in best}
        for name, times in series.items()
    }


def bus_bandwidth(nbytes: int, us: float, world_size: int) -> float:
    """GB/s (1e9 bytes) of an all-reduce of nbytes."""
    return nbytes / us / 1e3 * 2 * (world_size - 1) / world_size


def human(nbytes: int) -> str:
    """4, 16K, 1M: sizes as bench's options take them."""
    for unit, suffix in ((MIB, "M"), (KIB, "K")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit}{suffix}"
    return str(nbytes)


def table(series: Series, mpis: Sequence[str], world_size: int) -> list[str]:
    """The lines of one world size: the MPIs' times, and each of mpidp's ratios to the best."""
    best, found = best_of(series, mpis), ratios(series, mpis)
    others = [name for name in series if name in (*mpis, "gloo")]
    ours = [name for name in series if name not in others]
    lines = [f"# {world_size} ranks: times in us, then the best MPI's time over mpidp's (on MPI)"]
    titles = [f"{name:>10}" for name in others] + [f"{name:>18}" for name in ours]
    lines.append(f"{'bytes':>6} {' '.join(titles)}  best GB/s  mpidp GB/s  best MPI")
    for size, (least, name) in sorted(best.items()):
        cells = [f"{series[n].get(size, math.nan):10.1f}" for n in others]
        cells += [f"{found[n].get(size, math.nan):18.2f}" for n in ours]
        top = min((series[n][size] for n in ours if size in series[n]), default=math.nan)
        rates = [bus_bandwidth(size, us, world_size) for us in (least, top)]
        lines.append(
            f"{human(size):>6} {' '.join(cells)} {rates[0]:10.2f} {rates[1]:11.2f}  {name}"
        )
    return lines


def verdict(values: Mapping[int, float], least: float) -> str:
    """Says pass or short, the worst value, and the sizes that fall short."""
    if not values:
        return "not measured"
    short = [f"{human(size)}: {value:.2f}" for size, value in values.items() if value < least]
    worst = f"worst {min(values.values()):.2f}"
    return f"short {worst} ({', '.join(short)})" if short else f"pass {worst}"


def must_show(
    by_world_size: Mapping[int, Series],
    floors: Mapping[str, Mapping[int, float]],
    mpis: Sequence[str],
) -> list[dict[str, str]]:
    """What the project owes, case by case and MPI by MPI: {case, memory, mpi, least, verdict}.

    `floors` maps each MPI to its registered memory's shares of the floor at 2 ranks.
    """
    rows = []
    for case in MUST_SHOW:
        found = ratios(by_world_size.get(case.world_size, {}), mpis)
        for memory, least in case.least.items():
            for mpi in mpis:
                values = {
                    size: ratio
                    for size, ratio in found.get(f"{mpi} {memory}", {}).items()
                    if case.smallest <= size <= case.largest
                }
                row = {"case": case.label, "memory": memory, "mpi": mpi, "least": f"{least:.2f}"}
                rows.append({**row, "verdict": verdict(values, least)})
    for mpi in mpis:
        shares = {size: v for size, v in floors.get(mpi, {}).items() if size >= 4 * MIB}
        row = {"case": "2 ranks, >= 4 MiB: memory floor", "memory": "registered", "mpi": mpi}
        least_share = f"{FLOOR_SHARE:.2f}"
        rows.append({**row, "least": least_share, "verdict": verdict(shares, FLOOR_SHARE)})
    return rows


def show_verdicts(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """The lines of the last table."""
    lines = ["# Must show: the best MPI's time over mpidp's, at every size of the case"]
    lines += [
        f"{r['case']:<32} {r['memory']:<10} on {r['mpi']:<8} >= {r['least']}  {r['verdict']}"
        for r in rows
    ]
    return lines


def environment() -> dict[str, str]:
    """What scripts/lib.sh sets for a job."""
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {
        **os.environ,
        **(allowed if os.geteuid() == 0 else {}),
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def set_up(mpi: str) -> Path:
    """The environment of an MPI, made or brought up to date. Exits where that fails."""
    done = subprocess.run(
        [str(ROOT / "scripts/setup.sh"), "--mpi", mpi], stdout=subprocess.PIPE, text=True
    )
    # "Ready: VENV with ..." or "Nothing to do: VENV is up to date".
    named = re.findall(r"^(?:Ready|Nothing to do): (.*?)(?: with | is up )", done.stdout, re.M)
    if done.returncode != 0 or not named:
        raise SystemExit(f"compare_mpi.py: scripts/setup.sh --mpi {mpi} failed\n{done.stdout}")
    return Path(named[-1])


def launch(venv: Path, world_size: int, command: Sequence[str], timeout: float) -> None:
    """Runs the environment's Python on `world_size` ranks. Exits where that fails."""
    words = [str(venv / "bin/mpiexec"), "-n", str(world_size), str(venv / "bin/python"), *command]
    process = subprocess.Popen(
        words,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        # The launcher ends its ranks when it is asked to end.
        process.terminate()
        output, _ = process.communicate(timeout=30)
        output += f"\nended after {timeout:g} s"
    except BaseException:
        process.terminate()
        raise
    if process.returncode != 0:
        raise SystemExit(f"compare_mpi.py: {' '.join(words)} failed:\n{output}")


def gloo(options: argparse.Namespace) -> int:
    """One rank of the sweep over Gloo; rank 0 writes {size: us} to the file."""
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    store = f"file://{options.output}.store"
    dist.init_process_group("gloo", init_method=store, rank=world.rank, world_size=world.size)
    times: Times = {}
    for size in options.sizes:
        x = torch.zeros(size // 4)
        taken: list[float] = []
        begin = time.perf_counter()
        # Rank 0 decides when the quarter of a second that bench takes is over.
        while world.bcast(len(taken) < 5 or time.perf_counter() - begin < 0.25):
            world.Barrier()
            start = time.perf_counter()
            dist.all_reduce(x)
            taken.append(world.allreduce(time.perf_counter() - start, MPI.MAX))
        times[size] = 1e6 * statistics.median(taken[1:])
    dist.destroy_process_group()
    if world.rank == 0:
        options.output.write_text(json.dumps(times), encoding="utf-8")
    return 0


def has_torch(venv: Path) -> bool:
    """Whether the environment has torch."""
    code = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
    return subprocess.run([str(venv / "bin/python"), "-c", code]).returncode == 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All runs: the document that -J writes."""
    venvs = {mpi: set_up(mpi) for mpi in options.mpi}
    first = venvs[options.mpi[0]]
    with_gloo = has_torch(first)
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"warning: the load is {load:.1f}: other work disturbs all figures", file=sys.stderr)
    by_world_size: dict[int, Series] = {}
    floors: dict[str, list[dict[int, float]]] = {mpi: [] for mpi in options.mpi}
    libraries: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for world_size in options.ranks:
            rounds: list[Series] = []
            for number in range(options.rounds):
                for mpi, venv in venvs.items():
                    print(f"{world_size} ranks, round {number + 1}, {mpi}", file=sys.stderr)
                    file = Path(folder, f"{world_size}-{number}-{mpi}.json")
                    sweep = ["-b", "4", "-e", human(options.maximum), "-f", str(options.factor)]
                    what = ["--backend", "mpidp,mpi", "--memory", "both", "-c", "0"]
                    command = ["-m", "mpidp", "bench", *sweep, *what, "-J", str(file)]
                    launch(venv, world_size, command, options.timeout)
                    document = json.loads(file.read_text(encoding="utf-8"))
                    libraries[mpi] = document["config"]["mpi_library"]
                    rounds.append(times_of(document, mpi))
                    if world_size == 2:
                        floors[mpi].append(floors_of(document))
                if with_gloo:
                    file = Path(folder, f"{world_size}-{number}-gloo.json")
                    sizes = ",".join(map(str, rounds[-1][options.mpi[-1]]))
                    command = [__file__, "gloo", "--output", str(file), "--sizes", sizes]
                    launch(first, world_size, command, options.timeout)
                    found = json.loads(file.read_text(encoding="utf-8"))
                    rounds.append({"gloo": {int(size): us for size, us in found.items()}})
            by_world_size[world_size] = merge(rounds)
            print("\n".join(table(by_world_size[world_size], options.mpi, world_size)), flush=True)
    shares = {mpi: medians(found) for mpi, found in floors.items()}
    return {
        "machine": {"processor": platform.processor(), "cores": os.cpu_count(), "load": load},
        "date": time.strftime("%Y-%m-%d"),
        "libraries": libraries,
        "rounds": options.rounds,
        "times_us": by_world_size,
        "ratios": {size: ratios(s, options.mpi) for size, s in by_world_size.items()},
        "memory_floor_shares": shares,
        "must_show": must_show(by_world_size, shares, options.mpi),
    }


def plot(by_world_size: Mapping[int, Series], path: Path) -> None:
    """Bus bandwidth over size, one panel for each world size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(by_world_size), figsize=(7 * len(by_world_size), 5), squeeze=False
    )
    styles = {"registered": "-", "plain": "--"}
    for panel, (world_size, series) in zip(panels[0], by_world_size.items(), strict=True):
        for name, times in series.items():
            mpi, _, memory = name.partition(" ")
            colour = f"C{(*MPIS, 'gloo').index(mpi)}"
            panel.plot(
                list(times),
                [bus_bandwidth(size, us, world_size) for size, us in times.items()],
                styles.get(memory, ":"),
                color=colour,
                label=f"mpidp {memory} on {mpi}" if memory else mpi,
            )
        panel.set(title=f"{world_size} ranks", xlabel="bytes", ylabel="bus bandwidth, GB/s")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    figure.savefig(path, bbox_inches="tight")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    lines = __doc__.splitlines()
    parser = argparse.ArgumentParser(
        description=lines[0],
        epilog="\n".join(lines[2:]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--mpi", default=",".join(MPIS), help="which, with commas between")
    parser.add_argument("--ranks", default="2,4", help="world sizes, with commas between [2,4]")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each MPI [3]")
    parser.add_argument("--factor", type=int, default=4, help="between sizes [4]")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each run [300]")
    parser.add_argument("--quick", action="store_true", help="one round, 4 B to 4 MiB by 32")
    parser.add_argument("-J", "--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help=".svg, .png or .pdf")
    parser.set_defaults(maximum=64 * MIB)
    options = parser.parse_args(arguments)
    options.mpi = options.mpi.split(",")
    unknown = set(options.mpi) - set(MPIS)
    if unknown:
        parser.error(f"--mpi {','.join(sorted(unknown))}: choose from {', '.join(MPIS)}")
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", options.ranks):
        parser.error(f"--ranks {options.ranks}: give numbers such as 2,4")
    options.ranks = [int(number) for number in options.ranks.split(",")]
    if options.rounds < 1 or options.factor < 2:
        parser.error("--rounds must be at least 1 and --factor at least 2")
    if options.quick:
        options.rounds, options.factor, options.maximum = 1, 32, 4 * MIB
    return options


def main() -> int:
    """Returns the exit status."""
    if sys.argv[1:2] == ["gloo"]:
        parser = argparse.ArgumentParser()
        parser.add_argument("--output", type=Path)
        parser.add_argument("--sizes", type=lambda text: [int(s) for s in text.split(",")])
        return gloo(parser.parse_args(sys.argv[2:]))
    options = _options(None)
    document = measure(options)
    if options.json:
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if options.plot:
        plot(document["times_us"], options.plot)
    print("\n".join(show_verdicts(document["must_show"])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
