"""The diff in README.md that makes a PyTorch script data-parallel: applied, run, compared."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from launching import launch

pytest.importorskip("torch")

README = Path(__file__).resolve().parents[2] / "README.md"

# What the script in the README leaves out: its data, its model and its loss. Each rank has a part
# of every batch, of unlike sizes, and weights of its own, which must not matter.
BEFORE = """
import sys
from mpi4py import MPI
import torch

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
x = torch.randn(33, 5, generator=torch.Generator().manual_seed(1))
batches = [(x[first : first + 11], x[first : first + 11, :1] ** 2) for first in (0, 11, 22)]
dataset = torch.utils.data.TensorDataset(x, x[:, :1] ** 2)
loader_of_this_rank = [
    tuple(one[11 * rank // size : 11 * (rank + 1) // size] for one in batch) for batch in batches
]
criterion = torch.nn.functional.mse_loss
torch.manual_seed(rank)

class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))

"""

AFTER = """
import json
numbers = [p.detach().flatten().tolist() for p in model.parameters()]
open(sys.argv[1] + str(rank), "w").write(json.dumps(sum(numbers, [])))
"""


def scripts():
    """(the script before, the script after, the lines that the diff adds)."""
    blocks = re.findall(r"^```diff\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert blocks, "README.md has no block marked diff"
    lines = [
        line
        for line in blocks[0].splitlines()
        if not line.startswith(("+++", "---", "@@", "diff "))
    ]
    before = [line[1:] for line in lines if not line.startswith("+")]
    after = [line[1:] for line in lines if not line.startswith("-")]
    return "\n".join(before), "\n".join(after), [line for line in lines if line.startswith("+")]


def test_about_four_lines_change():
    before, after, added = scripts()
    assert len(added) <= 5
    assert "mpidp" not in before
    assert "mpidp" in after


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_changed_script_trains_the_same_model(world_size, tmp_path):
    before, after, _ = scripts()
    for name, script, ranks in (("one", before, 1), ("many", after, world_size)):
        path = tmp_path / f"{name}.py"
        path.write_text(BEFORE + script + AFTER)
        done = launch(ranks, str(path), str(tmp_path / name), timeout=100)
        assert done.returncode == 0, done.stderr
    expected = json.loads((tmp_path / "one0").read_text())
    assert len(set(expected)) > 10
    for rank in range(world_size):
        found = json.loads((tmp_path / f"many{rank}").read_text())
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-13)
