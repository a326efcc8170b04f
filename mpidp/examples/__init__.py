"""The examples that `mpidp train` runs: real data, small models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mpidp.training.adapter import Adapter
from mpidp.training.sampler import Dataset

__all__ = ["EXAMPLES", "Dataset", "Entry", "Example", "Hyperparameters", "load"]


@dataclass(frozen=True)
class Example:
    """A model and its data, ready to train; the same for the same arguments on every rank.

    `metric` is "loss", to be small, or one of `BatchResult.metrics`, to be large: its mean over the
    test samples should reach `goal` with the default options. `learning_rate` is the one in use,
    the base of a schedule. `note` says what else there is to know of the data.
    """

    adapter: Adapter
    training: Dataset
    test: Dataset
    metric: str
    goal: float
    learning_rate: float
    note: str = ""

    def reaches_goal(self, value: float) -> bool:
        """Whether a value of the metric is good enough."""
        return value <= self.goal if self.metric == "loss" else value >= self.goal


@dataclass(frozen=True)
class Hyperparameters:
    """What the command line sets; None leaves the example's own default.

    `threads` is how many this rank may compute with, where the framework lets one choose.
    """

    learning_rate: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    seed: int = 0
    dtype: str = "float32"
    threads: int | None = None


@dataclass(frozen=True)
class Entry:
    """Where an example lives, for the listing and the lazy import, and its default options."""

    module: str
    framework: str
    summary: str
    extras: str  # of this package, that it needs
    batch_size: int
    epochs: int
    dtype: str = "float64"
    schedule: str = "constant"
    warmup_steps: int = 0
    clip_norm: float | None = None


EXAMPLES = {
    "digits-mlp": Entry(
        "mpidp.examples.digits_mlp",
        "autograd",
        "a multilayer perceptron on scikit-learn's handwritten digits",
        "train-embedded",
        batch_size=128,
        epochs=15,
    ),
    "digits-resnet": Entry(
        "mpidp.examples.digits_resnet",
        "torch",
        "a small residual convolutional network on scikit-learn's handwritten digits",
        "train-embedded,torch",
        batch_size=64,
        epochs=6,
        dtype="float32",
        schedule="cosine",
        warmup_steps=20,
    ),
    "charlm": Entry(
        "mpidp.examples.charlm",
        "torch",
        "a character-level transformer on the texts that Python's help() shows",
        "train-embedded,torch",
        batch_size=16,
        epochs=2,
        dtype="float32",
        schedule="cosine",
        warmup_steps=20,
        clip_norm=1.0,
    ),
}


def load(name: str) -> Callable[[Hyperparameters], Example]:
    """The function that builds example `name`. Raises ImportError where a package is missing."""
    import importlib

    module = importlib.import_module(EXAMPLES[name].module)
    build: Callable[[Hyperparameters], Example] = module.build
    return build
