"""Opens a checkpoint as its authors published it.

Everything is decided from the config and the files' headers, over the whole source at
once. Tensors are read lazily. Knows no conversion.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import load_config

from .cli import one_line
from .messages import listing
from .models import family_of
from .models.family import Family
from .safetensors_check import Header, TensorInfo, check_file

CONV_WEIGHT = "conv1d.weight"
# Parts of names that only mlx-lm's layout has: stacked experts, split latent layers.
CONVERTED = (".switch_mlp.", ".embed_q.", ".unembed_out.")
FLOAT_DTYPES = ("F32", "F16", "BF16")
COMPARED_BYTES = 1 << 24
QUANTIZED_SUFFIXES = (
    ".qweight",
    ".scales",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
)
QUANTIZED_CONFIG = ("quantization", "quantization_config", "compression_config")


@dataclass(frozen=True)
class Source:
    """A checkpoint: its config, its family and where each tensor lies."""

    path: Path
    config: dict[str, Any]
    family: Family
    headers: dict[Path, Header]
    files: dict[str, Path]

    @property
    def text_config(self) -> dict[str, Any]:
        """The config of the text model, which the flat form has at top level."""
        return self.config.get("text_config", self.config)

    def info(self, key: str) -> TensorInfo:
        return self.headers[self.files[key]].tensors[key]

    def same_data(self, key: str, other: str) -> bool:
        """Whether two tensors are equal byte for byte; reads them in pieces."""
        a, b = self.info(key), self.info(other)
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        with open(self.files[key], "rb") as one, open(self.files[other], "rb") as two:
            one.seek(a.start)
            two.seek(b.start)
            left = a.nbytes
            while left > 0:
                size = min(left, COMPARED_BYTES)
                if one.read(size) != two.read(size):
                    return False
                left -= size
        return True

    def load(self, keys: Iterable[str]) -> dict[str, mx.array]:
        """The tensors of ``keys``, unread until they are used."""
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
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} cannot be read: {one_line(error)}") from error
    text = config.get("text_config", {}) if isinstance(config, dict) else None
    if not isinstance(text, dict):
        raise ValueError(f"{file} does not hold a model's configuration")
    return config


def num_target_layers(config: dict[str, Any]) -> int | None:
    """The target's; later layers are the head's. None where the config does not say."""
    number = config.get("text_config", config).get("num_hidden_layers")
    return number if type(number) is int else None


def open_source(path: Path) -> Source:
    """Read the config and the header of every ``*.safetensors`` file.

    Raises:
        ValueError: for an unsupported model, a missing or damaged file, a tensor that
            is in two files, or a checkpoint that is already converted or quantised.
    """
    config = read_config(path)
    family = family_of(config)
    # Finder's "._*" companions are no checkpoint files.
    found = sorted(f for f in path.glob("*.safetensors") if f.name[0] != ".")
    _check_index(path)
    if not found:
        raise ValueError(f"{path} holds no *.safetensors file")
    headers = {file: check_file(file) for file in found}
    files: dict[str, Path] = {}
    for file, header in headers.items():
        if twice := [key for key in header.tensors if key in files]:
            raise ValueError(
                f"{file.name} and {files[twice[0]].name} in {path} both hold "
                f"{listing(twice)}; remove one of the files"
            )
        files |= dict.fromkeys(header.tensors, file)
    source = Source(path, config, family, headers, files)
    _refuse_converted(source)
    _refuse_quantized(source)
    return source


def _check_index(path: Path) -> None:
    """Every file that an index names must be there."""
    for index in sorted(path.glob("*.safetensors.index.json")):
        try:
            named = set(json.loads(index.read_text())["weight_map"].values())
            missing = sorted(name for name in named if not (path / name).is_file())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} cannot be read: {one_line(error)}") from error
        if missing:
            raise ValueError(
                f"{path} lacks {listing(missing)}, named in {index.name}; "
                "download the checkpoint again"
            )


def _refuse_converted(source: Source) -> None:
    way_out = "convert the model's original Hugging Face repository instead"
    marked = [
        f.name for f, h in source.headers.items() if h.metadata.get("format") == "mlx"
    ]
    marked += [key for key in source.files if any(part in key for part in CONVERTED)]
    if marked:
        raise ValueError(
            f"{source.path} is already in MLX format ({listing(marked)}); {way_out}"
        )
    if raw_names := source.family.raw_names:
        if not any(part in key for key in source.files for part in raw_names):
            raise ValueError(
                f"{source.path} is not in the original layout (no {listing(raw_names)} "
                f"in any tensor's name); {way_out}"
            )
    elif source.family.spec.zero_centred_norms:
        _require_raw_convolutions(source, way_out)


def _require_raw_convolutions(source: Source, way_out: str) -> None:
    """Raw files hold convolutions as [C, 1, K], converted ones as [C, K, 1].

    Norms tell nothing themselves; where they are shifted, convolutions are moved.
    """
    shapes = {
        key: source.info(key).shape
        for key in source.files
        if key.endswith(CONV_WEIGHT)
        and not key.startswith(source.family.vision_prefixes)
    }
    raw = [key for key, s in shapes.items() if len(s) == 3 and s[1] == 1 != s[2]]
    moved = [f"{key} {list(s)}" for key, s in shapes.items() if key not in raw]
    if raw and moved:
        raise ValueError(
            f"{source.path} mixes raw and converted tensors ({listing(moved)}, but "
            f"{raw[0]} {list(shapes[raw[0]])}); {way_out}"
        )
    if not raw:
        found = listing(moved) or f"no {CONV_WEIGHT}"
        raise ValueError(
            f"{source.path} is not in the original layout ({found}); {way_out}"
        )


def _refuse_quantized(source: Source) -> None:
    packed = [key for key in source.files if key.endswith(QUANTIZED_SUFFIXES)]
    stated = [
        name
        for name in QUANTIZED_CONFIG
        if source.config.get(name) or source.text_config.get(name)
    ]
    if (source.path / "hf_quant_config.json").exists():
        stated.append("hf_quant_config.json")
    if packed or stated:
        raise ValueError(quantized_line(source.path, listing(packed or stated)))


def quantized_line(path: Path, found: str) -> str:
    return (
        f"{path} is quantised ({found}); convert the original checkpoint, in bfloat16, "
        "float16 or float32"
    )
