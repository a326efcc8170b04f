"""A character-level transformer on text that every Python has, in PyTorch.

The text is what `help("topics")` shows (`pydoc_data.topics`), some 460,000 characters; it differs a
little between Python versions. It is cut into blocks of 64 characters, each a sample; every tenth
is held out. The weight of a sample is its characters, so losses are nats per character. A model
that knows only how often each character comes reaches the unigram entropy, and no less.

Pre-norm decoder blocks (Vaswani et al. 2017; Radford et al. 2019), without dropout, so that the
result does not depend on how a batch is split over ranks.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from mpidp.adapters.torch import TorchAdapter
from mpidp.examples import Example, Hyperparameters

CONTEXT = 64  # characters of a sample
HELD_OUT = 10  # every tenth block
WIDTH = 64
HEADS = 4
LAYERS = 2
# Printable ASCII and the line feed; the few other characters share one number.
VOCABULARY = "\n" + "".join(chr(code) for code in range(32, 127))
SYMBOLS = len(VOCABULARY) + 1


def text() -> str:
    """All help topics, in the order of their names."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return "\n".join(topics[name] for name in sorted(topics))


def encode(characters: str) -> NDArray[np.int64]:
    """(characters,) numbers below SYMBOLS."""
    numbers = {character: number for number, character in enumerate(VOCABULARY)}
    other = len(VOCABULARY)
    return np.array([numbers.get(character, other) for character in characters], dtype=np.int64)


def unigram_entropy(symbols: NDArray[np.int64]) -> float:
    """Of the symbols' frequencies, in nats."""
    frequencies = np.unique(symbols, return_counts=True)[1] / symbols.size
    return float(-np.sum(frequencies * np.log(frequencies)))


class Blocks:
    """Samples of CONTEXT + 1 symbols: the model sees all but the last, and predicts all but the
    first.
    """

    def __init__(self, blocks: NDArray[np.int64]) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, indices: NDArray[Any]) -> Any:
        chosen = torch.from_numpy(self.blocks[indices])
        return chosen[:, :-1], chosen[:, 1:]


def split(symbols: NDArray[np.int64]) -> tuple[Blocks, Blocks]:
    """(blocks to train on, held-out blocks)."""
    count = (len(symbols) - 1) // CONTEXT
    starts = np.arange(count) * CONTEXT
    blocks = symbols[starts[:, None] + np.arange(CONTEXT + 1)]
    held_out = np.arange(count) % HELD_OUT == 0
    return Blocks(blocks[~held_out]), Blocks(blocks[held_out])


class DecoderBlock(nn.Module):  # type: ignore[misc]
    """Causal self-attention and a two-layer perceptron, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attend = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        """(samples, characters, WIDTH) to the same."""
        samples, characters, _ = x.shape
        heads = self.attend(self.norm1(x)).view(samples, characters, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(samples, characters, WIDTH))
        return x + self.narrow(functional.gelu(self.widen(self.norm2(x))))


class CharacterModel(nn.Module):  # type: ignore[misc]
    """(samples, characters) symbols to (samples, characters, SYMBOLS) logits of the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(DecoderBlock() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, SYMBOLS)
        for table in (self.symbols, self.positions):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, symbols: Any) -> Any:
        """See the class."""
        x = self.symbols(symbols) + self.positions.weight[: symbols.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def loss(model: nn.Module, batch: Any) -> tuple[Any, float, Mapping[str, float]]:
    """The summed cross-entropy in nats, the number of characters, and that of right guesses."""
    seen, following = batch
    logits = model(seen).flatten(0, 1)
    wanted = following.flatten()
    total = functional.cross_entropy(logits, wanted, reduction="sum")
    return total, wanted.numel(), {"accuracy": float((logits.argmax(1) == wanted).sum())}


def build(options: Hyperparameters) -> Example:
    """The model, its optimizer and the data."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(options.seed)
        model = CharacterModel().to(getattr(torch, options.dtype))
    learning_rate = 4e-3 if options.learning_rate is None else options.learning_rate
    optimizer = torch.optim.AdamW(
        model.parameters(),
        learning_rate,
        betas=(0.9 if options.momentum is None else options.momentum, 0.99),
        weight_decay=0.01 if options.weight_decay is None else options.weight_decay,
    )
    symbols = encode(text())
    training, test = split(symbols)
    return Example(
        TorchAdapter(model, loss, optimizer),
        training,
        test,
        metric="loss",
        goal=1.8,
        learning_rate=learning_rate,
        note=f"unigram entropy {unigram_entropy(symbols):.3f} nats per character",
    )
