"""Whether a tensor is a copy of another one, in another type or packed by MLX.

Reads both in pieces and stops at the first difference; only equality counts.
"""

import mlx.core as mx

from .source import Source

PIECE_ELEMENTS = 1 << 23
ROWS_FIRST = 64  # most that is no copy differs here
SCALES_MODES = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}


def is_copy(source: Source, key: str, base: Source, other: str) -> bool:
    """Whether ``other`` is what becomes of ``key`` in a conversion.

    Args:
        source: holds ``key``, a matrix in floating point.
        base: holds ``other``, a matrix in floating point or packed by MLX.
    """
    shape, theirs = source.info(key).shape, base.info(other).shape
    if len(shape) != 2 or len(theirs) != 2 or shape[0] != theirs[0]:
        return False
    rows, columns = shape
    packing = _packing(columns, base, other)
    if packing is None and theirs[1] != columns:
        return False
    start = 0
    while start < rows:
        step = max(1, PIECE_ELEMENTS // columns) if start else ROWS_FIRST
        stop = min(rows, start + step)
        mine = source.rows(key, start, stop)
        if not _same(mine, base, other, packing, start, stop):
            return False
        start = stop
    return True


def _same(
    values: mx.array,
    base: Source,
    other: str,
    packing: dict[str, int | str] | None,
    start: int,
    stop: int,
) -> bool:
    if packing is None:
        theirs = base.rows(other, start, stop)
        return mx.array_equal(values.astype(theirs.dtype), theirs).item()
    stem = other.removesuffix("weight")
    names = [f"{stem}{kind}" for kind in ("weight", "scales", "biases")]
    theirs = [base.rows(n, start, stop) for n in names if n in base.files]
    if theirs[1].dtype != mx.uint8:  # affine scales have the type of the weight
        values = values.astype(theirs[1].dtype)
    ours = mx.quantize(values, **packing)
    return all(mx.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _packing(columns: int, base: Source, key: str) -> dict[str, int | str] | None:
    """How a matrix of so many columns would have been packed into ``key``."""
    scales = f"{key.removesuffix('weight')}scales"
    if base.info(key).dtype != "U32" or scales not in base.files:
        return None
    info = base.info(scales)
    group_size = columns // info.shape[-1]
    bits = base.info(key).shape[-1] * 32 // columns
    mode = "affine"
    if info.dtype == "U8":
        mode = SCALES_MODES.get((bits, group_size), "unknown")
    return {"group_size": group_size, "bits": bits, "mode": mode}
