"""`mpidp train`: an example on real data, and the proof that P ranks train as one process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mpidp.cli.console import Command, fail_together
from mpidp.cli.options import OneOf
from mpidp.errors import InvalidArgumentError
from mpidp.examples import EXAMPLES, Hyperparameters, load
from mpidp.reducer.compression import NAMES as CODECS
from mpidp.training import lr
from mpidp.training.checkpoint import CheckpointError
from mpidp.training.stopping import EXIT_STATUS_WARNED

if TYPE_CHECKING:
    from mpidp.communicator import Communicator
    from mpidp.examples import Example
    from mpidp.training.callbacks import Callback
    from mpidp.training.trainer import TrainingReport

# Float64 sums in another order differ by rounding only; over a run of some hundred steps that
# stays orders of magnitude below this. In float32 training amplifies the rounding.
VERIFY_TOLERANCE = {"float64": 1e-10, "float32": 1e-3}

SIGNALS = ("USR1", "USR2", "TERM", "HUP", "ALRM")


class TrainCommand(Command):
    """Lists the examples below the options."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See `click.Command.format_epilog`."""
        with formatter.section("Examples"):
            formatter.write_dl(
                [(name, f"{entry.summary} ({entry.framework})") for name, entry in EXAMPLES.items()]
            )


@click.command(cls=TrainCommand)
@click.option("--example", type=OneOf(EXAMPLES, "example"), help="What to train; see below.")
@click.option(
    "--framework",
    type=OneOf(sorted({entry.framework for entry in EXAMPLES.values()}), "framework"),
    help="Whose example; without --example, its first one.",
)
@click.option("--epochs", type=click.IntRange(0), help="Passes over the data.")
@click.option("--steps", type=click.IntRange(0), help="Steps in all, if that is fewer.")
@click.option("--batch-size", type=click.IntRange(1), help="Samples a step, over all ranks.")
@click.option(
    "--accumulate",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Backward passes a step.",
)
@click.option(
    "--lr", "learning_rate", type=click.FloatRange(0, min_open=True), help="Learning rate."
)
@click.option("--schedule", type=OneOf(lr.NAMES, "schedule"), help="Of the learning rate.")
@click.option("--warmup-steps", type=click.IntRange(0), help="Of a linear warm-up before it.")
@click.option(
    "--momentum", type=click.FloatRange(0, 1, max_open=True), help="Momentum of SGD; Adam's beta 1."
)
@click.option("--weight-decay", type=click.FloatRange(0))
@click.option(
    "--clip-norm",
    type=click.FloatRange(0, min_open=True),
    help="Largest norm of the averaged gradient.",
)
@click.option(
    "--compression",
    type=OneOf(("none", *CODECS), "codec"),
    default="none",
    show_default=True,
    help="Codec of the exchanged gradients.",
)
@click.option(
    "--dtype",
    type=OneOf(("float32", "float64"), "dtype"),
    help="Of the model; float64 with --verify, unless given.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option(
    "--patience",
    type=click.IntRange(1),
    help="Stop after as many epochs without a better test loss.",
)
@click.option(
    "--verify",
    is_flag=True,
    help="Also train in one process on the whole batches, and compare the weights.",
)
@click.option(
    "--checkpoint",
    "checkpoint_dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for a checkpoint after each epoch, and when the training stops early.",
)
@click.option(
    "--checkpoint-every", type=click.IntRange(1), help="Steps after which to write one more."
)
@click.option(
    "--keep", type=click.IntRange(1), default=2, show_default=True, help="Checkpoints to keep."
)
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint.")
@click.option("--auto-resume", is_flag=True, help="Go on from the newest checkpoint, if any.")
@click.option(
    "--stop-signal",
    type=OneOf(SIGNALS, "signal"),
    default="USR1",
    show_default=True,
    help="On which to write a checkpoint and leave with status 75.",
)
@click.option(
    "--log",
    type=click.Path(dir_okay=False, path_type=Path),
    help="JSON-lines file, one line an epoch.",
)
@click.option(
    "--tensorboard",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for TensorBoard logs.",
)
@click.option(
    "--log-every",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Steps after which to log one more entry; 0 for none.",
)
def train(**options: Any) -> int:
    """Train an example model, data-parallel over the ranks of the job.

    Each global batch is split over the ranks; the result is that of one process on the whole
    batch, whatever the number of ranks. With --verify that is shown, and the exit status is 1
    where it fails. Options that are not given have the example's own values.

    A batch system's warning signal (SIGUSR1) on any rank stops the training after the running step,
    with a checkpoint if --checkpoint is given, and exit status 75: submit the job again, with
    --auto-resume.
    """
    _complete(options)
    if options["checkpoint_dir"] is None:
        for name in ("resume", "auto_resume", "checkpoint_every"):
            if options[name]:
                raise click.UsageError(f"--{name.replace('_', '-')} needs --checkpoint")
    if options["verify"] and (
        options["resume"] or options["auto_resume"] or options["compression"] != "none"
    ):
        raise click.UsageError("--verify goes with neither --resume nor --compression")
    from mpi4py import MPI

    import mpidp

    world = MPI.COMM_WORLD
    fail_together(world, _missing_package(options["example"]))
    fail_together(world, _unusable_log(options["log"]) if world.rank == 0 else None)
    fail_together(world, _unusable_tensorboard(options["tensorboard"]))
    # Raised on every rank alike.
    try:
        with mpidp.Communicator(world) as comm:
            return _train(comm, options)
    except CheckpointError as error:
        raise click.ClickException(str(error)) from error
    except InvalidArgumentError as error:
        raise click.UsageError(str(error)) from error


