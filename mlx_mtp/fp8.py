"""FP8 weights and their scales -> float32 values.

A weight of type E4M3 has one scale per block of rows and columns, per row, or one for
the whole. Which it is shows in the shapes. Knows neither files nor models.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

FP8 = "F8_E4M3"
# Behind the weight's name; that of the first kind is also a factor, despite its name.
SCALE_SUFFIXES = ("_scale_inv", "_scale")
# Scales of activations and caches: the weights are whole without them.
ACTIVATION_SCALES = (
    ".input_scale",
    ".output_scale",
    ".activation_scale",
    ".k_scale",
    ".v_scale",
)
DEFAULT_BLOCK = (128, 128)


@dataclass(frozen=True)
class Scale:
    """The scales of one weight.

    Args:
        values: [blocks of rows, blocks of columns], those of all matrices in turn.
        rows: of one matrix.
        columns: of one matrix.
        block: rows and columns that share a scale; the last ones may be cut off.
    """

    values: np.ndarray
    rows: int
    columns: int
    block: tuple[int, int]

    def dequantize(self, packed: mx.array, start: int = 0) -> mx.array:
        """The values of some rows, in float32.

        Args:
            packed: the bytes.
            start: number of the first row, counted over all axes but the last.

        Shapes:
            packed, result: [R, columns]
        """
        row = np.arange(start, start + packed.shape[0])
        blocks = -(-self.rows // self.block[0])
        index = row // self.rows * blocks + row % self.rows // self.block[0]
        scale = mx.repeat(mx.array(self.values[index]), self.block[1], axis=1)
        return mx.from_fp8(packed, dtype=mx.float32) * scale[:, : self.columns]


def make_scale(
    name: str, values: np.ndarray, shape: tuple[int, ...], block: tuple[int, int]
) -> Scale:
    """The scales of a weight of ``shape``.

    Args:
        name: the scale's, for the error.
        values: float32; infinite and NaN ones are refused.
        block: the block's size where there are several blocks.

    Raises:
        ValueError: for values that are no numbers, or a shape that fits no weight of
            that shape.
    """
    if not np.isfinite(values).all():
        raise ValueError(f"{name} holds NaN or infinite scales; download it again")
    *outer, rows, columns = (1, *shape)[-max(2, len(shape)) :]
    matrices = int(np.prod(outer))
    blocks = [-(-n // b) for n, b in zip((rows, columns), block, strict=True)]
    if values.size in (1, matrices) and values.shape[-2:] in ((), (1,), (1, 1)):
        flat, block = values.reshape(-1, 1), (rows, columns)
        flat = np.broadcast_to(flat, (matrices, 1))
    elif values.shape == (matrices,) and outer:
        flat, block = values.reshape(-1, 1), (rows, columns)
    elif values.shape == (*outer, *blocks):
        flat = values.reshape(-1, blocks[1])
    elif values.shape in ((*outer, rows), (*outer, rows, 1)):
        flat, block = values.reshape(-1, 1), (1, columns)
    else:
        raise ValueError(
            f"{name} {list(values.shape)} does not fit a weight {list(shape)} in "
            f"blocks of {block[0]} x {block[1]}; convert an unquantised checkpoint"
        )
    return Scale(np.ascontiguousarray(flat), rows, columns, tuple(block))
