#!/usr/bin/env python3
"""Emulated hosts on one Linux machine: network namespaces joined by rate-limited links.

    scripts/cluster.py up 4 --rate 1gbit
    scripts/cluster.py run -n 4 -- .venv/bin/python -m mpidp bench -b 1M -e 64M
    scripts/cluster.py run -n 8 --placement round-robin --traffic -- COMMAND
    scripts/cluster.py status
    scripts/cluster.py down

Each host is a namespace with one interface, "wire", whose link to a switch (a bridge in a namespace
of its own) is limited to the rate in both directions by a token bucket. mpiexec runs at the switch
and enters the hosts where it would use ssh. A rank sees its host's name, and the host's number in
MPIDP_NODE_ID; MPI sees as many nodes as hosts, so ranks of different hosts talk TCP over the links
and share no memory. Nothing outside the namespaces changes, and `down` removes them all.

Needs Linux, root and iproute2. All hosts share the machine's cores.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = Path(__file__).resolve().parent
MPIS = ("mpich", "openmpi", "impi")
PLACEMENTS = ("block", "round-robin")
MOST_HOSTS = 64
# Seen inside the namespaces only, so they can be the same for every cluster.
WIRE = "wire"
BRIDGE = "bridge"
NETWORK = "10.99.0"
SWITCH_ADDRESS = f"{NETWORK}.254"
# Longer pieces than the bucket is deep would have to be cut by the limiter at its own expense.
GSO_BYTES = 16 << 10
BURST_BYTES = 32 << 10
QUEUE_LATENCY = "20ms"

# What a launcher tells its processes; a job must not inherit another's.
_LAUNCHERS = ("PMI", "PMIX", "OMPI_", "PRTE_", "HYDRA_", "HYDI_", "MPIR_ENV", "SLURM_")


class ClusterError(Exception):
    """What the user did or lacks; one line."""


@dataclass(frozen=True)
class Cluster:
    """What `up` made. `rate` in the words of tc, `mtu` in bytes."""

    name: str
    num_hosts: int
    rate: str
    mtu: int

    @property
    def prefix(self) -> str:
        """What the names of all its namespaces start with."""
        return f"mpidp-{self.name}-"

    @property
    def switch(self) -> str:
        """The namespace of the bridge."""
        return f"{self.prefix}switch"

    def host(self, k: int) -> str:
        """The namespace of host k."""
        return f"{self.prefix}{k}"

    @property
    def rate_bytes(self) -> float:
        """The nominal rate of a link in bytes/s."""
        return parse_rate(self.rate)


def parse_rate(text: str) -> float:
    """Bytes/s from tc's "1gbit", "500mbit" or "100kbit". Raises ClusterError."""
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)(k|m|g)bit", text.lower())
    if not matched or float(matched[1]) == 0:
        raise ClusterError(f"rate {text!r}: expected one such as 1gbit, 500mbit or 100kbit")
    return float(matched[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[matched[2]] / 8


def address(k: int) -> str:
    """The address of host k."""
    return f"{NETWORK}.{k + 1}"


def host_of_rank(rank: int, world_size: int, num_hosts: int, placement: str) -> int:
    """The host that a rank runs on. Block fills hosts in turn with ceil(world_size/num_hosts)."""
    if placement == "round-robin":
        return rank % num_hosts
    return rank // -(-world_size // num_hosts)


def missing() -> str | None:
    """Why this machine cannot emulate hosts, or None."""
    if not sys.platform.startswith("linux"):
        return "emulated hosts need Linux"
    lacking = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if lacking:
        return f"emulated hosts need {', '.join(lacking)} (e.g. apt-get install iproute2)"
    if os.geteuid() != 0:
        return "emulated hosts need root, to make network namespaces"
    # Root inside a container may still lack the right.
    done = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "true"], capture_output=True, text=True
    )
    return None if done.returncode == 0 else f"no right to make namespaces: {done.stderr.strip()}"


def _require() -> None:
    reason = missing()
    if reason:
        raise ClusterError(reason)


