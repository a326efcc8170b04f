"""Training jobs that are killed, warned, or out of disk: what they leave, and how they go on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from launching import launch

from mpidp.training import checkpoint

pytest.importorskip("autograd")
pytest.importorskip("safetensors")

SAMPLES, BATCH, EPOCHS = 53, 8, 3  # 7 steps an epoch, the last of 5 samples

# Trains a small classifier. `seen` gets (step, sample numbers) of this rank's batches.
PREAMBLE = """
import hashlib, json, os, random, resource, signal, sys
import autograd.numpy as anp
import numpy as np
import mpidp, mpidp.launch
from mpidp.adapters.autograd import AutogradAdapter
from mpidp.adapters.optimizers import Adam
from mpidp.training import checkpoint, lr
from mpidp.training.callbacks import Callback

mpidp.launch.install_excepthook()
comm = mpidp.Communicator(timeout=30)
folder = sys.argv[1]
compression = sys.argv[2] if len(sys.argv) > 2 else None
generator = np.random.default_rng(3)
x, y = generator.normal(size=(SAMPLES, 6)), generator.integers(0, 4, SAMPLES)
first, second = generator.normal(size=(6, 9)), generator.normal(size=(9, 4))

class Data:
    def __init__(self, noise):
        self.noise, self.seen, self.trainer = noise, [], None
    def __len__(self):
        return SAMPLES
    def __getitem__(self, indices):
        self.seen.append((self.trainer.report.steps, indices.tolist()))
        # From both global generators, whose states belong to the checkpoint.
        shift = np.random.normal(size=(len(indices), 6)) + random.gauss(0, 1)
        return x[indices] + self.noise * shift, y[indices]

def loss(params, batch):
    out = anp.dot(anp.tanh(anp.dot(batch[0], params["first"])), params["second"])
    out = out - anp.log(anp.sum(anp.exp(out), axis=1, keepdims=True))
    return -anp.sum(out[anp.arange(len(batch[1])), batch[1]]), float(len(batch[1]))

class At(Callback):
    def __init__(self, step, action):
        self.step, self.action = step, action
    def on_step(self, trainer, step):
        if step.number == self.step:
            self.action()

def train(noise=0.0, at=None, **options):
    np.random.seed(comm.rank)
    random.seed(comm.rank)
    adapter = AutogradAdapter({"first": first, "second": second}, loss, Adam(0.01))
    data = Data(noise)
    strategy = mpidp.strategies.Synchronous(compression=compression)
    data.trainer = trainer = mpidp.Trainer(adapter, comm, strategy)
    report = trainer.fit(
        data, BATCH, EPOCHS, progress=False, callbacks=[at] if at else [],
        schedule=lr.cosine(0.01, total_steps=21, warmup_steps=2), **options)
    strategy.close()
    epochs = [
        (e.epoch, e.steps, e.samples, e.loss, e.wire_bytes, e.complete) for e in report.epochs]
    weights = [adapter.params[name] for name in ("first", "second")]
    return {
        "weights": hashlib.sha256(b"".join(w.tobytes() for w in weights)).hexdigest(),
        "values": [w.ravel().tolist() for w in weights],
        "epochs": epochs,
        "seen": data.seen,
    }

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def record(name, outcome):
    for rank, one in enumerate(comm.all_gather_object(outcome)):
        if comm.rank == 0:
            with open(f"{folder}/{name}-{rank}.json", "w") as file:
                json.dump(one, file)
    comm.barrier()
"""
for name, value in {"SAMPLES": SAMPLES, "BATCH": BATCH, "EPOCHS": EPOCHS}.items():
    PREAMBLE = PREAMBLE.replace(name, str(value))

KILLED = """
record("whole", train(noise={noise}))
class Killed(Callback):
    def on_step(self, trainer, step):
        # What this rank has seen must outlive it.
        with open(f"{{folder}}/killed-{{comm.rank}}.json", "w") as file:
            json.dump({{"seen": trainer_data.seen}}, file)
        comm.barrier()
        if step.number == 10 and comm.rank == comm.world_size - 1:
            die()
_init = Data.__init__
def init(self, noise):
    global trainer_data
    trainer_data = self
    _init(self, noise)
