"""GPU arrays without a GPU: streams, devices, the search for the CUDA part, and its errors."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from mpidp import devices
from mpidp.errors import InvalidArgumentError


class Handle:
    """A stream as cuda.core has it."""

    def __cuda_stream__(self):
        return (0, 48)


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0),
        (1, 0),  # the legacy default stream of DLPack and the CUDA array interface
        (2, 2),
        (4096, 4096),
        (SimpleNamespace(ptr=32), 32),
        (SimpleNamespace(cuda_stream=64), 64),
        (Handle(), 48),
    ],
)
def test_streams(stream, handle):
    assert devices.stream_handle(stream) == handle


@pytest.mark.parametrize("stream", [-1, 1.5, "0", None, True, SimpleNamespace(ptr="x")])
def test_what_is_no_stream(stream):
    with pytest.raises(InvalidArgumentError, match="expected a CUDA stream"):
        devices.stream_handle(stream)


def framework(monkeypatch, name, **attributes):
    """A module of that name with a `cuda` namespace, and a class that seems to come from it."""
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(cuda=SimpleNamespace(**attributes)))
    made_by = type("Array", (), {"__module__": f"{name}._core"})
    array = made_by()
    array.device = 3
    return array


def torch_like(monkeypatch, streams, initialized=True):
    return framework(
        monkeypatch,
        "torch",
        is_available=lambda: True,
        is_initialized=lambda: initialized,
        current_stream=lambda device: SimpleNamespace(cuda_stream=streams[device]),
    )


def cupy_like(monkeypatch, handle):
    return framework(monkeypatch, "cupy", get_current_stream=lambda: SimpleNamespace(ptr=handle))


def test_the_stream_is_that_of_the_array_s_framework(monkeypatch):
    tensor = torch_like(monkeypatch, {3: 33, None: 30})
    array = cupy_like(monkeypatch, 44)
    assert devices.current_stream(tensor) == 33  # of the tensor's device
    assert devices.current_stream(array) == 44
    assert devices.current_stream(object()) == 30  # PyTorch is in use


def test_a_framework_that_is_not_in_use_is_not_asked(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    assert devices.current_stream() == 0
    torch_like(monkeypatch, {None: 30}, initialized=False)
    assert devices.current_stream() == 0
    cupy_like(monkeypatch, 44)
    assert devices.current_stream() == 44


def test_importing_mpidp_imports_no_framework_and_loads_nothing():
    code = (
        "import sys, mpidp, mpidp.buffers, mpidp.devices\n"
        "from mpidp import _core\n"
        "assert _core.device_runtime() is None\n"
        "assert not {'torch', 'cupy', 'jax'} & set(sys.modules)\n"
        "assert 'cuda' not in open('/proc/self/maps').read()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(("device", "index"), [("cuda", None), ("cuda:0", 0), ("cuda:12", 12)])
def test_device_names(device, index):
    assert devices.parse_device(device) == index


@pytest.mark.parametrize("device", ["cpu:0", "gpu", "cuda:-1", "cuda:x", 0, None])
def test_device_names_that_are_none(device):
    with pytest.raises(InvalidArgumentError, match='expected "cpu", "cuda" or "cuda:N"'):
        devices.parse_device(device)


# Each in a process of its own: a plugin is loaded once.
MISSING = {
    "no plugin": ("", "devices.find_plugin = lambda: None", "no CUDA part"),
    "no file": ("/no/such/plugin.so", "", "cannot be loaded: /no/such/plugin.so"),
    "another library": ("libc.so.6", "", "belongs to another version of mpidp"),
}


@pytest.mark.parametrize("what", MISSING)
def test_a_missing_cuda_part_is_an_error_that_says_so(what, monkeypatch):
    plugin, change, message = MISSING[what]
    code = (
        "from mpidp import devices\n"
        f"{change}\n"
        "from mpidp.errors import CudaError\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        devices.load()\n"
        "    except CudaError as error:\n"
        "        print(error)\n"
        "print(devices.describe()['runtime'])\n"
    )
    monkeypatch.setenv("MPIDP_DEVICE_PLUGIN", plugin)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.count(message) == 2
    assert done.stdout.rstrip().endswith("None")
