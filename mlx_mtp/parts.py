"""Sorts a source's tensors: what is the target's, what the head's, what is dropped.

Decided from the config and the tensors' names, types and data; the config alone is
never believed. Reads no tensor but to compare copies.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

from .checkpoint import MTP_FILE, MTP_PREFIX
from .copies import is_copy
from .fp8 import ACTIVATION_SCALES, FP8
from .layout import is_ours, quantized_line
from .messages import count, listing
from .models.heads import PREFIX
from .models.spec import MTPSpec
from .source import FLOAT_DTYPES, SIDECARS, Source, num_target_layers

# Tensors of heads of another kind, which draft whole blocks.
DSPARK = ("main_proj", "markov_head", "confidence_head")
TIE = "tie_word_embeddings"
# What a head may have of its own, and the names of the tensors.
HEAD_LAYERS = {"embedding": "embed_tokens.weight", "output": "lm_head.weight"}


@dataclass
class Parts:
    """A source's tensors by purpose.

    Args:
        main: the target's.
        head: module and parameter name -> key.
        final: whether the head's have the names and the form of a converted head.
        vision: those of the vision tower.
        unused: those that mlx-lm's model does not have.
        activations: scales for activations in FP8.
    """

    main: list[str] = field(default_factory=list)
    head: dict[tuple[int, str], str] = field(default_factory=dict)
    final: bool = False
    vision: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    activations: list[str] = field(default_factory=list)

    @property
    def num_modules(self) -> int:
        """Modules of the head."""
        return len({module for module, _ in self.head})


def sort_tensors(source: Source, head_only: bool = False) -> Parts:
    """Sort every tensor into target, head and vision tower.

    Args:
        head_only: whether the target's tensors do not matter, and are left out.

    Raises:
        ValueError: for a draft head under an unknown prefix or under two of them, and
            for tensors of a type that cannot be read.
    """
    family, unknown = source.family, []
    parts = Parts(final=is_ours(source))
    scales = {source.scale_key(key) for key in fp8_weights(source)}
    for key in source.files:
        if place := locate(source, key):
            other = parts.head.setdefault(place, key)
            if other != key:
                raise ValueError(f"{key} and {other} are the same tensor of the head")
        elif key in scales:
            continue
        elif key.startswith(family.vision_prefixes):
            parts.vision.append(key)
        elif key.endswith(ACTIVATION_SCALES):
            parts.activations.append(key)
        elif any(part in key for part in family.unused):
            parts.unused.append(key)
        elif "mtp" in key.split("."):
            unknown.append(key)
        else:
            parts.main.append(key)
    if odd := [k for k in (*parts.head.values(), *unknown) if _of_dspark(k)]:
        raise ValueError(
            f"{source.path} has a DSpark head ({listing(odd)}), which drafts in a way "
            "of its own and is not supported; use mlx_lm.convert to do without"
        )
    if unknown:
        raise ValueError(
            f"MTP tensors under an unknown prefix: {listing(unknown)}; "
            f"known prefixes are {', '.join(family.spec.prefixes)}"
        )
    if head_only:
        parts.main.clear()
    _check_types(source, [*parts.main, *parts.head.values()])
    return parts


def fp8_weights(source: Source) -> list[str]:
    return [k for k in source.files if source.info(k).dtype == FP8]


def locate(source: Source, key: str) -> tuple[int, str] | None:
    """Module and parameter name of a tensor of the head; None for others.

    The head of a directory of ours lies in one file, under its parameters' names. In a
    sidecar the prefix may be missing.
    """
    spec, num_layers = source.family.spec, num_target_layers(source.config)
    file = source.files[key]
    if is_ours(source):
        ours = file.name == MTP_FILE and key.startswith(MTP_PREFIX)
        return (0, key.removeprefix(MTP_PREFIX)) if ours else None
    if key.endswith(ACTIVATION_SCALES) or _is_scale(source, key):
        return None
    place = spec.locate(key, num_layers)
    if place is None and (source.alone or is_sidecar(source.path, file)):
        place = spec.locate(head_prefix(spec, num_layers) + key, num_layers)
    return place


def _is_scale(source: Source, key: str) -> bool:
    stem = key.removesuffix("_inv").removesuffix("_scale")
    known = stem != key and stem in source.files
    return known and source.info(stem).dtype == FP8


def is_sidecar(path: Path, file: Path) -> bool:
    return file.relative_to(path).as_posix() in SIDECARS


def head_prefix(spec: MTPSpec, num_layers: int | None) -> str:
    """What a head's names begin with in a family's original files."""
    return spec.prefixes[-1].format(layer=num_layers or 0, module=0)


def _check_types(source: Source, keys: list[str]) -> None:
    """Floating point, FP8 with scales, or packed by MLX."""
    odd = []
    fp8 = [key for key in keys if source.info(key).dtype == FP8]
    if bare := [key for key in fp8 if source.scale_key(key) is None]:
        raise ValueError(f"{source.path} lacks the FP8 scales of {listing(bare)}")
    for key in keys:
        stem, _, kind = key.rpartition(".")
        packed = source.layout == "mlx" and f"{stem}.scales" in source.files
        known = (*FLOAT_DTYPES, FP8)
        if packed and kind in ("weight", "scales"):
            known = (*known, "U32", "U8")
        if source.info(key).dtype not in known:
            odd.append(f"{key} ({source.info(key).dtype})")
    if odd:
        raise ValueError(quantized_line(source.path, listing(odd)))


def _of_dspark(key: str) -> bool:
    return any(part in DSPARK for part in key.split("."))


def check_promise(source: Source, parts: Parts) -> None:
    """Config and tensors must both have the head, with the same number of modules."""
    spec, found = source.family.spec, parts.num_modules
    configs = (source.text_config, source.config)
    stated = {k: c[k] for k in spec.count_keys for c in configs if c.get(k)}
    promise = ", ".join(f"{key} {number}" for key, number in stated.items())
    if promise and not found:
        raise ValueError(
            f"the config of {source.path} has {promise}, but there is no MTP tensor; "
            "use the original repository, or add its head with --mtp-from ORIGINAL"
        )
    if not found and source.family.separate:
        raise ValueError(
            f"{source.path} has no MTP head: {source.family.separate} drafts for it; "
            "use mlx_lm.convert, and give the drafter as --draft-model to generate.py"
        )
    if not found:
        raise ValueError(
            f"{source.path} has no MTP head; add one with --mtp-from ORIGINAL, or use "
            "mlx_lm.convert for plain checkpoints"
        )
    if parts.final:
        return
    there = sorted({module for module, _ in parts.head})
    if there != list(range(found)):
        missing = min(set(range(there[-1])) - set(there))
        raise ValueError(
            f"{source.path} lacks module {missing} of the MTP head, while there is "
            f"module {there[-1]}; download the checkpoint again"
        )
    if spec.num_modules is not None and found != spec.num_modules:
        raise ValueError(
            f"{source.path} holds {count(found, 'MTP module')}; a head of "
            f"{spec.family} has {spec.num_modules}"
        )
    if any(number != found for number in stated.values()):
        raise ValueError(
            f"the config of {source.path} has {promise}, but its tensors are those of "
            f"{count(found, 'MTP module')}; download the checkpoint again"
        )


def head_keys(parts: Parts) -> dict[str, str]:
    """The head's parameter names and their keys."""
    several = parts.num_modules > 1
    return {
        PREFIX.format(module) * several + name: key
        for (module, name), key in parts.head.items()
    }