def _tool(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise ClusterError(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _state_folder() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR") or "/run"
    folder = Path(runtime if os.access(runtime, os.W_OK) else "/tmp") / "mpidp-cluster"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@contextlib.contextmanager
def _locked(name: str) -> Iterator[Path]:
    """The state file of a cluster, no other process changing clusters meanwhile."""
    folder = _state_folder()
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder / f"{name}.json"


def load(name: str) -> Cluster:
    """The cluster of that name. Raises ClusterError when there is none."""
    file = _state_folder() / f"{name}.json"
    try:
        cluster = Cluster(**json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ClusterError(f"no cluster {name!r} is up; see `up`") from None
    except (OSError, ValueError, TypeError) as error:
        raise ClusterError(f"{file}: {error}; `down` clears it away") from None
    lacking = {cluster.switch, *map(cluster.host, range(cluster.num_hosts))} - set(_namespaces())
    if lacking:
        raise ClusterError(f"namespaces {', '.join(sorted(lacking))} are gone; `down`, then `up`")
    return cluster


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _tool("ip", "netns", "list").splitlines() if line]


def up(num_hosts: int, rate: str, name: str = "default", mtu: int = 1500) -> Cluster:
    """Makes the namespaces and links; all or nothing. Raises ClusterError."""
    _require()
    parse_rate(rate)
    if not 1 <= num_hosts <= MOST_HOSTS:
        raise ClusterError(f"{num_hosts} hosts: expected 1 to {MOST_HOSTS}")
    if not re.fullmatch(r"[a-z0-9]{1,32}", name):
        raise ClusterError(f"name {name!r}: expected up to 32 letters a-z and digits")
    cluster = Cluster(name, num_hosts, rate, mtu)
    with _locked(name) as state:
        if state.exists() or any(n.startswith(cluster.prefix) for n in _namespaces()):
            raise ClusterError(f"cluster {name!r} is there already; see `status` and `down`")
        try:
            _build(cluster)
            state.write_text(json.dumps(asdict(cluster)), encoding="utf-8")
        except BaseException:
            _remove(cluster.prefix, state)
            raise
    return cluster


def _build(cluster: Cluster) -> None:
    switch = cluster.switch
    _tool("ip", "netns", "add", switch)
    _tool("ip", "-n", switch, "link", "set", "lo", "up")
    _tool("ip", "-n", switch, "link", "add", BRIDGE, "type", "bridge")
    _tool("ip", "-n", switch, "address", "add", f"{SWITCH_ADDRESS}/24", "dev", BRIDGE)
    _tool("ip", "-n", switch, "link", "set", BRIDGE, "mtu", str(cluster.mtu), "up")
    for k in range(cluster.num_hosts):
        host, port = cluster.host(k), f"port{k}"
        _tool("ip", "netns", "add", host)
        _tool("ip", "-n", host, "link", "set", "lo", "up")
        far_end = ("peer", "name", WIRE, "netns", host)
        _tool("ip", "-n", switch, "link", "add", port, "type", "veth", *far_end)
        _tool("ip", "-n", switch, "link", "set", port, "master", BRIDGE)
        _tool("ip", "-n", host, "address", "add", f"{address(k)}/24", "dev", WIRE)
        for namespace, device in ((switch, port), (host, WIRE)):
            sizes = ("mtu", str(cluster.mtu), "gso_max_size", str(GSO_BYTES))
            _tool("ip", "-n", namespace, "link", "set", device, *sizes, "up")
            limit = ("rate", cluster.rate, "burst", str(BURST_BYTES), "latency", QUEUE_LATENCY)
            _tool("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *limit)


def down(name: str = "default") -> int:
    """Removes a cluster, whatever state it is in; returns how many namespaces there were."""
    _require()
    with _locked(name) as state:
        return _remove(f"mpidp-{name}-", state)


def _remove(prefix: str, state: Path) -> int:
    found = [namespace for namespace in _namespaces() if namespace.startswith(prefix)]
    _end_processes(found)
    for namespace in found:
        _tool("ip", "netns", "delete", namespace)
    state.unlink(missing_ok=True)
    return len(found)


def _end_processes(namespaces: Sequence[str]) -> None:
    """Ends what runs in the namespaces: politely, and two seconds later by force."""
    deadline = time.monotonic() + 2
    sent = signal.SIGTERM
    while True:
        pids = [int(p) for n in namespaces for p in _tool("ip", "netns", "pids", n).split()]
        if not pids or time.monotonic() > deadline + 5:
            return
        sent = signal.SIGKILL if time.monotonic() > deadline else sent
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sent)
        time.sleep(0.05)


def traffic(cluster: Cluster) -> list[int]:
    """Bytes that each host has sent over its link, headers included."""
    # The switch's side of the link counts what the limiter let through.
    links = json.loads(_tool("ip", "-n", cluster.switch, "-j", "-s", "link"))
    received = {link["ifname"]: link["stats64"]["rx"]["bytes"] for link in links}
    return [received[f"port{k}"] for k in range(cluster.num_hosts)]


def default_mpiexec(mpi: str) -> Path:
    """The launcher of one MPI in the environment that scripts/setup.sh makes."""
    for folder in (ROOT / f".venv-{mpi}", ROOT / ".venv"):
        if (folder / "bin/mpiexec").exists():
            return folder / "bin/mpiexec"
    raise ClusterError(f"no mpiexec of {mpi}: run scripts/setup.sh --mpi {mpi}")


def environment(cluster: Cluster, base: Mapping[str, str]) -> dict[str, str]:
    """`base` without a launcher's traces, and with what keeps the MPIs on the links.

    What `base` sets already stays.
    """
    clean = {k: v for k, v in base.items() if not k.startswith(_LAUNCHERS)}
    wanted = {
        # MPICH over UCX: its own shared memory between hosts would see one kernel.
        "UCX_TLS": "tcp,self",
        "UCX_NET_DEVICES": WIRE,
        # MPICH over libfabric, and Intel MPI.
        "FI_PROVIDER": "tcp",
        "FI_TCP_IFACE": WIRE,
        "I_MPI_FABRICS": "shm:ofi",
        "I_MPI_PIN": "0",
        # Open MPI: variables that mpiexec forwards to all its ranks.
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,sm,tcp",
        "OMPI_MCA_btl_tcp_if_include": WIRE,
        "OMPI_MCA_mtl": "^ofi,psm2",
        "PRTE_MCA_plm": "ssh",
        "PRTE_MCA_plm_ssh_agent": str(SCRIPTS / "cluster_enter.sh"),
        "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
        "PRTE_MCA_prte_if_include": f"{NETWORK}.0/24",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_ALLOW_RUN_AS_ROOT": "1",
        "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # Numerical libraries would start a thread per core in each rank.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    return {**wanted, **clean, "MPIDP_CLUSTER_PREFIX": cluster.prefix}


def launch_command(
    cluster: Cluster, world_size: int, placement: str, mpi: str, mpiexec: Path
) -> list[str]:
    """The start of the command line; the ranks' command follows."""
    num_hosts = min(cluster.num_hosts, world_size)
    per_host = -(-world_size // num_hosts)
    hosts = [address(k) for k in range(num_hosts)]
    words = ["ip", "netns", "exec", cluster.switch, str(mpiexec)]
    enter = str(SCRIPTS / "cluster_enter.sh")
    if mpi == "openmpi":
        by = "slot" if placement == "block" else "node"
        slots = ",".join(f"{host}:{per_host}" for host in hosts)
        words += ["--host", slots, "--map-by", f"{by}:oversubscribe", "--bind-to", "none"]
        return [*words, "-n", str(world_size), str(SCRIPTS / "cluster_rank.sh")]
    if mpi == "impi":
        words += ["-bootstrap", "ssh", "-bootstrap-exec", enter]
    else:
        words += ["-launcher", "ssh", "-launcher-exec", enter]
    in_a_row = per_host if placement == "block" else 1
    words += ["-iface", BRIDGE, "-hosts", ",".join(hosts), "-ppn", str(in_a_row)]
    return [*words, "-n", str(world_size), str(SCRIPTS / "cluster_rank.sh")]


def run(
    cluster: Cluster,
    world_size: int,
    command: Sequence[str],
    *,
    placement: str = "block",
    mpi: str = "mpich",
    mpiexec: Path | None = None,
    timeout: float = 600,
    capture: bool = False,
    extra: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a command on `world_size` ranks across the hosts; ends all of it at the timeout.

    Output is returned with `capture`, else shown. Returns status 124 at the timeout (seconds).
    """
    _require()
    if world_size < 1:
        raise ClusterError(f"{world_size} ranks: expected 1 or more")
    launcher = mpiexec or default_mpiexec(mpi)
    start = launch_command(cluster, world_size, placement, mpi, launcher)
    pipe = subprocess.PIPE if capture else None
    with subprocess.Popen(
        [*start, *command],
        env={**environment(cluster, os.environ), **(extra or {})},
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
    ) as job:
        namespaces = [cluster.switch, *map(cluster.host, range(cluster.num_hosts))]
        try:
            output, errors = job.communicate(timeout=timeout)
            status = job.returncode
        except subprocess.TimeoutExpired:
            _end_processes(namespaces)
            output, errors = job.communicate()
            status = 124
        except BaseException:
            _end_processes(namespaces)
            raise
    return subprocess.CompletedProcess([*start, *command], status, output or "", errors or "")


def _show(cluster: Cluster) -> None:
    print(f"{cluster.num_hosts} hosts, {cluster.rate} each way, mtu {cluster.mtu}:")
    for k, nbytes in enumerate(traffic(cluster)):
        pids = _tool("ip", "netns", "pids", cluster.host(k)).split()
        print(f"  host{k} {address(k)} sent {nbytes} bytes, runs {len(pids)} processes")


def _parser() -> argparse.ArgumentParser:
    lines = __doc__.splitlines()
    parser = argparse.ArgumentParser(
        description=lines[0],
        epilog="\n".join(lines[2:]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--name", default="default", help="which cluster, of several at once")
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("up", help="make the hosts and links")
    making.add_argument("hosts", type=int, metavar="N")
    making.add_argument("--rate", default="1gbit", help="of each link and direction [1gbit]")
    making.add_argument("--mtu", type=int, default=1500, help="bytes [1500]")
    running = commands.add_parser("run", help="run a command under mpiexec across the hosts")
    running.add_argument("-n", "--ranks", type=int, required=True, metavar="R")
    running.add_argument("--placement", choices=PLACEMENTS, default="block")
    running.add_argument("--mpi", choices=MPIS, default="mpich")
    running.add_argument("--mpiexec", type=Path, help="launcher [that of scripts/setup.sh --mpi]")
    running.add_argument("--timeout", type=float, default=600, help="seconds; then status 124")
    running.add_argument("--traffic", action="store_true", help="show the bytes each host sent")
    running.add_argument("rest", nargs=argparse.REMAINDER, metavar="-- COMMAND...")
    commands.add_parser("status", help="show the hosts and what they sent")
    commands.add_parser("down", help="remove all of it, and end what runs there")
    return parser


def end_by_exception() -> None:
    """Has SIGTERM raise SystemExit, so that what was made is removed on the way out."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: the job's, 0, or 2 with one line for bad usage."""
    end_by_exception()
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        if options.command == "up":
            _show(up(options.hosts, options.rate, options.name, options.mtu))
        elif options.command == "down":
            print(f"removed {down(options.name)} namespaces")
        elif options.command == "status":
            _require()
            _show(load(options.name))
        else:
            command = options.rest[1:] if options.rest[:1] == ["--"] else options.rest
            if not command:
                raise ClusterError("run needs a command after --")
            _require()
            cluster = load(options.name)
            before = traffic(cluster)
            done = run(
                cluster,
                options.ranks,
                command,
                placement=options.placement,
                mpi=options.mpi,
                mpiexec=options.mpiexec,
                timeout=options.timeout,
            )
            if options.traffic:
                for k, (old, new) in enumerate(zip(before, traffic(cluster), strict=True)):
                    print(f"host{k} sent {new - old} bytes")
            if done.returncode == 124:
                print(f"cluster.py: ended after {options.timeout:g} s", file=sys.stderr)
            return done.returncode
    except ClusterError as error:
        print(f"cluster.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
