"""Counts beyond 2^31 elements for real: int8 over 2 ranks, through memory and through messages."""

from __future__ import annotations

import pytest
from launching import launch

NEEDED = 12 << 30

PROGRAM = """
import sys
import numpy as np
import mpidp

COUNT = (1 << 31) + 5
with mpidp.Communicator(timeout=60) as comm:
    x = comm.empty((COUNT,), "int8")
    x.fill(comm.rank + 1)
    for i, where in enumerate((0, COUNT // 2, (1 << 31) - 1, 1 << 31, COUNT - 1)):
        x[where] = 10 * (i + 1) + comm.rank
    comm.all_reduce(x, algorithm=sys.argv[1])
    for i, where in enumerate((0, COUNT // 2, (1 << 31) - 1, 1 << 31, COUNT - 1)):
        assert x[where] == 20 * (i + 1) + 1, (where, x[where])
        x[where] = 3
    # Every byte is 3 now, so any wrong one breaks one of the two.
    assert x.min() == 3 and x.max() == 3
print("fine")
"""


def available():
    with open("/proc/meminfo", encoding="ascii") as lines:
        found = dict(line.split(":") for line in lines)
    return int(found["MemAvailable"].split()[0]) << 10


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("algorithm", "shared_memory"), [("direct", "1"), ("ring", "0")])
def test_all_reduce_of_more_than_two_to_the_31(algorithm, shared_memory):
    if available() < NEEDED:
        pytest.skip(f"{available() >> 30} GiB of memory are available, 12 are needed")
    done = launch(2, "-c", PROGRAM, algorithm, timeout=120, MPIDP_SHARED_MEMORY=shared_memory)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fine") == 2  # the lines of two ranks may run together
