"""Opens a checkpoint: its config, the headers of its files, and rows of its tensors.

Everything is decided from the config and the headers, over the whole source at once.
Knows no conversion.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_config

from .checkpoint import MTP_FILE
from .cli import one_line
from .fp8 import DEFAULT_BLOCK, FP8, SCALE_SUFFIXES, Scale, make_scale
from .messages import listing
from .models.family import Family
from .safetensors_check import BAD_JSON, Header, TensorInfo, check_file

Layout = Literal["raw", "mlx"]
# Files of a head beside its model; their names may have lost the prefix.
SIDECARS = (MTP_FILE, "model-mtp.safetensors", "mtp/weights.safetensors")
FLOAT_DTYPES = ("F32", "F16", "BF16")
COPIED_BYTES = 1 << 18  # in one piece, as cp does
# As NumPy has them, and as MLX does.
STORED = {
    "F32": (np.float32, mx.float32),
    "F16": (np.float16, mx.float16),
    "BF16": (np.uint16, mx.bfloat16),
    "U32": (np.uint32, mx.uint32),
    "U8": (np.uint8, mx.uint8),
    "F8_E8M0": (np.uint8, mx.uint8),
    FP8: (np.uint8, mx.uint8),
}
# What mlx-lm makes of FP8 if nothing else is asked for.
FP8_DTYPE = mx.bfloat16
QUANTIZED_CONFIG = ("quantization_config", "compression_config")


@dataclass(frozen=True)
class Source:
    """A checkpoint: its config, its family and where each tensor lies.

    Args:
        path: its directory.
        config: of ``config.json``.
        family: how its model is built.
        headers: those of its files.
        files: where each tensor lies.
        layout: ``"raw"``, as its authors published it, or ``"mlx"``.
        alone: whether it holds nothing but a head.
    """

    path: Path
    config: dict[str, Any]
    family: Family
    headers: dict[Path, Header]
    files: dict[str, Path] = field(repr=False)
    layout: Layout = "raw"
    alone: bool = False

    @property
    def text_config(self) -> dict[str, Any]:
        """The config of the text model, which the flat form has at top level."""
        return self.config.get("text_config", self.config)

    def info(self, key: str) -> TensorInfo:
        return self.headers[self.files[key]].tensors[key]

    def dtype(self, key: str) -> mx.Dtype:
        """A tensor's type once it is read; FP8 is read as bfloat16."""
        name = self.info(key).dtype
        return FP8_DTYPE if name == FP8 else STORED[name][1]

    def scale_key(self, key: str) -> str | None:
        """The tensor with the scales of an FP8 weight."""
        return next((key + s for s in SCALE_SUFFIXES if key + s in self.files), None)

    def read(
        self, key: str, start: int = 0, stop: int | None = None
    ) -> Iterator[memoryview]:
        """A tensor's bytes from ``start`` to ``stop``, piece by piece.

        A piece is good until the next one is asked for.
        """
        info = self.info(key)
        left = (info.nbytes if stop is None else stop) - start
        buffer = memoryview(bytearray(min(left, COPIED_BYTES)))
        with open(self.files[key], "rb", buffering=0) as file:
            file.seek(info.start + start)
            while left > 0:
                size = file.readinto(buffer[: min(left, len(buffer))])
                if not size:
                    raise OSError(f"{self.files[key]} has become shorter")
                yield buffer[:size]
                left -= size

    def rows(self, key: str, start: int, stop: int) -> mx.array:
        """Some rows of a tensor; those of FP8 weights in float32.

        Rows are counted over all axes but the last.

        Shapes:
            result: [stop - start, columns]
        """
        info = self.info(key)
        columns = info.shape[-1]
        numpy_type, mlx_type = STORED[info.dtype]
        size = np.dtype(numpy_type).itemsize * columns
        pieces = self.read(key, start * size, stop * size)
        data = b"".join(map(bytes, pieces))  # a piece does not outlive the next
        values = mx.array(np.frombuffer(data, numpy_type).reshape(-1, columns))
        if info.dtype == FP8:
            return self.scale(key).dequantize(values, start)
        return values.view(mlx_type)

    def scale(self, key: str) -> Scale:
        """The scales of an FP8 weight."""
        name = self.scale_key(key)
        info = self.info(name)
        data = b"".join(map(bytes, self.read(name)))
        values = np.frombuffer(data, STORED[info.dtype][0])
        if info.dtype == "F8_E8M0":
            values = np.where(values < 255, np.exp2(values - 127.0), np.nan)
        elif info.dtype == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        values = values.astype(np.float32).reshape(info.shape)
        return make_scale(name, values, self.info(key).shape, self._block())

    def _block(self) -> tuple[int, int]:
        configs = (self.config, self.text_config)
        stated = (c.get(n) for c in configs for n in QUANTIZED_CONFIG)
        sizes = (s.get("weight_block_size") for s in stated if isinstance(s, dict))
        rows, columns = next(filter(None, sizes), DEFAULT_BLOCK)
        return rows, columns

    def load(self, keys: Iterable[str]) -> dict[str, mx.array]:
        """The tensors of ``keys``, unread until they are used, FP8 in float32."""
        by_file = defaultdict(list)
        for key in keys:
            by_file[self.files[key]].append(key)
        tensors = {}
        for file, names in by_file.items():
            try:
                arrays = mx.load(str(file))
            except RuntimeError as error:
                raise ValueError(f"cannot read {file}: {one_line(error)}") from error
            tensors |= {name: arrays[name] for name in names}
        for key, value in tensors.items():
            if self.info(key).dtype == FP8:
                flat = value.reshape(math.prod(value.shape[:-1]), -1)
                tensors[key] = self.scale(key).dequantize(flat).reshape(value.shape)
        return tensors


