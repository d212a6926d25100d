"""Writes a module's parameters to safetensors files, a few rows at a time.

The header is made of shapes and types alone; then every tensor is read, changed and
written in pieces, so that the memory in use does not depend on the size of the model.
Rows that do not change are copied as bytes. Knows no model and no checkpoint layout.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import get_total_parameters

from .rows import Rows
from .source import STORED
from .weights import Filled

# Weights in one piece.
PIECE_ELEMENTS = 1 << 23
MAX_FILE_BYTES = 5 << 30  # mlx-lm's
NAMES = {mlx: name for name, (_, mlx) in reversed(STORED.items())}
Report = Callable[[int], object]


@dataclass(frozen=True)
class Group:
    """Parameters that are made together: one, or a packed weight with its scales."""

    arrays: dict[str, mx.array]
    packing: dict[str, int | str] | None = None

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


def write_target(directory: Path, filled: Filled, report: Report) -> None:
    """``model*.safetensors`` and their index, as mlx-lm names them."""
    parameters = get_total_parameters(filled.module)
    shards = _shards(_groups(filled))
    size = sum(group.nbytes for shard in shards for group in shard)
    metadata = {"total_size": size, "total_parameters": parameters}
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= {key: name for group in shard for key in group.arrays}
        _write(directory / name, shard, filled, "", report)
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    text = json.dumps(index, indent=4)
    (directory / "model.safetensors.index.json").write_text(text)


def write_head(file: Path, filled: Filled, prefix: str, report: Report) -> None:
    """All parameters in one file, their names with a prefix."""
    _write(file, _groups(filled), filled, prefix, report)


def total_bytes(filled: Filled) -> int:
    return sum(array.nbytes for _, array in tree_flatten(filled.module.parameters()))


def _groups(filled: Filled) -> list[Group]:
    """The module's parameters; packed weights that are still to be packed together."""
    module = filled.module
    arrays = dict(tree_flatten(module.parameters()))
    packings = {
        f"{path}.weight": {n: getattr(layer, n) for n in ("group_size", "bits", "mode")}
        for path, layer in module.named_modules()
        if f"{path}.weight" in filled.to_pack
    }
    groups = []
    for name in [*arrays]:
        if name not in arrays:
            continue
        stem = name.rpartition(".")[0]
        packing = packings.get(f"{stem}.weight")
        members = [f"{stem}.{kind}" for kind in ("weight", "scales", "biases")]
        if packing is None or name not in members:
            groups.append(Group({name: arrays.pop(name)}))
            continue
        # In the order in which ``mx.quantize`` gives them.
        found = {n: arrays.pop(n) for n in members if n in arrays}
        groups.append(Group(found, packing))
    # What is written can be freed.
    module.update(tree_map(lambda _: mx.array([]), module.parameters()))
    return groups


def _shards(groups: list[Group]) -> list[list[Group]]:
    shards, size = [], 0
    for group in groups:
        if not shards or size + group.nbytes > MAX_FILE_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(group)
        size += group.nbytes
    return shards


def _write(
    file: Path, groups: list[Group], filled: Filled, prefix: str, report: Report
) -> None:
    offsets, header, end = {}, {"__metadata__": {"format": "mlx"}}, 0
    for group in groups:
        for name, array in group.arrays.items():
            offsets[name] = end
            header[prefix + name] = {
                "dtype": NAMES[array.dtype],
                "shape": array.shape,
                "data_offsets": [end, end + array.nbytes],
            }
            end += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligned data, as the format asks for
    start = 8 + len(text)
    with open(file, "wb", buffering=0) as out:
        _put(out, 0, len(text).to_bytes(8, "little") + text)
        out.truncate(start + end)
        for group in groups:
            positions = {n: start + offsets[n] for n in group.arrays}
            ends = {n: start + offsets[n] + a.nbytes for n, a in group.arrays.items()}
            for name, data in _pieces(group, filled):
                _put(out, positions[name], data)
                positions[name] += len(data)
                report(len(data))
            assert positions == ends, "a tensor is not written whole"


def _put(out: BinaryIO, position: int, data: bytes | memoryview) -> None:
    out.seek(position)
    while len(data):
        data = data[out.write(data) :]


def _pieces(group: Group, filled: Filled) -> Iterator[tuple[str, memoryview]]:
    """The bytes of a group's tensors, each one's in order."""
    names = [*group.arrays]
    name = names[0]
    values = filled.to_pack.pop(name) if group.packing else group.arrays[name]
    dtype = values.dtype
    group.arrays.clear()
    if name not in filled.origin:
        for piece, data in zip(names, _packed(values, group), strict=True):
            yield piece, _bytes(data)
        return
    for rows in filled.origin[name].pieces:
        info = filled.source.info(rows.key)
        if group.packing is None and info.dtype == NAMES[dtype]:
            width = info.nbytes // math.prod(info.shape[:-1])
            ends = rows.start * width, rows.stop * width
            for data in filled.source.read(rows.key, *ends):
                yield name, data
            continue
        for part in _split(rows, info.shape[-1]):
            values = filled.source.rows(part.key, part.start, part.stop).astype(dtype)
            for piece, data in zip(names, _packed(values, group), strict=True):
                yield piece, _bytes(data)


def _split(rows: Rows, columns: int) -> Iterator[Rows]:
    step = max(1, PIECE_ELEMENTS // columns)
    for start in range(rows.start, rows.stop, step):
        yield Rows(rows.key, start, min(start + step, rows.stop))


def _packed(values: mx.array, group: Group) -> tuple[mx.array, ...]:
    if group.packing is None:
        return (values,)
    return tuple(mx.quantize(values, **group.packing))


def _bytes(array: mx.array) -> memoryview:
    """An array's bytes in row order."""
    if array.dtype == mx.bfloat16:  # which NumPy does not have
        array = array.view(mx.uint16)
    mx.eval(array)
    return memoryview(np.ascontiguousarray(np.array(array, copy=False))).cast("B")
