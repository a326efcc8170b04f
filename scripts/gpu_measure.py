"""Measures the reduction kernel against copies on the same GPU; writes JSON.

Both move bytes through the GPU's memory and nothing else, so the copy's rate is what the kernel can
reach. A copy of n bytes moves 2n; a reduction of k sources of n bytes to one destination (k + 1) n.

    python scripts/gpu_measure.py --bytes 64M,256M --json kernels.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpidp import _core, devices
from mpidp.config import parse_bytes

DTYPES = {"float32": 4, "float16": 2, "float64": 8}
SOURCES = (2, 4, 8)
BATCH = 5  # launches between two looks at the clock
MIN_SECONDS = 0.05


def rate(moved: int, launch: Callable[[], None], batches: int) -> float:
    """GB/s: the median over batches."""
    launch()
    _core.device_synchronize(0)
    seconds = []
    start = time.perf_counter()
    while len(seconds) < batches or time.perf_counter() - start < MIN_SECONDS:
        begin = time.perf_counter()
        for _ in range(BATCH):
            launch()
        _core.device_synchronize(0)
        seconds.append((time.perf_counter() - begin) / BATCH)
    return moved / statistics.median(seconds) / 1e9


def measure(nbytes: int, batches: int) -> dict[str, Any]:
    """The rates of one size."""
    buffers = [_core.device_allocate(0, nbytes) for _ in range(max(SOURCES) + 1)]
    pointers = [buffer.pointer for buffer in buffers]
    destination = pointers.pop()
    copied = rate(
        2 * nbytes,
        lambda: _core.device_copy(0, destination, pointers[0], nbytes, blocking=False),
        batches,
    )
    rows = []
    for dtype, item in DTYPES.items():
        for sources in SOURCES:
            chosen, count = pointers[:sources], nbytes // item

            def launch(chosen: list[int] = chosen, count: int = count, dtype: str = dtype) -> None:
                _core.device_reduce(0, chosen, [destination], count, dtype)

            found = rate((sources + 1) * nbytes, launch, batches)
            rows.append(
                {"dtype": dtype, "sources": sources, "GBps": found, "of_copy": found / copied}
            )
    return {"bytes": nbytes, "copy_GBps": copied, "reduce": rows}


def main() -> int:
    """Runs as a script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", default="64M,256M", help="sizes of one array")
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    devices.load()
    sizes = [parse_bytes(text) for text in arguments.bytes.split(",")]
    report = {
        "device": _core.device_info(0),
        "runtime": _core.device_runtime(),
        "sizes": [measure(nbytes, arguments.batches) for nbytes in sizes],
    }
    arguments.json.write_text(json.dumps(report, indent=1))
    for size in report["sizes"]:
        print(f"{size['bytes'] >> 20} MiB: copy {size['copy_GBps']:.1f} GB/s")
        for row in size["reduce"]:
            print(
                f"  {row['dtype']:>8} x {row['sources']}: {row['GBps']:8.1f} GB/s "
                f"({row['of_copy']:.0%} of the copy)"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
