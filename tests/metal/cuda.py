"""The same Metal text for NVIDIA GPUs: compiled by nvcc, run where there is a GPU.

A second opinion on a kernel from real hardware with 32 lanes that run at once. It does
not check bounds, and says nothing of Apple's GPUs.
"""

import ctypes
import functools
import shutil
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

from .buffers import empty, input_buffers, to_mlx
from .build import compile_file
from .rewrite import to_cuda
from .source import Source

NO_NVCC = "no nvcc: install the CUDA toolkit to compile Metal text for NVIDIA GPUs"


def nvcc() -> str | None:
    return shutil.which("nvcc")


def compile_cuda(source: Source, *, host: bool = True, arch: str = "sm_90") -> Path:
    """Compile to a shared library, or without ``host`` to device code alone (quicker).

    Raises:
        BuildError: If nvcc rejects the text.
        RuntimeError: If there is no nvcc.
    """
    if (compiler := nvcc()) is None:
        raise RuntimeError(NO_NVCC)
    command = [compiler, "-std=c++17", f"-arch={arch}", "-fmad=false", "-w"]
    command += ["-shared", "-Xcompiler", "-fPIC"] if host else ["-cubin"]
    return compile_file(command, to_cuda(source), ".cu", ".so" if host else ".cubin")


@functools.cache
def gpus() -> int:
    """NVIDIA GPUs that the driver offers; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    number = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(number)):
        return 0
    return number.value


def run_cuda(
    source: Source,
    *,
    inputs: Sequence,
    grid: Sequence[int],
    threadgroup: Sequence[int],
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[mx.Dtype],
    init_value: float | None = None,
) -> list[mx.array]:
    """``run_source`` on a GPU.

    Raises:
        ValueError: If the grid does not consist of whole threadgroups.
        RuntimeError: With CUDA's message if the launch fails.
    """
    if any(g % t for g, t in zip(grid, threadgroup)):
        raise ValueError(f"grid {grid} is no multiple of threadgroup {threadgroup}")
    library = ctypes.CDLL(str(compile_cuda(source)))
    arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
    data = [content for content, _ in input_buffers(source, arrays, True)]
    outputs = [empty(s, d, init_value) for s, d in zip(output_shapes, output_dtypes)]
    data += outputs
    message = ctypes.create_string_buffer(256)
    failed = library.msl_run_cuda(
        (ctypes.c_void_p * len(data))(*(x.ctypes.data for x in data)),
        (ctypes.c_size_t * len(data))(*(x.nbytes for x in data)),
        len(data),
        (ctypes.c_uint32 * 3)(*(g // t for g, t in zip(grid, threadgroup))),
        (ctypes.c_uint32 * 3)(*threadgroup),
        message,
        len(message),
    )
    if failed:
        raise RuntimeError(f"CUDA: {message.value.decode()}")
    return [to_mlx(x, s, d) for x, s, d in zip(outputs, output_shapes, output_dtypes)]
