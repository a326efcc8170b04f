#!/usr/bin/env python3
"""All-reduce across emulated hosts, against the bound of the links and the flat ring.

    scripts/cluster_bench.py                    # four hosts at 1 Gbit/s, MPICH; some minutes
    scripts/cluster_bench.py --quick --mpi openmpi -J report.json

Brings up hosts of its own (see scripts/cluster.py; needs root), and removes them at the end. Three
cases: one rank on each host; two ranks on each, placed in blocks; two on each, round-robin. The
algorithms of a case take turns within one job. A time is the slowest rank's, the median over
iterations, of float32 in place in ordinary arrays.

The bound: of P hosts with one rank each, every rank must send at least 2(P-1)/P n bytes over its
link. The link's rate is the nominal one and, next to it, what a raw stream of MPI messages between
two hosts reached in the same job (headers take 4.4% of the nominal rate with frames of 1500 bytes).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cluster as emulated

FLAT = ("ring", "recursive_halving", "recursive_doubling", "mpi", "auto")
NESTED = ("ring", "hierarchical", "mpi", "auto")
STREAM_BYTES = 16 << 20
# (name, ranks per host, placement, algorithms, smallest size)
CASES = (
    ("1 rank a host", 1, "block", FLAT, 1 << 20),
    ("2 ranks a host, block", 2, "block", NESTED, 64),
    ("2 ranks a host, round-robin", 2, "round-robin", NESTED, 64),
)


def sizes(smallest: int, largest: int) -> list[int]:
    """Bytes, by factors of four up to 1 MiB and of eight beyond, and the largest."""
    found = []
    nbytes = smallest
    while nbytes < largest:
        found.append(nbytes)
        nbytes *= 4 if nbytes < 1 << 20 else 8
    return [*found, largest]


def measure(options: argparse.Namespace) -> int:
    """One rank of a case; rank 0 writes the times in seconds to the file."""
    import numpy as np
    from mpi4py import MPI

    import mpidp

    world = MPI.COMM_WORLD

    def slowest(call: Callable[[], object]) -> float:
        world.Barrier()
        start = time.perf_counter()
        call()
        return float(world.allreduce(time.perf_counter() - start, MPI.MAX))

    with mpidp.Communicator(world) as comm:
        payload = np.zeros(STREAM_BYTES, np.uint8)
        node_of = world.allgather(comm.node_rank)
        # The first rank of the second host.
        far = node_of.index(next(node for node in node_of if node != node_of[0]))

        def stream() -> None:
            # The last byte back says that all has arrived.
            if world.rank == 0:
                world.Send(payload, far)
                world.Recv(payload[:1], far)
            elif world.rank == far:
                world.Recv(payload, 0)
                world.Send(payload[:1], 0)

        def one_of(x: np.ndarray, name: str) -> Callable[[], object]:
            return lambda: comm.all_reduce(x, algorithm=name)

        slowest(stream)
        rates = [STREAM_BYTES / slowest(stream) for _ in range(5)]
        times: dict[str, dict[str, float]] = {}
        for nbytes in options.sizes:
            x = np.zeros(nbytes // 4, np.float32)
            first = {}
            for name in options.algorithms:
                x[:] = world.rank + 1
                first[name] = slowest(one_of(x, name))
                expected = world.size * (world.size + 1) / 2
                if not world.allreduce(bool((x == expected).all()), MPI.LAND):
                    raise RuntimeError(f"{name} of {nbytes} bytes is wrong on some rank")
            x[:] = 0
            # As many rounds as fit the budget, the same number on all ranks.
            rounds = int(options.seconds / max(sum(first.values()), 1e-5))
            taken: dict[str, list[float]] = {name: [] for name in first}
            for _ in range(min(max(rounds, 3), 200)):
                for name in first:
                    taken[name].append(slowest(one_of(x, name)))
            times[str(nbytes)] = {name: statistics.median(t) for name, t in taken.items()}
        topology = {"num_nodes": comm.num_nodes, "local_size": comm.local_size}
        library = MPI.Get_library_version().splitlines()[0].strip(" \0")
    if world.rank == 0:
        result = {
            "mpi": library,
            **topology,
            "world_size": world.size,
            "stream": statistics.median(rates),
            "times": times,
        }
        options.output.write_text(json.dumps(result), encoding="utf-8")
    return 0


def table(case: dict[str, Any], num_hosts: int, nominal: float) -> list[str]:
    """The lines of one case's table: times, and the ratios that the case is about."""
    names = list(next(iter(case["times"].values())))
    single = case["world_size"] == num_hosts
    stream = case["stream"]
    lines = [
        f"# {case['name']}: {case['world_size']} ranks on {case['num_nodes']} nodes, {case['mpi']}",
        f"# raw stream {stream / 1e6:.1f} MB/s of {nominal / 1e6:.1f} nominal",
    ]
    title = "% of the bound, nominal (raw stream)" if single else "ring's time over hierarchical's"
    lines.append(f"{'bytes':>10} " + " ".join(f"{n + ' ms':>21}" for n in names) + f"  {title}")
    for size, times in case["times"].items():
        row = f"{size:>10} " + " ".join(f"{1e3 * times[n]:21.3f}" for n in names)
        if single:
            link = 2 * (num_hosts - 1) / num_hosts * int(size)
            parts = [
                f"{n} {100 * link / t / nominal:.1f} ({100 * link / t / stream:.1f})"
                for n, t in times.items()
            ]
            lines.append(f"{row}  {', '.join(parts)}")
        else:
            lines.append(f"{row}  {times['ring'] / times['hierarchical']:.2f}")
    return lines


