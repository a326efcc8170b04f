"""The frame of the command line: lazy commands, one line for bad input, rank 0 alone speaks."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

from mpidp.bench.cases import COLLECTIVES
from mpidp.buffers import DTYPES
from mpidp.cli import bench as bench_module
from mpidp.cli import console, main, options


@pytest.fixture
def as_rank(monkeypatch):
    def become(rank):
        monkeypatch.setattr(console, "rank_of_job", lambda environ=None: rank)

    return become


BAD = [
    ([], "Missing command"),
    (["nope"], "No such command 'nope'"),
    (["bench", "--nope"], "No such option"),
    (["bench", "sort"], "'sort' is not one of all_reduce"),
    (["bench", "-b", "1Q"], "'1Q': expected a number of bytes"),
    (["bench", "-b", "0"], "expected at least 1 byte"),
    (["bench", "-b", "-8"], "expected a number of bytes"),
    (["bench", "-b", "2K", "-e", "1K"], "-b 2048 is more than -e 1024"),
    (["bench", "-f", "1"], "not in the range"),
    (["bench", "-f", "2", "-i", "8"], "give -f or -i, not both"),
    (["bench", "-n", "0"], "not in the range"),
    (["bench", "-n", "x"], "not a valid int"),
    (["bench", "-w", "-1"], "not in the range"),
    (["bench", "-d", "float33"], "'float33' is not one of bool"),
    (["bench", "-d", "float32,"], "'' is not one of"),
    (["bench", "-o", "avg"], "'avg' is not one of sum"),
    (["bench", "-c", "2"], "not in the range"),
    (["bench", "--algorithm", "magic"], "'magic' is not one of auto"),
    (["bench", "--memory", "cold"], "'cold' is not one of registered"),
    (["bench", "--backend", "mpidp,gloo"], "'gloo' is not one of mpidp, mpi"),
    (["bench", "--cadence", "fast"], "'fast' is not one of isolated"),
    (["bench", "--device", "cuda"], "no CUDA part"),
    (["info", "x"], "unexpected extra argument"),
]


@pytest.mark.parametrize(("args", "message"), BAD)
def test_bad_input_is_one_line_and_status_2(args, message, capsys, as_rank, no_cuda_part):
    as_rank(0)
    assert main.run(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("mpidp")
    assert message in captured.err
    assert "--help" in captured.err


@pytest.mark.parametrize("args", [["nope"], ["bench", "-b", "1Q"], ["info", "x"]])
def test_other_ranks_fail_in_silence(args, capsys, as_rank):
    as_rank(1)
    assert main.run(args) == 2
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "args", [["--help"], ["-h"], ["--version"], ["bench", "-h"], ["info", "-h"]]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_help_is_printed_by_rank_0_alone(args, rank, capsys, as_rank):
    as_rank(rank)
    assert main.run(args) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert bool(captured.out) == (rank == 0)


def test_help_lists_every_command(capsys, as_rank):
    as_rank(0)
    main.run(["--help"])
    shown = capsys.readouterr().out
    for name, entry in main.COMMANDS.items():
        assert f"  {name}" in shown
        assert entry.help.split()[0] in shown


def test_help_of_bench_names_every_option(capsys, as_rank):
    as_rank(0)
    main.run(["bench", "--help"])
    shown = capsys.readouterr().out
    for flag in ["-b", "-e", "-f", "-i", "-n", "-w", "-d", "-o", "-r", "-c", "-J"]:
        assert f"  {flag}, --" in shown
    for flag in ["algorithm", "memory", "backend", "cadence", "device", "plot"]:
        assert f"--{flag}" in shown


def loaded_after(code):
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return set(done.stdout.splitlines()[-1].split())


def test_help_loads_neither_numpy_nor_mpi():
    loaded = loaded_after("from mpidp.cli.main import run; run(['--help'])")
    assert not loaded & {"numpy", "mpi4py.MPI", "mpidp._core"}


def test_bench_loads_nothing_of_training():
    loaded = loaded_after("from mpidp.cli.main import run; run(['bench', '--help'])")
    assert "mpidp.cli.bench" in loaded
    assert not loaded & {"mpidp.cli.train", "mpidp.training", "numpy", "mpi4py.MPI", "matplotlib"}


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, 0),
        ({"PMI_RANK": "3"}, 3),
        ({"OMPI_COMM_WORLD_RANK": "2"}, 2),
        ({"SLURM_PROCID": "7"}, 7),
        ({"PMI_RANK": "x"}, 0),
    ],
)
def test_rank_before_mpi_is_up(environ, rank, monkeypatch):
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    assert console.rank_of_job(environ) == rank


def test_an_error_of_many_lines_becomes_one(capsys, as_rank):
    as_rank(0)
    console.report_error("first\n  second")
    assert capsys.readouterr().err == "first second\n"


def test_ctrl_c_is_passed_on(monkeypatch):
    def interrupted(**kwargs):
        raise click.Abort from KeyboardInterrupt()

    monkeypatch.setattr(main.cli, "main", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main.run([])


def test_an_unusable_build_is_one_line(monkeypatch, capsys, as_rank):
    from mpidp.errors import BuildMismatchError

    def broken(**kwargs):
        raise BuildMismatchError("built for another MPI")

    as_rank(0)
    monkeypatch.setattr(main.cli, "main", broken)
    assert main.run([]) == 1
    assert capsys.readouterr().err == "mpidp: built for another MPI\n"


class OfRanks:
    """A communicator whose other ranks say what they are told to."""

    def __init__(self, *messages):
        self.messages = list(messages)

    def allgather(self, message):
        return [message, *self.messages]


def test_all_fail_when_one_does():
    console.fail_together(OfRanks(None, None), None)
    with pytest.raises(click.UsageError, match=r"^rank 2: disk full$"):
        console.fail_together(OfRanks(None, "disk full"), None)
    with pytest.raises(click.UsageError, match=r"^bad$"):
        console.fail_together(OfRanks("bad"), "bad")
    with pytest.raises(click.UsageError, match=r"^mine$"):
        console.fail_together(OfRanks(None), "mine")


@pytest.mark.parametrize(
    ("text", "nbytes"), [("8", 8), ("1K", 1024), ("64M", 64 << 20), ("2G", 2 << 30), ("4k", 4096)]
)
def test_bytes(text, nbytes):
    assert options.Bytes().convert(text, None, None) == nbytes


@pytest.mark.parametrize("text", ["all_reduce", "all-reduce", "AllReduce", "ALLREDUCE"])
def test_names_are_read_loosely(text):
    assert options.OneOf(COLLECTIVES, "collective").convert(text, None, None) == "all_reduce"


def test_lists():
    kind = options.ListOf(("a", "b", "c"), "letter", allow_all=True)
    assert kind.convert("b, a,b", None, None) == ("b", "a")
    assert kind.convert("all", None, None) == ("a", "b", "c")
    with pytest.raises(click.BadParameter):
        options.ListOf(("a",), "letter").convert("all", None, None)


def test_dtypes_by_the_names_of_nccl_tests():
    kind = bench_module._Dtypes()
    assert kind.convert("half,float,double", None, None) == ("float16", "float32", "float64")


def test_the_offered_dtypes_are_those_that_collectives_take():
    assert set(bench_module._DTYPES) == set(DTYPES)
