"""Run a kernel's Metal text on the CPU: buffers, launch, faults, counters."""

import ctypes
import functools
import mmap
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from .build import load
from .rewrite import to_cpp
from .source import Source, generated_source

ORDERS = ("ascending", "descending", "shuffled")
_PAGE = mmap.PAGESIZE
_ALIGN = 16  # of a buffer's first byte; what the widest vector load needs


class KernelFault(RuntimeError):
    """A kernel did what it must not; the message says what, which thread, and where."""


@dataclass(frozen=True)
class Traffic:
    """What all threads together did to one buffer, in bytes.

    ``read`` and ``written`` count every access, ``read_once`` and ``written_once``
    each byte of the buffer at most once. ``size`` is the buffer's own size.
    """

    read: int
    written: int
    read_once: int
    written_once: int
    size: int


class _Buffer(ctypes.Structure):  # msl::Buffer
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("begin", ctypes.c_void_p),
        ("end", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("touched", ctypes.c_void_p),
        ("read", ctypes.c_uint64),
        ("written", ctypes.c_uint64),
    )


class _Launch(ctypes.Structure):  # msl::Launch
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("group", ctypes.c_uint32 * 3),
        ("order", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("seconds", ctypes.c_uint32),
        ("signal", ctypes.c_int32),
        ("line", ctypes.c_int32),
        ("thread", ctypes.c_uint32 * 3),
        ("fault", ctypes.c_void_p),
        ("message", ctypes.c_char * 512),
        ("buffers", ctypes.c_void_p),
    )


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        *[ctypes.c_int] * 3,
        ctypes.c_long,
    ]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


