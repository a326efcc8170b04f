"""The PyTorch examples of `mpidp train`: they learn, and P ranks give what one process gives."""

from __future__ import annotations

import re

import pytest
from launching import launch

pytest.importorskip("torch")
pytest.importorskip("sklearn")

# Starting PyTorch on all ranks alone takes long on a busy machine.
pytestmark = pytest.mark.timeout(300)


def train(*args):
    done = launch(2, "-m", "mpidp", "train", "--framework", "torch", *args, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_residual_network_reaches_its_goal():
    out = train()  # PyTorch's first example
    assert out.startswith("digits-resnet (torch, float32)")
    assert "(goal 0.97 reached)" in out


def test_the_residual_network_does_not_depend_on_the_number_of_ranks():
    out = train("--example", "digits-resnet", "--verify", "--steps", "6", "--accumulate", "3")
    assert "(allowed 1e-10): OK" in out


def test_the_language_model_learns_and_does_not_depend_on_the_number_of_ranks():
    out = train("--example", "charlm", "--verify", "--steps", "30", "--warmup-steps", "5")
    assert "(allowed 1e-10): OK" in out
    entropy = float(re.search(r"unigram entropy ([0-9.]+)", out)[1])
    loss = float(re.search(r"final test loss: ([0-9.]+)", out)[1])
    assert loss < entropy - 0.2
