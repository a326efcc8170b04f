"""A small residual network (He et al. 2016) on 8 x 8 handwritten digits, in PyTorch.

3 x 3 convolutions: 1 -> 16 channels, a block of 16, a block of 32 at half the resolution, and a
linear layer to the 10 classes. Group normalization (Wu & He 2018) in place of batch normalization:
it looks at one sample at a time, so the result does not depend on how a batch is split over ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from mpidp.adapters.torch import TorchAdapter
from mpidp.examples import Example, Hyperparameters
from mpidp.examples.digits import split

SIDE = 8  # pixels
CLASSES = 10
CHANNELS = (16, 32)
GROUPS = 4


class Block(nn.Module):  # type: ignore[misc]
    """Two convolutions around which the input is carried, through a 1 x 1 one if it must change."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(GROUPS, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(GROUPS, outputs)
        changes = stride != 1 or inputs != outputs
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if changes else None

    def forward(self, x: Any) -> Any:
        """(samples, inputs, h, w) to (samples, outputs, h / stride, w / stride)."""
        carried = x if self.shortcut is None else self.shortcut(x)
        x = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(x)) + carried)


class ResidualNetwork(nn.Module):  # type: ignore[misc]
    """(samples, 1, 8, 8) pixels to (samples, 10) logits."""

    def __init__(self) -> None:
        super().__init__()
        narrow, wide = CHANNELS
        self.stem = nn.Conv2d(1, narrow, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(GROUPS, narrow)
        self.block1 = Block(narrow, narrow, 1)
        self.block2 = Block(narrow, wide, 2)
        self.head = nn.Linear(wide * (SIDE // 2) ** 2, CLASSES)

    def forward(self, x: Any) -> Any:
        """See the class."""
        x = functional.relu(self.norm(self.stem(x)))
        x = self.block2(self.block1(x))
        return self.head(x.flatten(1))


def loss(model: nn.Module, batch: Any) -> tuple[Any, float, Mapping[str, float]]:
    """The summed cross-entropy, the number of samples, and the number of right answers."""
    pixels, labels = batch
    logits = model(pixels)
    total = functional.cross_entropy(logits, labels, reduction="sum")
    return total, len(labels), {"accuracy": float((logits.argmax(1) == labels).sum())}


def build(options: Hyperparameters) -> Example:
    """The model, its optimizer and the data."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(options.seed)
        model = ResidualNetwork().to(getattr(torch, options.dtype))
    learning_rate = 0.05 if options.learning_rate is None else options.learning_rate
    optimizer = torch.optim.SGD(
        model.parameters(),
        learning_rate,
        momentum=0.9 if options.momentum is None else options.momentum,
        weight_decay=5e-4 if options.weight_decay is None else options.weight_decay,
    )
    training, test = split(
        options.dtype,
        lambda pixels, labels: (
            torch.from_numpy(pixels).view(-1, 1, SIDE, SIDE),
            torch.from_numpy(labels),
        ),
    )
    return Example(
        TorchAdapter(model, loss, optimizer),
        training,
        test,
        metric="accuracy",
        goal=0.97,
        learning_rate=learning_rate,
    )
