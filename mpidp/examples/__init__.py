"""The examples that `mpidp train` runs: real data, small models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mpidp.training.adapter import Adapter
from mpidp.training.sampler import Dataset


@dataclass(frozen=True)
class Example:
    """A model and its data, ready to train; the same for the same arguments on every rank."""

    adapter: Adapter
    training: Dataset
    test: Dataset
    metric: str  # of BatchResult.metrics; its mean over the test samples is reported
    goal: float  # what the mean should reach with the default options


@dataclass(frozen=True)
class Hyperparameters:
    """What the command line sets; None leaves the example's own default."""

    learning_rate: float | None = None
    momentum: float | None = None
    weight_decay: float = 0.0
    seed: int = 0
    dtype: str = "float32"


@dataclass(frozen=True)
class Entry:
    """Where an example lives, for the listing and the lazy import."""

    module: str
    framework: str
    summary: str
    batch_size: int
    epochs: int


EXAMPLES = {
    "digits-mlp": Entry(
        "mpidp.examples.digits_mlp",
        "autograd",
        "a multilayer perceptron on scikit-learn's handwritten digits",
        batch_size=128,
        epochs=15,
    ),
}


def load(name: str) -> Callable[[Hyperparameters], Example]:
    """The function that builds example `name`."""
    import importlib

    module = importlib.import_module(EXAMPLES[name].module)
    build: Callable[[Hyperparameters], Example] = module.build
    return build
