"""How each framework builds the conformance suite's model. One entry for each adapter.

A kit has `adapter(optimizer, dtype)`, which gives the same model on every rank (a two-layer
classifier of 6 inputs and 4 classes, with a leaf that is used by odd-length batches only), and
`batch(x, y)`, which turns NumPy arrays into the adapter's batch.
"""

from __future__ import annotations

import numpy as np
import pytest

INPUTS, HIDDEN, CLASSES = 6, 9, 4
OPTIMIZERS = ("sgd", "momentum", "weight_decay", "adam")


def initial_parameters(dtype):
    """The same for every framework."""
    generator = np.random.default_rng(12)
    return {
        "first": generator.normal(size=(INPUTS, HIDDEN)).astype(dtype),
        "bias": generator.normal(size=HIDDEN).astype(dtype),
        "odd": generator.normal(size=HIDDEN).astype(dtype),
        "second": generator.normal(size=(HIDDEN, CLASSES)).astype(dtype),
    }


class AutogradKit:
    """HIPS autograd."""

    def __init__(self) -> None:
        pytest.importorskip("autograd")

    def adapter(self, optimizer, dtype):
        """See the module's text."""
        import autograd.numpy as anp

        from mpidp.adapters.autograd import AutogradAdapter
        from mpidp.adapters.optimizers import SGD, Adam

        def logits(params, batch):
            hidden = anp.dot(batch[0], params["first"]) + params["bias"]
            hidden = hidden + batch[0][:, :1] * params["odd"]
            return anp.dot(anp.tanh(hidden), params["second"])

        def loss(params, batch):
            out = logits(params, batch)
            out = out - anp.log(anp.sum(anp.exp(out), axis=1, keepdims=True))
            return -anp.sum(out[anp.arange(len(batch[1])), batch[1]]), float(len(batch[1]))

        def metrics(params, batch):
            answers = np.argmax(logits(params, batch), axis=1)
            return {"accuracy": float(np.sum(answers == batch[1]))}

        chosen = {
            "sgd": SGD(0.1),
            "momentum": SGD(0.1, momentum=0.9),
            "weight_decay": SGD(0.1, momentum=0.5, weight_decay=0.01),
            "adam": Adam(0.01, weight_decay=0.01),
        }[optimizer]
        return AutogradAdapter(initial_parameters(dtype), loss, chosen, metrics=metrics)

    def batch(self, x, y):
        """See the module's text."""
        return x, y


class TorchKit:
    """PyTorch."""

    def __init__(self) -> None:
        self._torch = pytest.importorskip("torch")
        self._torch.set_num_threads(1)

    def adapter(self, optimizer, dtype):
        """See the module's text."""
        from mpidp.adapters.torch import TorchAdapter

        torch = self._torch

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                for name, value in initial_parameters(dtype).items():
                    setattr(self, name, torch.nn.Parameter(torch.from_numpy(value)))

            def forward(self, x):
                hidden = x @ self.first + self.bias + x[:, :1] * self.odd
                return torch.tanh(hidden) @ self.second

        def loss(model, batch):
            out = model(batch[0])
            total = torch.nn.functional.cross_entropy(out, batch[1], reduction="sum")
            return total, len(batch[1]), {"accuracy": float((out.argmax(1) == batch[1]).sum())}

        model = Model()
        parameters = model.parameters()
        chosen = {
            "sgd": lambda: torch.optim.SGD(parameters, 0.1),
            "momentum": lambda: torch.optim.SGD(parameters, 0.1, momentum=0.9),
            "weight_decay": lambda: torch.optim.SGD(
                parameters, 0.1, momentum=0.5, weight_decay=0.01
            ),
            "adam": lambda: torch.optim.AdamW(parameters, 0.01, weight_decay=0.01),
        }[optimizer]()
        return TorchAdapter(model, loss, chosen)

    def batch(self, x, y):
        """See the module's text."""
        return self._torch.from_numpy(x), self._torch.from_numpy(y)


KITS = {"autograd": AutogradKit, "torch": TorchKit}