def read_config(path: Path) -> dict[str, Any]:
    """A checkpoint's ``config.json``, read as mlx-lm reads it.

    Raises:
        ValueError: if it is missing or not a configuration.
    """
    file = path / "config.json"
    if not file.is_file():
        raise ValueError(f"{path} has no config.json; is it a checkpoint's directory?")
    try:
        config = load_config(path)
    except BAD_JSON as error:
        raise ValueError(f"{file} cannot be read: {one_line(error)}") from error
    text = config.get("text_config", {}) if isinstance(config, dict) else None
    if not isinstance(text, dict):
        raise ValueError(f"{file} does not hold a model's configuration")
    return config


def num_target_layers(config: dict[str, Any]) -> int | None:
    """The target's; later layers are the head's. None where the config does not say."""
    number = config.get("text_config", config).get("num_hidden_layers")
    return number if type(number) is int else None


def find_files(path: Path) -> list[Path]:
    """The checkpoint's weight files, listed in its index or not."""
    # Finder's "._*" companions are no checkpoint files.
    found = {f for f in path.glob("*.safetensors") if f.name[0] != "."}
    return sorted(found | {path / n for n in SIDECARS if (path / n).is_file()})


def read_headers(files: Iterable[Path]) -> tuple[dict[Path, Header], dict[str, Path]]:
    """The files' headers, and where each tensor lies.

    Raises:
        ValueError: for a damaged file, or a tensor that is in two files.
    """
    headers = {file: check_file(file) for file in files}
    where: dict[str, Path] = {}
    for file, header in headers.items():
        if twice := [key for key in header.tensors if key in where]:
            raise ValueError(
                f"{file.name} and {where[twice[0]].name} in {file.parent} both hold "
                f"{listing(twice)}; remove one of the files"
            )
        where |= dict.fromkeys(header.tensors, file)
    return headers, where


def read_weight_map(path: Path) -> dict[str, str]:
    """Tensor -> file, of all indexes of a directory; empty without an index.

    Raises:
        ValueError: for an index that cannot be read, or one that names a file outside
            of the directory.
    """
    named: dict[str, str] = {}
    for index in sorted(path.glob("*.safetensors.index.json")):
        try:
            found = dict(json.loads(index.read_text())["weight_map"])
            outside = [n for n in found.values() if Path(n).name != n]
        except BAD_JSON as error:
            raise ValueError(f"{index} cannot be read: {one_line(error)}") from error
        if outside:
            raise ValueError(f"{index} names files elsewhere: {listing(outside)}")
        named |= found
    return named


def open_files(path: Path) -> tuple[dict[Path, Header], dict[str, Path]]:
    """Headers and tensors of a whole directory.

    Raises:
        ValueError: see above, and for a file that the index names and that is missing.
    """
    files, named = find_files(path), set(read_weight_map(path).values())
    if missing := sorted(n for n in named if not (path / n).is_file()):
        raise ValueError(
            f"{path} lacks {listing(missing)}, named in its "
            "model.safetensors.index.json; download the checkpoint again"
        )
    if not files:
        raise ValueError(f"{path} holds no *.safetensors file")
    return read_headers(files)
