"""scikit-learn's 1797 handwritten digits, 8 x 8 pixels, as `Dataset`s. Every fifth is held out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

HELD_OUT = 5  # every fifth sample

Batch = tuple[NDArray[Any], NDArray[np.int64]]


class Digits:
    """Pixels scaled to [0, 1], (samples, 64), and labels, (samples,), of the given samples.

    `convert(pixels, labels)` makes a batch of them, if the arrays themselves are not one.
    """

    def __init__(
        self,
        pixels: NDArray[Any],
        labels: NDArray[np.int64],
        convert: Callable[[NDArray[Any], NDArray[np.int64]], Any] | None = None,
    ) -> None:
        self.pixels = pixels
        self.labels = labels
        self._convert = convert

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, indices: NDArray[Any]) -> Any:
        batch = self.pixels[indices], self.labels[indices]
        return batch if self._convert is None else self._convert(*batch)


def split(
    dtype: str, convert: Callable[[NDArray[Any], NDArray[np.int64]], Any] | None = None
) -> tuple[Digits, Digits]:
    """(samples to train on, held-out samples), with pixels of `dtype`."""
    digits = load_digits()
    pixels = (digits.data / 16.0).astype(dtype)
    labels = digits.target.astype(np.int64)
    held_out = np.arange(len(labels)) % HELD_OUT == 0
    return (
        Digits(pixels[~held_out], labels[~held_out], convert),
        Digits(pixels[held_out], labels[held_out], convert),
    )
