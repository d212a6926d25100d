"""Checks a safetensors file by its header; the data is not read.

Knows the file format (https://github.com/huggingface/safetensors#format), not what the
tensors are for. mlx maps a truncated file without complaint and fails, or reads zeros,
when the tensor is used.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

# The format's own bound.
MAX_HEADER_BYTES = 100_000_000
# What reading a file of another kind can end in.
BAD_JSON = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
LFS_POINTER = b"version "
ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}


@dataclass(frozen=True)
class TensorInfo:
    """What the header says of one tensor.

    Args:
        dtype: in the format's names (BF16).
        shape: its dimensions.
        start: where its data begins in the file.
        nbytes: their number.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    metadata: dict[str, str]
    tensors: dict[str, TensorInfo]


def check_file(path: str | Path) -> Header:
    """Read the header of a file and compare it with the file's size.

    Returns:
        The metadata and the tensors' types and shapes.

    Raises:
        ValueError: when the file is truncated, corrupt or no safetensors file.
        OSError: when it cannot be opened.
    """
    try:
        entries, data_start, data_bytes = _read_header(Path(path))
        metadata = dict(entries.pop("__metadata__", None) or {})  # mlx writes null
        spans = sorted((*_span(name, entry), name) for name, entry in entries.items())
        ends = [0, *(end for _, end, _ in spans)]
        if ends[-1] != data_bytes:
            raise ValueError(
                f"its header promises {ends[-1]} bytes of data, it has {data_bytes}"
            )
        for end, (begin, _, name) in zip(ends, spans, strict=False):
            if begin != end:  # the format allows neither overlaps nor holes
                raise ValueError(f"the data of {name} does not follow that before it")
        tensors = {
            name: TensorInfo(
                entry["dtype"],
                tuple(entry["shape"]),
                data_start + entry["data_offsets"][0],
                entry["data_offsets"][1] - entry["data_offsets"][0],
            )
            for name, entry in entries.items()
        }
    except BAD_JSON as error:
        reason = error if type(error) is ValueError else "its header cannot be read"
        raise ValueError(
            f"{path} is truncated or corrupt ({reason}); download or copy it again"
        ) from error
    return Header(metadata, tensors)


def _read_header(path: Path) -> tuple[dict, int, int]:
    """The header's JSON, where it ends, and how many bytes follow it."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        start = file.read(8)
        if start == LFS_POINTER:
            raise ValueError("a Git LFS pointer instead of the file itself")
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError("its header is not complete")
        header = json.loads(file.read(length), object_pairs_hook=_unique)
        return header, 8 + length, size - 8 - length


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a name stands twice in its header")
    return entries


def _span(name: str, entry: dict) -> tuple[int, int]:
    """Where a tensor's data begins and ends, after a check of its size."""
    begin, end = entry["data_offsets"]
    if any(type(n) is not int for n in (begin, end, *entry["shape"])):
        raise ValueError(f"{name} has a size that is no number")
    item = ITEM_BYTES.get(entry["dtype"])
    if begin < 0 or end < begin or any(n < 0 for n in entry["shape"]):
        raise ValueError(f"{name} has a negative size")
    if item is not None and end - begin != item * math.prod(entry["shape"]):
        raise ValueError(f"the data of {name} does not have the size of its shape")
    return begin, end
