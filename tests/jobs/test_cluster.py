"""Emulated hosts: made, used by all-reduces between real MPI nodes, and removed without a trace."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import mpiexec

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
spec = importlib.util.spec_from_file_location("cluster", SCRIPTS / "cluster.py")
cluster = importlib.util.module_from_spec(spec)
sys.modules["cluster"] = cluster
spec.loader.exec_module(cluster)

NAME = f"test{os.getpid()}"
NUM_HOSTS = 3

# Every rank checks every element; rank 0 prints what the test looks at.
JOB = """
import json, os, socket, sys
import numpy as np
from mpi4py import MPI
import mpidp

world = MPI.COMM_WORLD
wrong = []
with mpidp.Communicator(world) as comm:
    for count in (1, comm.world_size + 1, 1000, 300_007):
        for algorithm in sys.argv[1].split(","):
            x = np.arange(count, dtype=np.float32) % 97 + comm.rank
            comm.all_reduce(x, algorithm=algorithm)
            ranks = np.arange(comm.world_size).sum()
            expected = (np.arange(count) % 97) * comm.world_size + ranks
            if not np.array_equal(x, expected):
                wrong.append([algorithm, count])
    mine = [comm.num_nodes, comm.node_rank, comm.local_size, socket.gethostname(),
            os.environ["MPIDP_NODE_ID"], wrong]
    everyone = world.gather(mine)
if world.rank == 0:
    print(json.dumps(everyone))
"""

# A ring's traffic is exact: 2(P-1)/P n bytes out of every host.
RING = """
import numpy as np
from mpi4py import MPI
import mpidp

with mpidp.Communicator(MPI.COMM_WORLD) as comm:
    x = np.ones(2 << 20, np.float32)
    for _ in range(2):
        comm.all_reduce(x, algorithm="ring")
"""


def which_mpi():
    """The name that cluster.py gives to the MPI of this environment, or None for another."""
    done = subprocess.run([mpiexec(), "--version"], capture_output=True, text=True, check=False)
    words = done.stdout + done.stderr
    known = {"Open MPI": "openmpi", "Intel(R) MPI": "impi", "HYDRA": "mpich"}
    return next((mpi for word, mpi in known.items() if word in words), None)


@pytest.fixture(scope="module")
def hosts():
    reason = cluster.missing()
    if reason:
        pytest.skip(reason)
    if which_mpi() is None:
        pytest.skip("the launcher is neither of MPICH nor Open MPI nor Intel MPI")
    made = cluster.up(NUM_HOSTS, "1gbit", NAME)
    yield made
    cluster.down(NAME)


def run(hosts, world_size, code, *args, placement="block"):
    command = [sys.executable, "-c", code, *args]
    launcher = Path(mpiexec())
    options = {"placement": placement, "mpi": which_mpi(), "mpiexec": launcher}
    done = cluster.run(hosts, world_size, command, timeout=30, capture=True, **options)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.mark.parametrize("placement", cluster.PLACEMENTS)
@pytest.mark.parametrize("world_size", [3, 6])
def test_all_reduce_between_hosts(hosts, world_size, placement):
    algorithms = ["auto", "ring", "recursive_halving", "recursive_doubling", "hierarchical", "mpi"]
    output = run(hosts, world_size, JOB, ",".join(algorithms), placement=placement)
    everyone = json.loads(output.splitlines()[-1])
    assert len(everyone) == world_size
    for rank, (num_nodes, node_rank, local_size, name, node_id, wrong) in enumerate(everyone):
        k = cluster.host_of_rank(rank, world_size, NUM_HOSTS, placement)
        assert wrong == []
        assert (num_nodes, local_size) == (NUM_HOSTS, world_size // NUM_HOSTS)
        assert node_rank == k
        assert (name, node_id) == (f"host{k}", str(k))


def test_a_ring_moves_its_share_over_every_link(hosts):
    before = cluster.traffic(hosts)
    run(hosts, NUM_HOSTS, RING)
    sent = [new - old for old, new in zip(before, cluster.traffic(hosts), strict=True)]
    share = 2 * 2 * (NUM_HOSTS - 1) / NUM_HOSTS * (8 << 20)
    # Headers take 4.6% of the payload; start and end of the job some hundred kilobytes.
    for nbytes in sent:
        assert share < nbytes < 1.06 * share + (1 << 20)


def test_a_job_that_hangs_is_ended(hosts):
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    options = {"mpi": which_mpi(), "mpiexec": Path(mpiexec())}
    done = cluster.run(hosts, NUM_HOSTS, command, timeout=2, capture=True, **options)
    assert done.returncode == 124
    for namespace in (hosts.switch, *map(hosts.host, range(NUM_HOSTS))):
        found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
        assert found.stdout.split() == []


def test_up_twice_is_refused(hosts):
    with pytest.raises(cluster.ClusterError, match="there already"):
        cluster.up(2, "1gbit", NAME)


# The last test of the hosts: it takes them down.
def test_down_leaves_nothing_even_without_its_state(hosts):
    (cluster._state_folder() / f"{NAME}.json").unlink()
    assert cluster.down(NAME) == NUM_HOSTS + 1
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert hosts.prefix not in listed
    assert cluster.down(NAME) == 0
    with pytest.raises(cluster.ClusterError, match="no cluster"):
        cluster.load(NAME)


@pytest.mark.parametrize(
    ("rate", "expected"), [("1gbit", 125e6), ("500mbit", 62.5e6), ("2.5Gbit", 312.5e6)]
)
def test_rates(rate, expected):
    assert cluster.parse_rate(rate) == expected


@pytest.mark.parametrize("rate", ["", "fast", "0gbit", "1GB", "-1gbit"])
def test_bad_rates(rate):
    with pytest.raises(cluster.ClusterError, match="rate"):
        cluster.parse_rate(rate)


def test_without_root_it_refuses_in_one_line():
    code = (
        "import os, runpy, sys; os.geteuid = lambda: 1000;"
        f"sys.argv = ['cluster.py', 'up', '2']; runpy.run_path({str(SCRIPTS / 'cluster.py')!r},"
        "run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "need" in done.stderr