Data.__init__ = init
train(noise={noise}, checkpoint_dir=folder, checkpoint_every=3, at=Killed())
"""
RESUMED = """
record("resumed", train(noise={noise}, checkpoint_dir=folder, checkpoint_every=3, resume=True))
"""


def run(world_size, body, folder, *args):
    return launch(
        world_size, "-c", PREAMBLE + body, str(folder), *args, timeout=60, OMP_NUM_THREADS="1"
    )


def outcomes(folder, name):
    """One record for each rank."""
    paths = sorted(Path(folder).glob(f"{name}-*.json"))
    return [json.loads(path.read_text()) for path in paths]


def resume(world_size, folder, *args, noise=0.0):
    done = run(world_size, RESUMED.format(noise=noise), folder, *args)
    assert done.returncode == 0, done.stderr
    return outcomes(folder, "resumed")


@pytest.mark.parametrize("compression", [(), ("int8",)])
def test_a_killed_job_resumes_bit_for_bit(tmp_path, compression):
    killed = run(2, KILLED.format(noise=0.1), tmp_path, *compression)
    assert killed.returncode != 0
    names = [path.name for path in checkpoint.files(tmp_path)]
    assert names == ["step-0000000009.safetensors", "step-0000000007.safetensors"]
    resumed = resume(2, tmp_path, *compression, noise=0.1)
    for mine, whole in zip(resumed, outcomes(tmp_path, "whole"), strict=True):
        assert mine["weights"] == whole["weights"]
        assert mine["epochs"] == whole["epochs"]
        assert mine["seen"] == [[step, what] for step, what in whole["seen"] if step >= 9]


def test_a_killed_job_resumes_on_other_numbers_of_ranks(tmp_path):
    start = tmp_path / "killed"
    start.mkdir()
    assert run(2, KILLED.format(noise=0.0), start).returncode != 0
    (whole, *_) = outcomes(start, "whole")
    before = [[s, what] for o in outcomes(start, "killed") for s, what in o["seen"] if s < 9]
    for world_size in (1, 3):
        folder = tmp_path / str(world_size)
        shutil.copytree(start, folder)
        resumed = resume(world_size, folder)
        for mine in resumed:
            for found, expected in zip(mine["values"], whole["values"], strict=True):
                np.testing.assert_allclose(found, expected, rtol=1e-9)
            for found, expected in zip(mine["epochs"], whole["epochs"], strict=True):
                assert found[:3] == expected[:3]
                np.testing.assert_allclose(found[3], expected[3], rtol=1e-9)
        after = [pair for one in resumed for pair in one["seen"]]
        for epoch in range(EPOCHS):
            seen = [i for step, what in before + after if step // 7 == epoch for i in what]
            assert sorted(seen) == list(range(SAMPLES))


def test_a_job_killed_while_it_writes_leaves_the_checkpoint_before(tmp_path):
    killed = run(
        2,
        """
record("whole", train())
writes = []
fsync = os.fsync
def killing(descriptor):
    writes.append(1)
    if len(writes) == 5:  # of the third file: each is flushed, and then its folder
        die()
    fsync(descriptor)
checkpoint.os.fsync = killing
train(checkpoint_dir=folder, checkpoint_every=3)
""",
        tmp_path,
    )
    assert killed.returncode != 0
    assert [path.name for path in checkpoint.files(tmp_path)] == [
        "step-0000000006.safetensors",
        "step-0000000003.safetensors",
    ]
    assert len(list(tmp_path.glob(".step-*.tmp"))) == 1
    # And the newest that was whole may be cut short by what else went wrong.
    newest = checkpoint.files(tmp_path)[0]
    newest.write_bytes(newest.read_bytes()[:-100])
    (mine, *_) = resume(2, tmp_path)
    assert mine["seen"][0][0] == 3
    assert mine["weights"] == outcomes(tmp_path, "whole")[0]["weights"]
    assert list(tmp_path.glob(".step-*.tmp")) == []


def test_a_full_disk_is_an_error_on_all_ranks_and_keeps_the_checkpoint_before(tmp_path):
    done = run(
        2,
        """
def fill():
    if comm.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    train(checkpoint_dir=folder, checkpoint_every=5, at=At(6, fill))
except checkpoint.CheckpointError as error:
    print(f"rank {comm.rank}: {error}", flush=True)
comm.all_reduce(np.ones(3))
""",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank}: cannot write checkpoint {tmp_path}/step-0000000007" in done.stdout
    assert "File too large" in done.stdout
    (left,) = tmp_path.iterdir()
    assert left.name == "step-0000000005.safetensors"
    assert checkpoint.read(left)[1]["step"] == 5


WARNED = """
import os, signal, sys, threading, time
from mpidp.cli.console import rank_of_job
from mpidp.cli.main import main

def warn():
    while not any(file.startswith("step-") for file in os.listdir(folder)):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.Signals[f"SIG{name}"])

folder, name = sys.argv[1:3]
if rank_of_job() == 1:
    threading.Thread(target=warn, daemon=True).start()
sys.argv[1:] = ["train", "--checkpoint", folder, "--log", f"{folder}/log", *sys.argv[3:]]
main()
"""


@pytest.mark.parametrize("name", ["USR1", "TERM"])
def test_a_warning_signal_stops_with_a_checkpoint_and_its_own_status(tmp_path, name):
    options = ("--stop-signal", name, "--auto-resume")
    done = launch(
        2, "-c", WARNED, str(tmp_path), name, *options, "--epochs", "100000", OMP_NUM_THREADS="1"
    )
    assert done.returncode == 75, done.stderr
    assert f"stopped by SIG{name} after step" in done.stdout
    steps = checkpoint.read(checkpoint.files(tmp_path)[0])[1]["step"]
    assert f"after step {steps}:" in done.stdout
    more = ("--checkpoint", str(tmp_path), "--log", str(tmp_path / "log"), "--auto-resume")
    done = launch(2, "-m", "mpidp", "train", *more, "--steps", str(steps + 24), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    epochs = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [epoch["epoch"] for epoch in epochs] == list(range(len(epochs)))
    assert sum(epoch["steps"] for epoch in epochs) == steps + 24


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (("--resume",), 1, "no checkpoint in"),
        (("--auto-resume", "--batch-size", "64"), 2, "batch_size is 64, was 128"),
    ],
)
def test_what_cannot_be_resumed_is_said_in_one_line(tmp_path, args, status, message):
    options = ("-m", "mpidp", "train", "--checkpoint", str(tmp_path), "--steps", "2")
    if "--auto-resume" in args:
        assert launch(1, *options).returncode == 0
    done = launch(2, *options, *args)
    assert done.returncode == status, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("mpidp") == 1 + done.stderr.count("mpidp train --help")
