"""`mpidp train`: an example on real data, and the proof that P ranks train as one process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mpidp.cli.console import Command, fail_together
from mpidp.cli.options import OneOf
from mpidp.examples import EXAMPLES, Hyperparameters, load

if TYPE_CHECKING:
    from mpidp.communicator import Communicator
    from mpidp.examples import Example
    from mpidp.training.trainer import TrainingReport

# Float64 sums in another order differ by rounding only; over a run of some hundred steps that
# stays orders of magnitude below this.
VERIFY_TOLERANCE = {"float64": 1e-10, "float32": 1e-3}


@click.command(cls=Command)
@click.option(
    "--example",
    type=OneOf(EXAMPLES, "example"),
    default="digits-mlp",
    show_default=True,
    help="What to train.",
)
@click.option(
    "--framework",
    type=OneOf(sorted({entry.framework for entry in EXAMPLES.values()}), "framework"),
    help="Must be the example's own; names it where several frameworks have the same example.",
)
@click.option("--epochs", type=click.IntRange(0), help="Passes over the data.")
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
@click.option("--momentum", type=click.FloatRange(0, 1, max_open=True), help="Momentum of SGD.")
@click.option("--weight-decay", type=click.FloatRange(0), default=0.0, show_default=True)
@click.option(
    "--clip-norm",
    type=click.FloatRange(0, min_open=True),
    help="Largest norm of the averaged gradient.",
)
@click.option(
    "--compression",
    type=OneOf(("none", "float16", "bfloat16"), "codec"),
    default="none",
    show_default=True,
    help="Codec of the exchanged gradients.",
)
@click.option(
    "--dtype", type=OneOf(("float32", "float64"), "dtype"), default="float64", show_default=True
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option(
    "--verify",
    is_flag=True,
    help="Also train in one process on the whole batches, and compare the weights.",
)
@click.option(
    "--checkpoint",
    "checkpoint_dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for a checkpoint after each epoch.",
)
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint.")
@click.option(
    "--log",
    type=click.Path(dir_okay=False, path_type=Path),
    help="JSON-lines file, one line an epoch.",
)
def train(**options: Any) -> int:
    """Train an example model, data-parallel over the ranks of the job.

    Each global batch is split over the ranks; the result is that of one process on the whole
    batch, whatever the number of ranks. With --verify that is shown, and the exit status is 1
    where it fails.
    """
    entry = EXAMPLES[options["example"]]
    if options["framework"] not in (None, entry.framework):
        raise click.UsageError(
            f"example {options['example']} is for {entry.framework}, not {options['framework']}"
        )
    if options["resume"] and options["checkpoint_dir"] is None:
        raise click.UsageError("--resume needs --checkpoint")
    if options["verify"] and (options["resume"] or options["compression"] != "none"):
        raise click.UsageError("--verify goes with neither --resume nor --compression")
    from mpi4py import MPI

    import mpidp

    world = MPI.COMM_WORLD
    fail_together(world, _missing_package(options["example"]))
    fail_together(world, _unusable_log(options["log"]) if world.rank == 0 else None)
    with mpidp.Communicator(world) as comm:
        return _train(comm, options)


def _train(comm: Communicator, options: dict[str, Any]) -> int:
    say = click.echo if comm.rank == 0 else _say_nothing
    entry = EXAMPLES[options["example"]]
    batch_size = options["batch_size"] or entry.batch_size
    epochs = entry.epochs if options["epochs"] is None else options["epochs"]
    example = _build(options)
    say(
        f"{options['example']} ({entry.framework}, {options['dtype']}): "
        f"{len(example.training)} samples to train on, {len(example.test)} to test, "
        f"global batch {batch_size} over {comm.world_size} rank(s)"
    )
    report = _fit(comm, example, options, batch_size, epochs)
    if report.epochs and example.metric in report.epochs[-1].test_metrics:
        value = report.epochs[-1].test_metrics[example.metric]
        say(f"final test {example.metric}: {value:.4f}")
    if report.stopped:
        say("stopped early")
    if not options["verify"]:
        return 0
    difference = _difference_from_one_process(comm, example, options, batch_size, epochs)
    tolerance = VERIFY_TOLERANCE[options["dtype"]]
    passed = difference <= tolerance
    say(
        f"verify: largest difference of a weight between {comm.world_size} rank(s) and one "
        f"process: {difference:.3g} (allowed {tolerance:g}): {'OK' if passed else 'FAILED'}"
    )
    return 0 if passed else 1


def _build(options: dict[str, Any]) -> Example:
    return load(options["example"])(
        Hyperparameters(
            learning_rate=options["learning_rate"],
            momentum=options["momentum"],
            weight_decay=options["weight_decay"],
            seed=options["seed"],
            dtype=options["dtype"],
        )
    )


def _fit(
    comm: Communicator, example: Example, options: dict[str, Any], batch_size: int, epochs: int
) -> TrainingReport:
    import mpidp

    compression = None if options["compression"] == "none" else options["compression"]
    strategy = mpidp.strategies.Synchronous(clip_norm=options["clip_norm"], compression=compression)
    trainer = mpidp.Trainer(example.adapter, comm, strategy)
    try:
        return trainer.fit(
            example.training,
            batch_size,
            epochs,
            test=example.test,
            accumulate=options["accumulate"],
            seed=options["seed"],
            checkpoint_dir=options["checkpoint_dir"],
            resume=options["resume"],
            log=options["log"],
        )
    finally:
        strategy.close()


def _difference_from_one_process(
    comm: Communicator, trained: Example, options: dict[str, Any], batch_size: int, epochs: int
) -> float:
    """Largest absolute difference of a weight from a run that no other rank takes part in.

    Every rank trains the reference for itself, so the largest difference over ranks counts.
    """
    import numpy as np
    from mpi4py import MPI

    import mpidp

    quiet = {**options, "checkpoint_dir": None, "resume": False, "log": None}
    reference = _build(options)
    with mpidp.Communicator(MPI.COMM_SELF) as alone:
        strategy = mpidp.strategies.Synchronous(clip_norm=options["clip_norm"])
        trainer = mpidp.Trainer(reference.adapter, alone, strategy)
        trainer.fit(
            reference.training,
            batch_size,
            epochs,
            accumulate=quiet["accumulate"],
            seed=quiet["seed"],
            progress=False,
        )
        strategy.close()
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
        return (
            f"example {example} needs the package {error.name}: "
            "install it with pip install 'mpidp[train-embedded]'"
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


def _say_nothing(message: str) -> None:
    pass