def _complete(options: dict[str, Any]) -> None:
    """Fills in the example and its default options."""
    framework = options["framework"]
    if options["example"] is None:
        options["example"] = next(
            name for name, entry in EXAMPLES.items() if framework in (None, entry.framework)
        )
    entry = EXAMPLES[options["example"]]
    if framework not in (None, entry.framework):
        raise click.UsageError(
            f"example {options['example']} is for {entry.framework}, not {framework}"
        )
    if options["verify"] and options["dtype"] is None:
        options["dtype"] = "float64"
    for name in ("batch_size", "epochs", "dtype", "schedule", "warmup_steps", "clip_norm"):
        if options[name] is None:
            options[name] = getattr(entry, name)


def _train(comm: Communicator, options: dict[str, Any]) -> int:
    say = click.echo if comm.rank == 0 else _say_nothing
    entry = EXAMPLES[options["example"]]
    example = _build(options, comm.local_size)
    say(
        f"{options['example']} ({entry.framework}, {options['dtype']}): "
        f"{len(example.training)} samples to train on, {len(example.test)} to test, "
        f"global batch {options['batch_size']} over {comm.world_size} rank(s)"
        + (f"; {example.note}" if example.note else "")
    )
    report = _fit(comm, example, options)
    if report.epochs:
        last = report.epochs[-1]
        value = {**last.test_metrics, "loss": last.test_loss}.get(example.metric)
        if value is not None:
            reached = "reached" if example.reaches_goal(value) else "not reached"
            say(f"final test {example.metric}: {value:.4f} (goal {example.goal:g} {reached})")
    if report.stop_reason == "signal":
        where = options["checkpoint_dir"]
        say(
            f"stopped by SIG{options['stop_signal']} after step {report.steps}: "
            + (f"go on with --checkpoint {where} --resume" if where else "no checkpoint was asked")
        )
        return EXIT_STATUS_WARNED
    if report.stopped:
        say("stopped early")
    if not options["verify"]:
        return 0
    difference = _difference_from_one_process(comm, example, options)
    tolerance = VERIFY_TOLERANCE[options["dtype"]]
    passed = difference <= tolerance
    say(
        f"verify: largest difference of a weight between {comm.world_size} rank(s) and one "
        f"process: {difference:.3g} (allowed {tolerance:g}): {'OK' if passed else 'FAILED'}"
    )
    return 0 if passed else 1


