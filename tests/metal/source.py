"""The Metal text that MLX generates for one call of a ``mx.fast.metal_kernel`` object.

MLX itself writes it, signature and all, while the call is recorded for export; that
needs no Metal device. Nothing here knows how the text is compiled or run.
"""

import contextlib
import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

_PARAMETER = re.compile(
    r"\s*(?P<const>const\s+)?(?P<space>device|constant)?\s*(?P<type>[\w<>]+)"
    r"\s*(?P<mark>[*&])?\s*(?P<name>\w+)\s*\[\[(?P<attribute>\w+)(\(\d+\))?\]\]\s*"
)
_SIGNATURE = re.compile(r"\[\[kernel\]\] void (\w+)\(\n(.*?)\) \{\n", re.S)
_INSTANCE = re.compile(
    r"\ntemplate \[\[host_name\(.*?\)\]\] \[\[kernel\]\] decltype\(.*?\) (.*?);\s*$",
    re.S,
)


@dataclass(frozen=True)
class Parameter:
    """One parameter of the generated kernel function.

    ``space`` is ``device``, ``constant`` or, for an attribute such as
    ``thread_position_in_grid``, empty. ``mark`` is ``*``, ``&`` or empty.
    """

    name: str
    type: str
    space: str
    const: bool
    mark: str
    attribute: str

    @property
    def is_buffer(self) -> bool:
        return self.attribute == "buffer"


@dataclass(frozen=True)
class Source:
    """A generated kernel: ``text`` as MLX wrote it, ``call`` its instantiated name."""

    name: str
    text: str
    call: str
    parameters: tuple[Parameter, ...]

    @property
    def body(self) -> str:
        """The text without the explicit instantiation at its end."""
        return _INSTANCE.sub("\n", self.text)

    @property
    def buffers(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.parameters if p.is_buffer)

    def line(self, number: int) -> str:
        """One line of the text; lines count from 1."""
        return self.text.splitlines()[number - 1].strip()


@contextlib.contextmanager
def _captured_stdout(into: list[str]) -> Iterator[None]:
    """MLX prints from C++: catch file descriptor 1 itself."""
    libc = ctypes.CDLL(None)
    sys.stdout.flush()
    with tempfile.TemporaryFile() as file:
        saved = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield
        finally:
            libc.fflush(None)
            os.dup2(saved, 1)
            os.close(saved)
        file.seek(0)
        into.append(file.read().decode())


def generated_source(kernel: Callable, *, inputs: Sequence, **call) -> Source:
    """MLX's text for ``kernel(inputs=inputs, **call)``.

    Args:
        kernel: What ``mx.fast.metal_kernel`` returned.
        inputs: Arrays and Python numbers, as in the call.
        call: The call's other keywords.

    Raises:
        ValueError: If MLX rejects the call or writes no complete signature.
    """
    arrays = [x for x in inputs if isinstance(x, mx.array)]

    def record(*traced):
        left = iter(traced)
        mixed = [next(left) if isinstance(x, mx.array) else x for x in inputs]
        return kernel(inputs=mixed, **call, verbose=True)

    printed: list[str] = []
    with _captured_stdout(printed):
        mx.export_function(lambda _: None, record, *arrays)
    return parse(re.search(r"```\n(.*)\n```", printed[0], re.S).group(1))


def parse(text: str) -> Source:
    """Split a generated text; ``text`` may also be one that a test has damaged."""
    signature = _SIGNATURE.search(text)
    parts = signature.group(2).split(",\n")
    matches = [_PARAMETER.fullmatch(part) for part in parts]
    if not all(matches):
        # MLX closes the list too early for two outputs and no attribute.
        raise ValueError(
            "MLX wrote a signature that no compiler takes; use an attribute such as "
            f"thread_position_in_grid in the kernel: {signature.group(2)}"
        )
    parameters = tuple(
        Parameter(
            name=m["name"],
            type=m["type"],
            space=m["space"] or "",
            const=bool(m["const"]),
            mark=m["mark"] or "",
            attribute=m["attribute"],
        )
        for m in matches
    )
    instance = _INSTANCE.search(text)
    name = signature.group(1)
    return Source(name, text, instance.group(1) if instance else name, parameters)
