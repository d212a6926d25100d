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
        ends = [_check_entry(name, entry) for name, entry in entries.items()]
        if max(ends, default=0) != data_bytes:
            raise ValueError(
                f"its header promises {max(ends, default=0)} bytes of data, "
                f"it has {data_bytes}"
            )
        tensors = {
            name: TensorInfo(
                entry["dtype"],
                tuple(entry["shape"]),
                data_start + entry["data_offsets"][0],
                entry["data_offsets"][1] - entry["data_offsets"][0],
            )
            for name, entry in entries.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
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
        return json.loads(file.read(length)), 8 + length, size - 8 - length


def _check_entry(name: str, entry: dict) -> int:
    """Where a tensor's data ends, after a check of its size."""
    begin, end = entry["data_offsets"]
    item = ITEM_BYTES.get(entry["dtype"])
    if begin < 0 or end < begin or any(n < 0 for n in entry["shape"]):
        raise ValueError(f"{name} has a negative size")
    if item is not None and end - begin != item * math.prod(entry["shape"]):
        raise ValueError(f"the data of {name} does not have the size of its shape")
    return end