def _build(options: dict[str, Any], local_size: int) -> Example:
    return load(options["example"])(
        Hyperparameters(
            learning_rate=options["learning_rate"],
            momentum=options["momentum"],
            weight_decay=options["weight_decay"],
            seed=options["seed"],
            dtype=options["dtype"],
            # As many as there are cores would slow down all ranks of the node.
            threads=max(1, len(os.sched_getaffinity(0)) // local_size),
        )
    )


def _fit(
    comm: Communicator, example: Example, options: dict[str, Any], *, alone: bool = False
) -> TrainingReport:
    """Trains; `alone` for the reference, which leaves no trace and takes no notice of signals."""
    import mpidp
    from mpidp.training.logs import JsonLog, TensorBoardLog

    compression = None if options["compression"] == "none" else options["compression"]
    strategy = mpidp.strategies.Synchronous(clip_norm=options["clip_norm"], compression=compression)
    trainer = mpidp.Trainer(example.adapter, comm, strategy)
    batches = -(-len(example.training) // options["batch_size"])
    total_steps = batches * options["epochs"]
    if options["steps"] is not None:
        total_steps = min(total_steps, options["steps"])
    schedule = lr.named(
        options["schedule"],
        example.learning_rate,
        total_steps=total_steps,
        warmup_steps=min(options["warmup_steps"], total_steps),
    )
    plan: dict[str, Any] = {
        "steps": options["steps"],
        "test": example.test,
        "accumulate": options["accumulate"],
        "seed": options["seed"],
        "schedule": schedule,
        "patience": options["patience"],
    }
    if alone:
        plan.update(progress=False, stop_signals=())
        if options["patience"] is None:
            plan["test"] = None  # only the weights are asked for
    else:
        callbacks: list[Callback] = []
        every_steps = options["log_every"]
        if options["log"] is not None:
            callbacks.append(JsonLog(options["log"], every_steps=every_steps))
        if options["tensorboard"] is not None:
            callbacks.append(TensorBoardLog(options["tensorboard"], every_steps=every_steps))
        plan.update(
            callbacks=callbacks,
            checkpoint_dir=options["checkpoint_dir"],
            checkpoint_every=options["checkpoint_every"],
            keep=options["keep"],
            resume=options["resume"] or ("auto" if options["auto_resume"] else False),
            stop_signals=(signal.Signals[f"SIG{options['stop_signal']}"],),
        )
    try:
        return trainer.fit(example.training, options["batch_size"], options["epochs"], **plan)
    finally:
        strategy.close()


def _difference_from_one_process(
    comm: Communicator, trained: Example, options: dict[str, Any]
) -> float:
    """Largest absolute difference of a weight from a run that no other rank takes part in.

    Every rank trains the reference for itself, so the largest difference over ranks counts.
    """
    import numpy as np
    from mpi4py import MPI

    import mpidp

    reference = _build(options, comm.local_size)
    with mpidp.Communicator(MPI.COMM_SELF) as alone:
        _fit(alone, reference, options, alone=True)
    differences = [
        float(np.max(np.abs(trained.adapter.read_leaf(i) - reference.adapter.read_leaf(i))))
        for i in range(len(trained.adapter.leaves()))
    ]
    # NaN must not pass as small.
    worst = np.array([max(differences, key=lambda d: float("inf") if np.isnan(d) else d)])
    return float(comm.all_reduce(worst, op="max")[0])


def _missing_package(example: str) -> str | None:
    try:
        load(example)
    except ImportError as error:
        if (error.name or "mpidp").startswith("mpidp"):
            raise
        return (
            f"example {example} needs the package {error.name}: "
            f"install it with pip install 'mpidp[{EXAMPLES[example].extras}]'"
        )
    return None


def _unusable_log(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        return f"--log {path}: {error.strerror}"
    return None


def _unusable_tensorboard(directory: Path | None) -> str | None:
    if directory is None:
        return None
    from mpidp.errors import MpidpError
    from mpidp.training.logs import TensorBoardLog

    try:
        TensorBoardLog(directory)
    except MpidpError as error:
        return f"--tensorboard: {error}"
    return None


def _say_nothing(message: str) -> None:
    pass
