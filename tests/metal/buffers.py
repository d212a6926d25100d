"""A kernel's buffers: shared memory between guard pages, filled as MLX would."""

import ctypes
import functools
import mmap
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from .source import Source

PAGE = mmap.PAGESIZE
_ALIGN = 16  # of a buffer's first byte; what the widest vector load needs


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


class SharedMemory:
    """Memory that the child process shares, between two pages that nobody may touch."""

    def __init__(self, size: int):
        self.size = size
        self.start = -(-size // PAGE) * PAGE - -(-size // _ALIGN) * _ALIGN + PAGE
        self.total = -(-size // PAGE) * PAGE + 2 * PAGE
        access = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
        self.base = _libc().mmap(None, self.total, access, flags, -1, 0)
        if self.base == ctypes.c_void_p(-1).value:
            raise MemoryError(f"no {self.total} bytes for a kernel's buffer")
        for guard in (self.base, self.base + self.total - PAGE):
            _libc().mprotect(guard, PAGE, 0)

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


def input_buffers(
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


def empty(
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


def to_mlx(raw: np.ndarray, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    bits = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[dtype.size]
    return mx.array(raw.copy().view(bits)).view(dtype).reshape(shape)