class _Shared:
    """Memory that the child process shares, between two pages that nobody may touch."""

    def __init__(self, size: int):
        self.size = size
        self.start = -(-size // _PAGE) * _PAGE - -(-size // _ALIGN) * _ALIGN + _PAGE
        self.total = -(-size // _PAGE) * _PAGE + 2 * _PAGE
        access = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
        self.base = _libc().mmap(None, self.total, access, flags, -1, 0)
        if self.base == ctypes.c_void_p(-1).value:
            raise MemoryError(f"no {self.total} bytes for a kernel's buffer")
        for guard in (self.base, self.base + self.total - _PAGE):
            _libc().mprotect(guard, _PAGE, 0)

    @property
    def address(self) -> int:
        return self.base + self.start

    @property
    def bytes(self) -> np.ndarray:
        raw = (ctypes.c_uint8 * self.size).from_address(self.address)
        return np.frombuffer(raw, np.uint8) if self.size else np.zeros(0, np.uint8)

    def close(self) -> None:
        _libc().munmap(self.base, self.total)


def _to_numpy(array: mx.array) -> np.ndarray:
    """Same bytes and strides; bfloat16, which NumPy lacks, as uint16."""
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def _storage(values: np.ndarray) -> tuple[np.ndarray, int]:
    """The bytes a strided array spans, and the offset of its first element."""
    reach = [(n - 1) * s for n, s in zip(values.shape, values.strides)]
    if values.size == 0:
        return np.zeros(0, np.uint8), 0
    low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
    span = np.full(high - low + values.itemsize, 0xFF, np.uint8)
    view = np.ndarray(values.shape, values.dtype, span, -low, values.strides)
    view[...] = values
    return span, -low


def _input_buffers(
    source: Source, arrays: Sequence[mx.array], ensure_row_contiguous: bool
) -> list[tuple[np.ndarray, int]]:
    """Contents of the input buffers; ``_shape`` and its like included."""
    names = iter(source.buffers)
    contents, left = [], next(names)
    for array in arrays:
        values = _to_numpy(array)
        if ensure_row_contiguous:
            values = np.ascontiguousarray(values).reshape(array.shape)
        contents.append(_storage(values))
        companions = {
            "shape": np.array(array.shape, np.int32),
            "strides": np.array(values.strides, np.int64) // values.itemsize,
            "ndim": np.array([array.ndim], np.int32),
        }
        name, left = left.name, next(names)
        for suffix, content in companions.items():
            if left.name == f"{name}_{suffix}":
                contents.append((content.view(np.uint8), 0))
                left = next(names)
    return contents


def _empty(
    shape: Sequence[int], dtype: mx.Dtype, init_value: float | None
) -> np.ndarray:
    """An output before the run: bytes that ``unwritten`` can tell, or init_value."""
    if init_value is not None:
        return _storage(_to_numpy(mx.full(shape, init_value, dtype)))[0]
    return np.full(int(np.prod(shape)) * dtype.size, 0xFF, np.uint8)


def unwritten(output: mx.array) -> int:
    """How many elements of an output of ``run_kernel`` still hold their first bytes.

    All bits are 1 before the run: NaN in a float, -1 or the largest value in an
    integer. So an integer kernel that writes just that value needs the counters.
    """
    size = output.dtype.size
    raw = np.asarray(output.view(mx.uint8)).reshape(-1, size)
    return int((raw == 0xFF).all(axis=1).sum())


def _describe(launch: _Launch, source: Source, regions: dict[str, _Shared]) -> str:
    """One line about what went wrong."""
    message = launch.message.decode()
    if launch.signal:
        name = signal.Signals(launch.signal).name
        message = {
            signal.SIGILL: "an index past a local array, or another trap",
            signal.SIGTRAP: "an index past a local array, or another trap",
            signal.SIGFPE: "integer division by zero",
            signal.SIGALRM: f"still running after {launch.seconds} s",
            signal.SIGABRT: "aborted",
        }.get(launch.signal, f"access to address {launch.fault or 0:#x}")
        for buffer, region in regions.items():
            offset = (launch.fault or 0) - region.address
            if launch.signal in (signal.SIGSEGV, signal.SIGBUS) and (
                -_PAGE - region.start < offset < region.total
            ):
                message = f"access {'past the end' if offset > 0 else 'before the'}"
                message += f"{'' if offset > 0 else ' beginning'} of '{buffer}'"
        message += f" ({name})"
    thread = ", ".join(map(str, launch.thread))
    where = f", line {launch.line}: {source.line(launch.line)}" if launch.line else ""
    return f"{message}; thread ({thread}){where}"


def run_source(
    source: Source,
    *,
    inputs: Sequence,
    grid: Sequence[int],
    threadgroup: Sequence[int],
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[mx.Dtype],
    init_value: float | None = None,
    ensure_row_contiguous: bool = True,
    order: str = "ascending",
    seed: int = 0,
    counters: dict[str, Traffic] | None = None,
    timeout: int = 120,
) -> list[mx.array]:
    """``run_kernel`` for a text at hand, such as one that a test has damaged."""
    if order not in ORDERS:
        raise ValueError(f"order {order!r}: one of {', '.join(ORDERS)}")
    library = load(to_cpp(source, counting=counters is not None))
    arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
    contents = _input_buffers(source, arrays, ensure_row_contiguous)
    contents += [
        (_empty(shape, dtype, init_value), 0)
        for shape, dtype in zip(output_shapes, output_dtypes)
    ]
    names = [p.name for p in source.buffers]
    table_bytes = ctypes.sizeof(_Buffer) * len(names)
    control = _Shared(ctypes.sizeof(_Launch) + table_bytes)
    data = {n: _Shared(len(c)) for n, (c, _) in zip(names, contents)}
    touched = {n: _Shared(r.size) for n, r in data.items() if counters is not None}
    try:
        launch = _Launch.from_address(control.address)
        launch.grid[:], launch.group[:] = grid, threadgroup
        launch.order, launch.seed = ORDERS.index(order), seed
        launch.seconds = timeout
        launch.buffers = control.address + ctypes.sizeof(_Launch)
        table = (_Buffer * len(names)).from_address(launch.buffers)
        for entry, name, (content, offset) in zip(table, names, contents):
            data[name].bytes[...] = content
            entry.name = name.encode()
            entry.begin = data[name].address
            entry.first = data[name].address + offset
            entry.end = data[name].address + len(content)
            entry.touched = touched[name].address if touched else None
        if library.msl_run(ctypes.byref(launch)):
            raise KernelFault(_describe(launch, source, data))
        for entry, name in zip(table, names):
            if counters is not None:
                counters[name] = _traffic(entry, touched[name].bytes)
        return [
            _to_mlx(data[name].bytes, shape, dtype)
            for name, shape, dtype in zip(
                names[-len(output_shapes) :], output_shapes, output_dtypes
            )
        ]
    finally:
        for region in (control, *data.values(), *touched.values()):
            region.close()


def _traffic(entry: _Buffer, touched: np.ndarray) -> Traffic:
    read_once, written_once = int((touched & 1).sum()), int((touched >> 1).sum())
    return Traffic(entry.read, entry.written, read_once, written_once, touched.size)


def _to_mlx(raw: np.ndarray, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    bits = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[dtype.size]
    return mx.array(raw.copy().view(bits)).view(dtype).reshape(shape)


def run_kernel(
    kernel: Callable,
    *,
    inputs: Sequence,
    template: Sequence[tuple] = (),
    grid: Sequence[int],
    threadgroup: Sequence[int],
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[mx.Dtype],
    init_value: float | None = None,
    ensure_row_contiguous: bool = True,
    order: str = "ascending",
    seed: int = 0,
    counters: dict[str, Traffic] | None = None,
    timeout: int = 120,
) -> list[mx.array]:
    """Call a ``mx.fast.metal_kernel`` object on the CPU, with checks.

    Args:
        kernel: What ``mx.fast.metal_kernel`` returned.
        inputs: As in a call of the kernel, as are ``template``, ``grid`` (threads),
            ``threadgroup``, ``output_shapes``, ``output_dtypes`` and ``init_value``.
        ensure_row_contiguous: As the kernel was made. With False an input keeps its
            own strides.
        order: How threadgroups, SIMD groups and lanes take their turn:
            ``ascending``, ``descending`` or ``shuffled`` by ``seed``.
        counters: If given, filled with a ``Traffic`` for each buffer by name (a build
            of its own, several times slower).
        timeout: Seconds before the kernel is stopped.

    Returns:
        The outputs. What the kernel did not write is NaN; see ``unwritten``.

    Raises:
        BuildError: If the text does not compile, for example for a wrong address space.
        KernelFault: Out-of-bounds access, divergent barrier or SIMD function, timeout.
    """
    call = {
        "template": list(template),
        "grid": tuple(grid),
        "threadgroup": tuple(threadgroup),
        "output_shapes": output_shapes,
        "output_dtypes": output_dtypes,
        "init_value": init_value,
    }
    source = generated_source(kernel, inputs=inputs, **call)
    del call["template"]
    return run_source(
        source,
        inputs=inputs,
        **call,
        ensure_row_contiguous=ensure_row_contiguous,
        order=order,
        seed=seed,
        counters=counters,
        timeout=timeout,
    )