def verdicts(cases: Sequence[dict[str, Any]], num_hosts: int, nominal: float) -> list[str]:
    """One line for each thing that must show: pass, or short with the sizes that fall short."""
    lines = []

    def judge(what: str, values: dict[int, float], least: float) -> None:
        short = {size: value for size, value in values.items() if value < least}
        state = "pass " if not short else "short"
        where = ", ".join(f"{size}: {value:.2f}" for size, value in short.items())
        worst = min(values.values(), default=float("nan"))
        lines.append(f"{state} {what} >= {least:g} (worst {worst:.2f}) {where}".rstrip())

    for case in cases:
        times = {int(size): t for size, t in case["times"].items()}
        if case["world_size"] == num_hosts:
            link = 2 * (num_hosts - 1) / num_hosts
            for kind, rate in (("nominal", nominal), ("raw stream", case["stream"])):
                shares = {size: link * size / t["auto"] / rate for size, t in times.items()}
                judge(f"auto over the bound of the links, {kind}", shares, 0.92)
            continue
        ratios = {size: t["ring"] / t["hierarchical"] for size, t in times.items()}
        large = {size: ratio for size, ratio in ratios.items() if size >= 1 << 20}
        small = {size: ratio for size, ratio in ratios.items() if size <= 64 << 10}
        judge(f"{case['name']}: hierarchical over ring, all sizes", ratios, 1.0)
        judge(f"{case['name']}: 64 KiB and below", small, 1.5)
        judge(f"{case['name']}: 1 MiB and above", large, 2.0 if "robin" in case["name"] else 1.15)
    return lines


def compare(options: argparse.Namespace) -> int:
    """Brings the hosts up, runs the cases, prints, and removes the hosts."""
    name = f"bench{os.getpid()}"
    python = options.python or emulated.default_mpiexec(options.mpi).parent / "python"
    found = []
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"warning: the load is {load:.1f}: other work disturbs all figures", file=sys.stderr)
    made = emulated.up(options.hosts, options.rate, name, options.mtu)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for label, per_host, placement, algorithms, smallest in CASES:
                if options.case and options.case not in label:
                    continue
                file = Path(folder, "times.json")
                wanted = sizes(smallest, options.maximum)
                if options.quick:
                    wanted = [wanted[0], 1 << 20]
                command = [str(python), __file__, "measure", "--output", str(file)]
                command += ["--seconds", "1" if options.quick else str(options.seconds)]
                command += ["--sizes", ",".join(map(str, dict.fromkeys(wanted)))]
                command += ["--algorithms", ",".join(options.algorithms or algorithms)]
                done = emulated.run(
                    made,
                    per_host * options.hosts,
                    command,
                    placement=placement,
                    mpi=options.mpi,
                    timeout=options.timeout,
                )
                if done.returncode != 0:
                    print(f"cluster_bench.py: {label}: status {done.returncode}", file=sys.stderr)
                    return 1
                case = {"name": label, **json.loads(file.read_text(encoding="utf-8"))}
                found.append(case)
                print("\n".join(table(case, options.hosts, made.rate_bytes)), flush=True)
    finally:
        emulated.down(name)
    print("\n".join(lines := verdicts(found, options.hosts, made.rate_bytes)))
    if options.json:
        document = {"hosts": options.hosts, "rate": options.rate, "mtu": options.mtu, "load": load}
        text = json.dumps({**document, "cases": found, "verdicts": lines}, indent=2)
        options.json.write_text(text + "\n", encoding="utf-8")
    return 0


def main() -> int:
    """Returns the exit status: 0, 1 where a job failed, 2 for bad usage."""
    lines = __doc__.splitlines()
    parser = argparse.ArgumentParser(
        description=lines[0],
        epilog="\n".join(lines[2:]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hosts", type=int, default=4, metavar="N")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--mtu", type=int, default=1500)
    parser.add_argument("--mpi", choices=emulated.MPIS, default="mpich")
    parser.add_argument("--python", type=Path, help="[that of scripts/setup.sh --mpi]")
    parser.add_argument("--case", help="only the cases whose name contains this")
    parser.add_argument("--maximum", type=int, default=64 << 20, help="largest size in bytes")
    parser.add_argument("--seconds", type=float, default=4, help="budget for each size")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each case")
    parser.add_argument("--quick", action="store_true", help="two sizes, a second each")
    parser.add_argument("-J", "--json", type=Path, metavar="FILE")
    parser.add_argument("--algorithms", type=lambda text: text.split(","), metavar="A,B")
    if sys.argv[1:2] == ["measure"]:
        parser.add_argument("--sizes", type=lambda text: [int(s) for s in text.split(",")])
        parser.add_argument("--output", type=Path)
        return measure(parser.parse_args(sys.argv[2:]))
    emulated.end_by_exception()
    try:
        return compare(parser.parse_args())
    except emulated.ClusterError as error:
        print(f"cluster_bench.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
