"""Opens a source and tells its layout: as published, or as mlx-lm writes it.

Norms tell nothing themselves; where they are shifted, convolutions are moved. Refuses
what is quantised in a form that the converter does not read.
"""

from dataclasses import replace
from pathlib import Path

from .checkpoint import MARKER
from .fp8 import ACTIVATION_SCALES, FP8, SCALE_SUFFIXES
from .messages import listing
from .models import family_of
from .source import (
    QUANTIZED_CONFIG,
    SIDECARS,
    Layout,
    Source,
    open_files,
    read_config,
)

CONV_WEIGHT = "conv1d.weight"
# Parts of names that only mlx-lm's layout has: stacked experts, split latent layers.
CONVERTED = (".switch_mlp.", ".embed_q.", ".unembed_out.")
QUANTIZATION = "quantization"
ORIGINAL = "convert the model's original Hugging Face repository instead"
PACKED_SUFFIXES = (
    ".qweight",
    ".qzeros",
    ".g_idx",
    ".scales",
    ".weight_packed",
    *(f".weight{suffix}" for suffix in SCALE_SUFFIXES),
)


def open_source(path: Path) -> Source:
    """Read the config and the header of every weight file.

    Raises:
        ValueError: for an unsupported model, a missing or damaged file, a tensor that
            is in two files, tensors of two layouts, or a checkpoint that is quantised
            in a form other than MLX's and FP8.
    """
    config = read_config(path)
    family = family_of(config)
    headers, files = open_files(path)
    source = Source(path, config, family, headers, files)
    source = replace(source, layout=_layout(source))
    refuse_packed(source)
    return source


def _layout(source: Source) -> Layout:
    main = [
        header
        for file, header in source.headers.items()
        if file.relative_to(source.path).as_posix() not in SIDECARS
    ]
    marked = any(h.metadata.get("format") == "mlx" for h in main)
    marked |= any(part in key for key in source.files for part in CONVERTED)
    marked |= is_ours(source) or QUANTIZATION in source.config
    raw, moved = evidence(source)
    if raw and (moved or marked):
        odd = moved or ["MLX format"]
        key = raw[0]
        raise ValueError(
            f"{source.path} mixes raw and converted tensors ({listing(odd)}, but "
            f"{key} {list(source.info(key).shape)}); {ORIGINAL}"
        )
    if source.family.spec.zero_centred_norms and not (raw or moved or marked):
        sign = listing(source.family.raw_names or [CONV_WEIGHT])
        raise ValueError(
            f"{source.path} is not in the original layout (no {sign} in any tensor's "
            f"name), nor in MLX's; {ORIGINAL}"
        )
    return "mlx" if marked or moved else "raw"


def is_ours(source: Source) -> bool:
    """Whether the converter has written it, so that the head's form is known."""
    marker = source.config.get(MARKER)
    return isinstance(marker, dict) and "format" in marker


def evidence(source: Source) -> tuple[list[str], list[str]]:
    """What tells of a layout where norms are shifted: raw tensors, and converted ones.

    Raw convolutions are [C, 1, K], converted ones [C, K, 1]; some families have names
    that only raw files have instead.
    """
    family = source.family
    if not family.spec.zero_centred_norms:
        return [], []
    if family.raw_names:
        return [k for k in source.files if any(n in k for n in family.raw_names)], []
    shapes = {
        key: source.info(key).shape
        for key in source.files
        if key.endswith(CONV_WEIGHT) and not key.startswith(family.vision_prefixes)
    }
    raw = [key for key, s in shapes.items() if len(s) == 3 and s[1] == 1 != s[2]]
    return raw, [f"{key} {list(s)}" for key, s in shapes.items() if key not in raw]


def refuse_packed(source: Source) -> None:
    """Refuse GPTQ, AWQ, compressed-tensors, NVFP4 and the like.

    Raises:
        ValueError: names tensors, or what the config says.
    """
    if source.layout == "mlx":
        return
    fp8 = {key for key in source.files if source.info(key).dtype == FP8}
    fp8 = {key for key in fp8 if not key.endswith((*SCALE_SUFFIXES, "_scale_2"))}
    known = {source.scale_key(key) for key in fp8}
    packed = [
        key
        for key in source.files
        if key.endswith(PACKED_SUFFIXES)
        and key not in known
        and not key.endswith(ACTIVATION_SCALES)
    ]
    configs = (source.config, source.text_config)
    stated = [n for n in QUANTIZED_CONFIG if any(c.get(n) for c in configs)]
    if (source.path / "hf_quant_config.json").exists():
        stated.append("hf_quant_config.json")
    if packed or (stated and not fp8):
        raise ValueError(quantized_line(source.path, listing(packed or stated)))


def quantized_line(path: Path, found: str) -> str:
    return (
        f"{path} is quantised ({found}); convert the original checkpoint, in bfloat16, "
        "float16, float32 or FP8, or make it an MLX directory with mlx_lm.convert "
        "first and add the head with --mtp-from"
    )