def dropped_notes(parts: Parts) -> list[str]:
    """What is left out, and why."""
    groups = (
        (parts.vision, "vision tensor", "the model reads text only"),
        (parts.unused, "tensor", "mlx-lm's model does not use them"),
        (parts.activations, "activation scale", "only weights are stored in FP8"),
    )
    return [
        f"dropped {count(len(keys), noun)}, {reason}: {listing(keys)}"
        for keys, noun, reason in groups
        if keys
    ]


def resolve_copies(
    source: Source, parts: Parts, base: Source, main: list[str]
) -> tuple[MTPSpec, list[str]]:
    """Which layers are the head's own; copies of the target's are dropped.

    Args:
        source: holds the head.
        parts: of the source.
        base: holds the target, whose tensors are ``main``.
    """
    changes, notes = {"num_modules": parts.num_modules}, []
    for layer, name in HEAD_LAYERS.items():
        keys = {place: key for place, key in parts.head.items() if place[1] == name}
        if not keys:
            continue
        mains = [k for k in main if f".{k}".endswith(f".{name}")]
        mains = mains or [k for k in main if k.endswith("embed_tokens.weight")]
        if mains and all(is_copy(source, k, base, mains[0]) for k in keys.values()):
            for place in keys:
                del parts.head[place]
            copies = listing(keys.values())
            notes.append(f"dropped {copies}, the same as {mains[0]}")
        else:
            changes[layer] = "own"
    return replace(source.family.spec, **changes), notes


def resolve_tie(source: Source, parts: Parts) -> tuple[bool, list[str]]:
    """Whether the output layer is the embedding; a copy of it is dropped."""
    outputs = [k for k in parts.main if f".{k}".endswith(".lm_head.weight")]
    configs = (source.text_config, source.config)
    stated = {bool(c[TIE]) for c in configs if c.get(TIE) is not None}
    notes = []
    if len(stated) == 2:
        tied = not outputs
        notes.append(
            f"{TIE} is both true and false in config.json; taken as {tied}, because "
            f"lm_head.weight is {'present' if outputs else 'absent'}"
        )
    else:
        tied = stated == {True}
    if not tied and not outputs:
        raise ValueError(
            f"{source.path} has no lm_head.weight and no {TIE}: true in its config; "
            "download the checkpoint again"
        )
    if tied and outputs:
        stems = tuple(k.removesuffix("weight") for k in outputs)
        parts.main[:] = [k for k in parts.main if not k.startswith(stems)]
        notes.append(f"dropped {listing(outputs)}, the output layer is the embedding")
    return tied, notes
