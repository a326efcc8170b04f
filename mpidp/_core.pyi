"""The C++ extension: converts arguments, releases the GIL, translates errors; no policy."""

from typing import Any

from numpy.typing import NDArray

class Buffer:
    """A typed view of contiguous memory. Keeps `owner` alive."""

    def __init__(
        self,
        pointer: int,
        count: int,
        dtype: str,
        device: str = "cpu",
        owner: object = None,
        read_only: bool = False,
        stream: int = 0,
    ) -> None: ...
    @property
    def pointer(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def stream(self) -> int:
        """The CUDA stream with which the contents of a GPU buffer are ordered."""
    @property
    def read_only(self) -> bool: ...

class Work:
    """One asynchronous collective. Dropping it does not cancel it."""

    @property
    def on_device(self) -> bool: ...
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None, stream: int = 0) -> None:
        """Raises the collective's error; TimeoutError when `timeout` seconds pass first.

        On GPU buffers it waits for the issue alone, and makes `stream` wait for the end.
        """
    def synchronize(self, timeout: float | None = None) -> None:
        """As wait(), but blocks the host until the end on the GPU too."""

# An array argument (`x`, `out`) is a Buffer or any object with a simple buffer-protocol export.
# Anything else raises TypeError, and the Python layer converts it first (mpidp/buffers.py).
# `out=None` means in place. `timeout` is in seconds; a negative one means the context's default.
# `scale=None` means 1. Each *_async twin takes the same arguments and returns a Work.
class Context:
    def __init__(
        self,
        comm_handle: int,
        *,
        timeout: float = 600.0,
        node_id: int = -1,
        shared_memory: bool = True,
        slot_bytes: int = ...,
        inline_bytes: int = ...,
        segment_bytes: int = ...,
        piece_bytes: int = ...,
        spin_us: int = -1,
        stores: str = "auto",
        device_transport: str = "auto",
        device_segment_bytes: int = 0,
    ) -> None:
        """Collective over the communicator, which the context borrows and never frees."""
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def local_size(self) -> int: ...
    @property
    def node_rank(self) -> int: ...
    @property
    def num_nodes(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    @property
    def timeout(self) -> float: ...
    @property
    def shared_memory(self) -> bool:
        """True when every process of this node can map every other's memory (proven by a probe)."""
    @property
    def stores(self) -> str:
        """How memory that peers read is written: "streaming", "loop" or "library"."""
    @property
    def device_index(self) -> int:
        """The GPU that this rank works on; -1 while it has none."""
    @property
    def device_transport(self) -> str:
        """One of "undecided", "local", "ipc" and "staged"."""
    @property
    def device_reason(self) -> str: ...
    def use_device(self, device: int) -> None:
        """Makes the GPU this rank's; raises InvalidBufferError where it already has another."""
    def set_rules(self, collective: str, rules: list[tuple[int, str]]) -> None:
        """What "auto" means: the first (limit, algorithm) with nbytes <= limit."""
    def select(self, collective: str, nbytes: int) -> str: ...
    def all_reduce(
        self,
        x: object,
        out: object,
        op: str,
        algorithm: str,
        scale: float | None,
        deterministic: bool,
        timeout: float,
    ) -> None: ...
    def reduce_scatter(
        self,
        x: object,
        out: object,
        op: str,
        algorithm: str,
        scale: float | None,
        deterministic: bool,
        timeout: float,
    ) -> None: ...
    def reduce(
        self,
        x: object,
        out: object,
        op: str,
        root: int,
        algorithm: str,
        scale: float | None,
        deterministic: bool,
        timeout: float,
    ) -> None: ...
    def all_gather(self, x: object, out: object, algorithm: str, timeout: float) -> None: ...
    def broadcast(self, x: object, root: int, algorithm: str, timeout: float) -> None: ...
    def all_to_all(self, x: object, out: object, algorithm: str, timeout: float) -> None: ...
    def barrier(self, timeout: float) -> None: ...
    def all_reduce_async(
        self,
        x: object,
        out: object,
        op: str,
        algorithm: str,
        scale: float | None,
        deterministic: bool,
        timeout: float,
    ) -> Work: ...
    def reduce_scatter_async(
        self,
        x: object,
        out: object,
        op: str,
        algorithm: str,
        scale: float | None,
        deterministic: bool,
        timeout: float,
    ) -> Work: ...
    def reduce_async(
        self,
        x: object,
        out: object,
        op: str,
        root: int,
        algorithm: str,
        scale: float | None,
        deterministic: bool,
        timeout: float,
    ) -> Work: ...
    def all_gather_async(self, x: object, out: object, algorithm: str, timeout: float) -> Work: ...
    def broadcast_async(self, x: object, root: int, algorithm: str, timeout: float) -> Work: ...
    def all_to_all_async(self, x: object, out: object, algorithm: str, timeout: float) -> Work: ...
    def barrier_async(self, timeout: float) -> Work: ...
    def allocate(self, nbytes: int) -> NDArray[Any]:
        """Zeroed bytes that the node's processes can map. Local. Raises MemoryError."""
    def close(self, synchronize: bool = True) -> bool:
        """Waits for pending work; further calls raise ClosedError. Collective if `synchronize`.

        Returns whether all ranks came: only then may the communicator be freed.
        """

def schedule(
    collective: str,
    algorithm: str,
    world_size: int,
    rank: int,
    count: int,
    root: int = 0,
    segment_count: int = 0,
) -> tuple[list[tuple[str, str, str, int, int, int, int, int, int, int]], int]:
    """(steps, scratch_count); a step is the fields of csrc/schedule/schedule.h in their order."""

def has_schedule(collective: str, algorithm: str) -> bool: ...
def reduce_buffers(
    sources: list[Any],
    destinations: list[Any],
    op: str,
    scales: list[float] | None = None,
    divisor: float = 1.0,
) -> None:
    """The CPU kernel itself, on Buffers or arrays of one dtype and count; for tests and codecs."""

def chunk_of(count: int, num_chunks: int, index: int, granule: int = 1) -> tuple[int, int]:
    """(offset, count)."""

def load_device_plugin(path: str) -> None:
    """Loads the CUDA part, once in a process. Raises CudaError."""

def device_runtime() -> str | None:
    """The name of what load_device_plugin() has loaded: "cuda", or "emulated" in tests."""

def device_count() -> int: ...
def current_device() -> int: ...
def device_info(device: int) -> dict[str, Any]: ...
def device_classify(pointer: int) -> tuple[str, int, bool]:
    """(host, pinned, device or managed; its GPU; whether peers can map it)."""

def device_allocate(device: int, nbytes: int) -> Buffer:
    """Uninitialised bytes that peers can map, given back with the Buffer. Raises MemoryError."""

def device_copy(
    device: int,
    destination: int,
    source: int,
    nbytes: int,
    stream: int = 0,
    blocking: bool = True,
) -> None: ...
def device_reduce(
    device: int,
    sources: list[int],
    destinations: list[int],
    count: int,
    dtype: str,
    op: str = "sum",
    stream: int = 0,
) -> None:
    """The kernel of the reductions, on addresses; at most 16 of each. For measurements."""

def device_synchronize(device: int, stream: int = 0) -> None:
    """Blocks until the stream is idle."""

def order_streams(device: int, earlier: int, later: int) -> None:
    """Makes `later` wait for what `earlier` has queued."""

def dlpack_view(buffer: Buffer, shape: list[int], device: int) -> Any:
    """An object with __dlpack__ over the memory of a GPU buffer."""

def instruction_set() -> str: ...
def set_instruction_set(name: str) -> bool: ...
def mpi_library() -> str:
    """MPI_Get_library_version of the MPI the extension is linked to, at run time."""

def built_against() -> str:
    """The vendor and version of the mpi.h the extension was compiled with."""

def memory_floor(x: NDArray[Any], iterations: int) -> list[float]:
    """Seconds of each in-place update of x (one load and one store per byte); for the benchmark."""
