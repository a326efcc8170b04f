"""How jobs end: cleanly, by an exception, by a signal; and what they leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import command, environment, launch

SHARED = Path("/dev/shm")

PREAMBLE = """
import os, sys, time
import numpy as np
import mpidp, mpidp.launch
comm = mpidp.Communicator(timeout=30)
x = np.ones(100_000)
comm.all_reduce(x)
"""


def run(world_size, body, **options):
    return launch(world_size, "-c", PREAMBLE + body, **options)


def left_behind(before):
    """Files in /dev/shm that were not there before. Others' jobs may come and go meanwhile."""
    return sorted(path.name for path in set(SHARED.iterdir()) - before)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    "body",
    [
        "comm.close()",
        "pass",
        "comm.all_reduce_async(x)",
        "array = comm.empty(1000); comm.close()",
        "works = [comm.all_reduce_async(comm.empty(9)) for _ in range(9)]",
        "other = comm.split(comm.rank % 2); other.all_reduce(x)",
        "comm.close(); comm.close(); array = comm",
    ],
)
def test_the_interpreter_exits_without_a_hang(world_size, body):
    done = run(world_size, body, timeout=40)
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr


@pytest.mark.parametrize("world_size", [2, 3])
def test_two_hundred_communicators(world_size):
    done = run(
        world_size,
        """
for i in range(200):
    with mpidp.Communicator() as one:
        one.all_reduce(x)
descriptors = len(os.listdir("/proc/self/fd"))
kept = [mpidp.Communicator() for _ in range(50)]
for one in kept:
    one.all_reduce(x)
for one in kept:
    one.close()
assert len(os.listdir("/proc/self/fd")) <= descriptors + 2
""",
        timeout=100,
    )
    assert done.returncode == 0, done.stderr


def test_registered_memory_is_given_back():
    done = run(
        2,
        """
def shared_pages():
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Shmem:"))
before = shared_pages()
for i in range(30):
    array = comm.empty(1 << 24, "uint8")
    comm.all_reduce(array)
    del array
comm.barrier()
assert shared_pages() - before < 200_000, shared_pages() - before
""",
    )
    assert done.returncode == 0, done.stderr


def test_more_memory_than_there_is_is_an_error_and_no_crash():
    done = run(
        2,
        """
try:
    comm.empty(1 << 50, "uint8")
except MemoryError as error:
    assert str(1 << 50) in str(error)
    print("refused")
comm.all_reduce(x)
""",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("refused") == 2


@pytest.mark.parametrize("late", ["time.sleep(60)", "comm.all_reduce(x)"])
def test_one_raising_rank_ends_the_job(late):
    start = time.monotonic()
    done = run(
        3,
        f"""
mpidp.launch.install_excepthook()
if comm.rank == 1:
    raise ValueError("this is the reason")
{late}
""",
        timeout=40,
    )
    assert time.monotonic() - start < 20
    assert done.returncode != 0
    assert "[rank 1] ValueError: this is the reason" in done.stderr + done.stdout


@pytest.mark.parametrize("waiting", ["comm.all_reduce(x, timeout=60)", "time.sleep(60)"])
def test_a_killed_rank_ends_the_job_and_leaves_nothing(waiting):
    before = set(SHARED.iterdir())
    start = time.monotonic()
    done = run(
        3,
        f"""
comm.barrier()
if comm.rank == 2:
    os.kill(os.getpid(), 9)
{waiting}
""",
        timeout=40,
    )
    assert done.returncode != 0
    assert time.monotonic() - start < 10
    time.sleep(0.2)
    assert left_behind(before) == []


def test_survivors_name_the_dead_rank():
    """As far as the launcher lets them live: it may end them first."""
    done = run(
        2,
        """
if comm.rank == 1:
    os.kill(os.getpid(), 9)
try:
    comm.all_reduce(x, timeout=30)
except mpidp.RankFailedError as error:
    print("named", error.ranks, flush=True)
""",
        timeout=40,
    )
    assert done.returncode != 0
    assert "named" not in done.stdout or "named [1]" in done.stdout


def test_sigterm_to_the_launcher_leaves_no_process():
    marker = f"mpidp-orphan-test-{os.getpid()}"
    body = PREAMBLE + f"print('ready', flush=True)\ntime.sleep(60)  # {marker}"
    job = subprocess.Popen(
        command(2, "-c", body), stdout=subprocess.PIPE, text=True, env=environment()
    )
    try:
        assert job.stdout is not None
        assert job.stdout.readline().startswith("ready")
        job.send_signal(signal.SIGTERM)
        job.wait(timeout=20)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and processes_with(marker):
            time.sleep(0.1)
        assert processes_with(marker) == []
    finally:
        job.kill()
        job.wait()


def processes_with(marker):
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                text = (entry / "cmdline").read_bytes().decode(errors="replace")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if marker in text and state != "Z":
                found.append(entry.name)
    return found


def test_a_forked_child_is_told_why_it_cannot_use_the_communicator():
    done = run(
        2,
        """
child = os.fork()
if child == 0:
    try:
        comm.all_reduce(x)
    except mpidp.MpidpError as error:
        os._exit(7 if "fork" in str(error) else 8)
    os._exit(9)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
comm.all_reduce(x)
""",
    )
    assert done.returncode == 0, done.stderr


def test_import_needs_no_launcher_and_no_mpi():
    done = subprocess.run(
        [sys.executable, "-c", "import mpidp, sys; assert 'mpi4py.MPI' not in sys.modules"],
        capture_output=True,
        text=True,
        timeout=30,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_training_gives_the_weights_of_one_process(world_size):
    done = launch(
        world_size,
        *("-m", "mpidp", "train", "--epochs", "4", "--verify", "--clip-norm", "2"),
        timeout=100,
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stderr
    # The same on any number of ranks.
    assert "final test accuracy: 0.9417" in done.stdout
    assert "(allowed 1e-10): OK" in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--dtype", "int8"), "'int8' is not one of"),
        (("--batch-size", "0"), "--batch-size"),
        (("--resume",), "--resume needs --checkpoint"),
        (("--log", "/nonexistent/x"), "--log /nonexistent/x"),
        (("--verify", "--compression", "float16"), "--verify goes with"),
    ],
)
def test_bad_training_options_are_one_line(args, message):
    done = launch(2, "-m", "mpidp", "train", *args)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("mpidp train:") == 1
