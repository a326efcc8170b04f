"""Which device the GPU tests run on: MPIDP_TEST_DEVICE=emulated (the default) or cuda.

The emulated device is built on first use (tests/gpu/emulated). It runs the library's own kernels
and keeps the promises that CUDA makes, and no others.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
# The exact-valued inputs and the oracle are those of the host tests.
for folder in (HERE.parent / "mpi", HERE):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
