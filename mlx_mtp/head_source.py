"""Where a checkpoint's head comes from: its own source, or another one (a graft).

A grafted head must belong to its target; what is compared is said. Whether norm weights
are stored as w or as 1 + w is taken from markers and metadata, never from their values.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from .checkpoint import marked_spec, read_marker
from .layout import evidence
from .messages import count, listing
from .models import FAMILIES
from .models.spec import MTPSpec
from .parts import (
    Parts,
    check_promise,
    head_keys,
    resolve_copies,
    sort_tensors,
)
from .source import (
    Source,
    find_files,
    num_target_layers,
    read_config,
    read_headers,
    read_weight_map,
)

Norms = Literal["raw", "shifted"]
NORMS = ("raw", "shifted")
# What mlx-vlm calls the model type of a head in a repository of its own.
DRAFTER = "_mtp"
COMPARED = ("hidden_size", "vocab_size", "num_hidden_layers")


@dataclass(frozen=True)
class HeadSource:
    """A head's tensors and their form.

    Args:
        source: holds them.
        keys: parameter names and their keys.
        spec: the head's data.
        final: whether names and form are those of a converted head.
        shift: whether zero-centred norms are still to be shifted.
        checked: what was compared with the target.
    """

    source: Source
    keys: dict[str, str]
    spec: MTPSpec
    final: bool
    shift: bool
    checked: str = ""


def own_head(
    source: Source, parts: Parts, norms: Norms | None
) -> tuple[HeadSource, list[str]]:
    """The head of the target's own source.

    Args:
        norms: how norms are stored; None to take it from the files.

    Raises:
        ValueError: if there is none, or its norms' form is unknown.
    """
    check_promise(source, parts)
    return _head(source, parts, source, parts.main, norms)


def grafted_head(
    path: Path, base: Source, parts: Parts, norms: Norms | None
) -> tuple[HeadSource, list[str]]:
    """The head of another directory, checked against its target.

    Args:
        path: an original checkpoint (the shards that hold the head are enough), a
            converted one, or a head alone.
        base: holds the target.
        parts: the target's tensors.
        norms: how norms are stored; None to take it from the files.

    Raises:
        ValueError: if there is no head, or it belongs to another model.
    """
    source = _open(path, base)
    checked = _compare(source, base)
    own = sort_tensors(source, head_only=True)
    if not own.head:
        raise ValueError(f"{path} has no MTP head; give the original repository")
    expected = base.family.spec.num_modules
    if not own.final and expected is not None and own.num_modules != expected:
        raise ValueError(
            f"{path} holds {count(own.num_modules, 'MTP module')}; a head of "
            f"{base.family.spec.family} has {expected}"
        )
    head, notes = _head(source, own, base, parts.main, norms)
    return replace(head, checked=checked), notes


def _head(
    source: Source, parts: Parts, base: Source, main: list[str], norms: Norms | None
) -> tuple[HeadSource, list[str]]:
    if parts.final:
        if norms:
            raise ValueError(
                f"mtp_norms {norms!r} has no use: {source.path} says how its are stored"
            )
        spec = marked_spec(source.family.spec, read_marker(source.config))
        keys = {name: key for (_, name), key in parts.head.items()}
        return HeadSource(source, keys, spec, final=True, shift=False), []
    files = {source.files[key] for key in parts.head.values()}
    shift = _stored(source, files, norms) == "raw"
    spec, notes = resolve_copies(source, parts, base, main)
    keys = head_keys(parts)
    return HeadSource(source, keys, spec, final=False, shift=shift), notes


def _stored(source: Source, files: Iterable[Path], norms: Norms | None) -> Norms:
    """How a head's norms are stored: as w for a scale of 1 + w, or as 1 + w."""
    if not source.family.spec.zero_centred_norms:
        return "shifted"
    if norms:
        return norms
    formats = {source.headers[file].metadata.get("format") for file in files}
    raw, _ = evidence(source)
    if formats == {"mlx"}:
        return "shifted"
    if "mlx" not in formats and (raw or formats == {"pt"}):
        return "raw"
    names = listing(sorted(file.name for file in files))
    raise ValueError(
        f"{source.path}: nothing says how the norms of the head ({names}) are stored; "
        "say so: --mtp-norms raw (w for a scale of 1 + w) or --mtp-norms shifted"
    )


def _open(path: Path, base: Source) -> Source:
    """A head's source; of the other shards only the index need be there."""
    config = read_config(path)
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    alone = family is None
    if alone and not str(kind).endswith(DRAFTER):
        raise ValueError(
            f"--mtp-from {path} is of model_type {kind!r}, the target is a "
            f"{base.config['model_type']!r}"
        )
    spec, layers = base.family.spec, num_target_layers(config)
    lacking = {
        name
        for key, name in read_weight_map(path).items()
        if spec.locate(key, layers) and not (path / name).is_file()
    }
    if lacking:
        raise ValueError(
            f"{path} lacks {listing(sorted(lacking))}, where its head lies; "
            "download it again"
        )
    headers, files = read_headers(find_files(path))
    formats = {header.metadata.get("format") for header in headers.values()}
    return Source(
        path,
        config,
        base.family,
        headers,
        files,
        layout="mlx" if "mlx" in formats else "raw",
        alone=alone,
    )


def _compare(source: Source, base: Source) -> str:
    """What was compared; head and target must be of one model.

    Raises:
        ValueError: names the values that differ.
    """
    kinds = tuple(_family(s) for s in (source, base))
    values = {"model_type": kinds} | {
        name: (source.text_config.get(name), base.text_config.get(name))
        for name in COMPARED
    }
    known = {name: pair for name, pair in values.items() if None not in pair}
    odd = [f"{n} {a!r} and {b!r}" for n, (a, b) in known.items() if a != b]
    if odd:
        raise ValueError(
            f"the head of {source.path} and the target {base.path} do not belong "
            f"together: {listing(odd)}"
        )
    return ", ".join(f"{name} {pair[0]}" for name, pair in known.items())


def _family(source: Source) -> str:
    """The family that a source's config names; that of a head alone is inside."""
    inner, outer = (c.get("model_type") for c in (source.text_config, source.config))
    kind = inner if inner in FAMILIES else str(outer).removesuffix(DRAFTER)
    return FAMILIES[kind].spec.family if kind in FAMILIES else kind
