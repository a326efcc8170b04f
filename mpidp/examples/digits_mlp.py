"""A multilayer perceptron on scikit-learn's 1797 handwritten digits, in NumPy with autograd.

64 pixels -> 96 -> 48 -> 10 classes, tanh, softmax cross-entropy. Every fifth sample is held out.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import autograd.numpy as anp
import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from mpidp.adapters.autograd import AutogradAdapter, Parameters
from mpidp.adapters.optimizers import SGD
from mpidp.examples import Example, Hyperparameters

LAYERS = (64, 96, 48, 10)
HELD_OUT = 5  # every fifth sample

Batch = tuple[NDArray[Any], NDArray[np.int64]]


class Digits:
    """Pixels scaled to [0, 1] and labels, of the given samples."""

    def __init__(self, pixels: NDArray[Any], labels: NDArray[np.int64]) -> None:
        self.pixels = pixels
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, indices: NDArray[Any]) -> Batch:
        return self.pixels[indices], self.labels[indices]


def initial_parameters(seed: int, dtype: str) -> Parameters:
    """Glorot-uniform weights and zero biases."""
    generator = np.random.default_rng(seed)
    params: Parameters = {}
    for number, (fan_in, fan_out) in enumerate(itertools.pairwise(LAYERS)):
        bound = np.sqrt(6.0 / (fan_in + fan_out))
        weights = generator.uniform(-bound, bound, (fan_in, fan_out))
        params[f"weight{number}"] = weights.astype(dtype)
        params[f"bias{number}"] = np.zeros(fan_out, dtype)
    return params


def log_probabilities(params: Parameters, pixels: NDArray[Any]) -> Any:
    """(samples, 10) log-probabilities of the classes."""
    hidden = pixels
    last = len(LAYERS) - 2
    for number in range(last + 1):
        hidden = anp.dot(hidden, params[f"weight{number}"]) + params[f"bias{number}"]
        if number < last:
            hidden = anp.tanh(hidden)
    shifted = hidden - anp.max(hidden, axis=1, keepdims=True)
    return shifted - anp.log(anp.sum(anp.exp(shifted), axis=1, keepdims=True))


def loss(params: Parameters, batch: Batch) -> tuple[Any, float]:
    """The summed cross-entropy and the number of samples."""
    pixels, labels = batch
    chosen = log_probabilities(params, pixels)[anp.arange(len(labels)), labels]
    return -anp.sum(chosen), float(len(labels))


def metrics(params: Parameters, batch: Batch) -> Mapping[str, float]:
    """The number of right answers."""
    pixels, labels = batch
    answers = np.argmax(log_probabilities(params, pixels), axis=1)
    return {"accuracy": float(np.sum(answers == labels))}


def build(options: Hyperparameters) -> Example:
    """The model, its optimizer and the data."""
    digits = load_digits()
    pixels = (digits.data / 16.0).astype(options.dtype)
    labels = digits.target.astype(np.int64)
    held_out = np.arange(len(labels)) % HELD_OUT == 0
    optimizer = SGD(
        0.2 if options.learning_rate is None else options.learning_rate,
        momentum=0.9 if options.momentum is None else options.momentum,
        weight_decay=options.weight_decay,
    )
    adapter = AutogradAdapter(
        initial_parameters(options.seed, options.dtype), loss, optimizer, metrics=metrics
    )
    return Example(
        adapter,
        training=Digits(pixels[~held_out], labels[~held_out]),
        test=Digits(pixels[held_out], labels[held_out]),
        metric="accuracy",
        goal=0.95,
    )
