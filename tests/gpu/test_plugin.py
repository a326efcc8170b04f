"""Loading the CUDA part: what is wrong is said, and nothing is touched in a forked child."""

import os
import subprocess
import sys

import pytest


def run(code, **variables):
    """The output of a process of its own, since a plugin is loaded once."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **variables},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_machine_without_a_gpu(emulated):
    code = (
        "from mpidp import devices\n"
        "from mpidp.errors import CudaError\n"
        "try:\n"
        "    devices.load()\n"
        "except CudaError as error:\n"
        "    print(error)\n"
    )
    assert "CUDA_VISIBLE_DEVICES" in run(code, MPIDP_EMULATED_DEVICES="0")


def test_a_forked_child_is_told_so(emulated):
    code = (
        "import os\n"
        "from mpidp import _core, devices\n"
        "from mpidp.errors import CudaError\n"
        "devices.load()\n"
        "_core.device_allocate(0, 64)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n"
        "        _core.device_allocate(0, 64)\n"
        "    except CudaError as error:\n"
        "        print(error, flush=True)\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "_core.device_allocate(0, 64)\n"
    )
    assert "does not survive a fork" in run(code)


def test_the_first_plugin_stays(emulated):
    code = (
        "from mpidp import _core, devices\n"
        "devices.load()\n"
        "_core.load_device_plugin('/no/such/file')\n"
        "print(_core.device_runtime(), _core.device_info(0)['name'])\n"
    )
    assert run(code).startswith("emulated ")


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 1 << 20])
def test_memory_is_given_back(counters, nbytes):
    from mpidp import _core

    before = counters()
    buffer = _core.device_allocate(0, nbytes)
    assert counters()["allocations"] == before["allocations"] + 1
    kind, device, exportable = _core.device_classify(buffer.pointer)
    assert (kind, device, exportable) == ("device", 0, True)
    del buffer
    assert counters() == before


def test_a_copy_is_in_stream_order(emulated):
    import numpy as np
    from standin import StandIn, Stream

    from mpidp import _core

    stream = Stream()
    x = StandIn(100_000, np.uint8)
    for byte in range(20):
        x.fill(byte, stream)
    host = np.empty(100_000, np.uint8)
    _core.device_copy(0, host.ctypes.data, x.pointer, host.nbytes, stream.ptr)
    assert (host == 19).all()
    other = Stream()
    x.fill(77, stream)
    _core.order_streams(0, stream.ptr, other.ptr)
    assert (x.download(other) == 77).all()
    stream.close()
    other.close()
