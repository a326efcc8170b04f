"""`mpidp bench` and `mpidp info` as a user runs them: under mpiexec, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from launching import command, environment, launch

from mpidp.devices import find_plugin

COLLECTIVES = ["reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "barrier"]

FAULTY = """
import sys
from mpi4py import MPI
import mpidp
from mpidp.bench.driver import Plan
from mpidp.cli.bench_run import BenchRun, now
from pathlib import Path

class Faulty:
    "Spoils two elements of every all_reduce, on the last rank."
    def __init__(self, world):
        self.comm = mpidp.Communicator(world)
    def __enter__(self):
        return self
    def __exit__(self, *error):
        self.comm.close()
    def __getattr__(self, name):
        return getattr(self.comm, name)
    def all_reduce(self, x, out=None, **options):
        result = self.comm.all_reduce(x, out, **options)
        if self.comm.rank == self.comm.world_size - 1:
            result[0] += 1
            result[-1] = float("nan")

plan = Plan(min_bytes=4096, max_bytes=4096, iterations=4, warmup=0)
run = BenchRun(plan, "auto", ["plain"], ["mpidp"], MPI.COMM_WORLD, Faulty)
sys.exit(run.measure_and_report(now(), Path(sys.argv[1]), None))
"""


def bench(world_size, *args, timeout=60, **extra):
    return launch(world_size, "-m", "mpidp", "bench", *args, timeout=timeout, **extra)


def rows(output):
    return [line.split() for line in output.splitlines() if line and not line.startswith("#")]


def assert_one_line(done, message):
    # A launcher may add lines of its own about the status.
    lines = [line for line in done.stderr.splitlines() if "mpidp" in line]
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1, done.stderr
    assert message in lines[0]
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_a_comparison(world_size, tmp_path):
    path = tmp_path / "out.json"
    options = [
        "-b",
        "8",
        "-e",
        "1M",
        "-f",
        "32",
        "-n",
        "6",
        "-w",
        "1",
        "--backend",
        "mpidp,mpi",
        "--memory",
        "both",
        "-J",
    ]
    done = bench(world_size, *options, str(path))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.count("# mpidp version") == 1
    assert done.stdout.count("# Out of bounds values : 0 OK") == 3
    assert done.stdout.count("# Avg bus bandwidth    : ") == 3
    table = rows(done.stdout)
    assert len(table) == 3 * 4
    assert all(len(row) == 13 and row[8] == "0" and row[12] == "0" for row in table)
    document = json.loads(path.read_text())
    assert document["out_of_bounds"] == {"count": 0, "okay": True}
    assert [row["size"] for row in document["results"][::3]] == [8, 256, 8192, 262144]
    assert {row["actual_iterations"] for row in document["results"]} == {6}
    assert [d["rank"] for d in document["config"]["devices"]] == list(range(world_size))
    assert len(document["ratios"]) == 2 * 4
    floors = {row["memory_floor_us"] for row in document["results"] if "memory_floor_us" in row}
    assert len(floors) == (1 if world_size > 1 else 0)
    assert os.listdir(tmp_path) == ["out.json"]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_other_collectives(collective):
    options = [
        "-b",
        "8",
        "-e",
        "40K",
        "-f",
        "64",
        "-n",
        "2",
        "-w",
        "0",
        "-d",
        "int8,half,float,complex64",
        "-r",
        "2",
    ]
    done = bench(3, collective, *options, "--backend", "mpidp,mpi", "--memory", "both")
    assert done.returncode == 0, done.stderr
    assert "FAILED" not in done.stdout
    assert rows(done.stdout)


@pytest.mark.parametrize("op", ["mean", "prod", "min", "max"])
def test_every_dtype(op):
    done = bench(3, "-b", "3000", "-e", "3000", "-n", "2", "-w", "0", "-d", "all", "-o", op)
    assert done.returncode == 0, done.stderr
    assert "# Out of bounds values : 0 OK" in done.stdout


def test_streaming():
    done = bench(2, "--cadence", "streaming", "-e", "4K", "-n", "5")
    assert done.returncode == 0, done.stderr
    assert "cadence: streaming" in done.stdout


# pytest-mpi takes a parameter named "mpi" for its mark of that name, and would skip the test.
@pytest.mark.parametrize(
    "algorithm",
    ["ring", "recursive-halving", "recursive-doubling", pytest.param("mpi", id="the_mpis_own")],
)
def test_algorithms(algorithm):
    done = bench(3, "--algorithm", algorithm, "-e", "64K", "-f", "16", "-n", "2")
    assert done.returncode == 0, done.stderr
    assert "# Out of bounds values : 0 OK" in done.stdout


def test_wrong_results_are_counted_and_fail(tmp_path):
    path = tmp_path / "out.json"
    done = launch(3, "-c", FAULTY, str(path))
    assert done.returncode == 1, done.stderr
    assert "# Out of bounds values : 4 FAILED" in done.stdout
    document = json.loads(path.read_text())
    assert document["out_of_bounds"] == {"count": 4, "okay": False}
    (result,) = document["results"]
    assert (result["out_of_place"]["nwrong"], result["in_place"]["nwrong"]) == (2, 2)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-b", "1Q"], "'1Q': expected a number of bytes"),
        (["broadcast", "-r", "3"], "-r 3: there are 3 ranks, from 0"),
        (["-J", "no/such/folder.json"], "the folder no/such does not exist"),
        (["-J", "."], "is a directory"),
        (["--plot", "bus.nothing"], "must end in one of"),
        (["--device", "cuda"], "no CUDA part"),
        (["-o", "mean", "-d", "int32"], "mean is not defined for int32"),
        (["all_to_all", "--algorithm", "ring"], "--algorithm ring: all_to_all has auto"),
    ],
)
def test_bad_input_is_one_line_from_rank_0(args, message):
    if "cuda" in args and find_plugin() is not None:
        pytest.skip("this build has a CUDA part")
    if "--plot" in args:
        pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    assert_one_line(bench(3, *args), message)


def test_a_bad_setting_is_bad_usage():
    assert_one_line(bench(2, MPIDP_TIMEOUT="-3"), "MPIDP_TIMEOUT")


def test_help_is_printed_once():
    done = bench(3, "--help")
    assert done.returncode == 0
    assert done.stdout.count("Usage:") == 1


def test_what_dies_leaves_no_report(tmp_path):
    options = [
        "-m",
        "mpidp",
        "bench",
        "-n",
        "100000000",
        "-e",
        "1K",
        "-J",
        str(tmp_path / "x.json"),
    ]
    with subprocess.Popen(
        command(2, *options), env=environment(), stdout=subprocess.PIPE, text=True
    ) as job:
        try:
            assert job.stdout.readline().startswith("# mpidp version")
            job.terminate()
            assert job.wait(timeout=30) != 0
        finally:
            job.kill()
    assert os.listdir(tmp_path) == []


def test_the_whole_sweep_takes_less_than_a_minute_when_oversubscribed(tmp_path):
    path = tmp_path / "out.json"
    done = bench(5, "-b", "8", "-e", "64M", "-f", "4", "-J", str(path), timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(path.read_text())["out_of_bounds"]["okay"] is True


def test_info():
    done = launch(2, "-m", "mpidp", "info")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("MPI library:") == 1
    assert "2 on 1 node, 2 per node" in done.stdout
    assert "MPIDP_TIMEOUT=" in done.stdout


def test_info_as_json():
    done = launch(2, "-m", "mpidp", "info", "--json")
    found = json.loads(done.stdout)
    assert found["world_size"] == 2
    assert found["settings"]["timeout"]["variable"] == "MPIDP_TIMEOUT"
