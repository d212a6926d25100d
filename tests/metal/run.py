"""Run a kernel's Metal text on the CPU: buffers, launch, faults, counters."""

import ctypes
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from .buffers import PAGE, SharedMemory, empty, input_buffers, to_mlx
from .build import load
from .rewrite import to_cpp
from .source import Source, generated_source

ORDERS = ("ascending", "descending", "shuffled")


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


def _describe(launch: _Launch, source: Source, regions: dict[str, SharedMemory]) -> str:
    """One line about what went wrong."""
    message = launch.message.decode()
    if launch.signal:
        name = signal.Signals(launch.signal).name
        trap = "an index past a local array, or an integer division by zero"
        message = {
            signal.SIGILL: trap,
            signal.SIGTRAP: trap,
            signal.SIGALRM: f"still running after {launch.seconds} s",
            signal.SIGABRT: "aborted",
        }.get(launch.signal, f"access to address {launch.fault or 0:#x}")
        for buffer, region in regions.items():
            offset = (launch.fault or 0) - region.address
            if launch.signal in (signal.SIGSEGV, signal.SIGBUS) and (
                -PAGE - region.start < offset < region.total
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
    contents = input_buffers(source, arrays, ensure_row_contiguous)
    contents += [
        (empty(shape, dtype, init_value), 0)
        for shape, dtype in zip(output_shapes, output_dtypes)
    ]
    names = [p.name for p in source.buffers]
    table_bytes = ctypes.sizeof(_Buffer) * len(names)
    control = SharedMemory(ctypes.sizeof(_Launch) + table_bytes)
    data = {n: SharedMemory(len(c)) for n, (c, _) in zip(names, contents)}
    touched = {n: SharedMemory(r.size) for n, r in data.items() if counters is not None}
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
            to_mlx(data[name].bytes, shape, dtype)
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
