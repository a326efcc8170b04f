"""A multilayer perceptron on scikit-learn's 1797 handwritten digits, in NumPy with autograd.

64 pixels -> 96 -> 48 -> 10 classes, tanh, softmax cross-entropy.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import autograd.numpy as anp
import numpy as np
from numpy.typing import NDArray

from mpidp.adapters.autograd import AutogradAdapter, Parameters
from mpidp.adapters.optimizers import SGD
from mpidp.examples import Example, Hyperparameters
from mpidp.examples.digits import Batch, split

LAYERS = (64, 96, 48, 10)


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
    learning_rate = 0.2 if options.learning_rate is None else options.learning_rate
    optimizer = SGD(
        learning_rate,
        momentum=0.9 if options.momentum is None else options.momentum,
        weight_decay=options.weight_decay or 0.0,
    )
    adapter = AutogradAdapter(
        initial_parameters(options.seed, options.dtype), loss, optimizer, metrics=metrics
    )
    training, test = split(options.dtype)
    return Example(
        adapter, training, test, metric="accuracy", goal=0.95, learning_rate=learning_rate
    )
