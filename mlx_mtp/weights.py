"""Fits the tensors of a source into the target and the head.

mlx-lm's ``sanitize`` names the target's tensors, shifts its norms and moves its
convolutions; the head's norms are shifted here. Both additions happen in float32. What
is merely moved row by row is not read here: the module gets a stand-in of the same
shape and type, and its rows' origin is kept for the writer.
"""

import contextlib
import copy
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import infer_quant_config

from .cli import one_line
from .head_source import HeadSource
from .layout import QUANTIZATION
from .messages import listing
from .models.head import MTPHead
from .models.spec import MTPSpec
from .rows import Traced, Transform, trace
from .source import Source

NEAR_ZERO = 0.25
EXPERTS = re.compile(r"\.experts\.")
Weights = dict[str, mx.array]


@dataclass(frozen=True)
class Filled:
    """A module with its weights, or with stand-ins for them.

    Args:
        module: its arrays are unread, and those that have an origin never are.
        source: where the rows lie.
        origin: parameter name -> its rows in the source.
        to_pack: parameter name -> the weight of a layer that has been quantised.
    """

    module: nn.Module
    source: Source
    origin: dict[str, Traced]
    to_pack: Weights = field(default_factory=dict)


def load_target(
    source: Source, keys: list[str], config: dict[str, Any], dtype: mx.Dtype | None
) -> Filled:
    """The target with its weights.

    Args:
        keys: the source's tensors of the target.
        config: the config to build it from.
        dtype: type of the weights; None keeps each tensor's own.

    Raises:
        ValueError: unless every key fills a parameter, and every parameter is filled.
    """
    model, owner = _build(source, config), f"{source.path}"
    sanitize = getattr(model, "sanitize", dict)

    def transform(weights: Weights) -> Weights:
        return sanitize(source.family.target_weights(weights))

    groups = defaultdict(list)
    for key in keys:
        # The experts of a layer are one group: they are stacked.
        groups[EXPERTS.split(key)[0]].append(key)
    with _complete(owner):
        names, traced = _trace(source, transform, groups.values())
        weights, own, origin = _weights(source, keys, transform, names, traced)
    used = set().union(*names.values())
    if lost := [key for key in keys if key not in used]:
        raise ValueError(f"mlx-lm does not know {listing(lost)} of {source.path}")
    _quantize_as_stored(model, weights, config.get(QUANTIZATION) or {})
    _check_shapes(model, weights, owner)
    return _filled(model, source, _cast(model, weights, own, dtype), origin)


def load_head(
    head_source: HeadSource,
    model: nn.Module,
    config: dict[str, Any],
    dtype: mx.Dtype | None,
) -> Filled:
    """The MTP head with its weights.

    Args:
        head_source: where the head lies.
        model: the target the head belongs to.
        config: the target's.
        dtype: type of the weights; None keeps each tensor's own.

    Raises:
        ValueError: for missing or unknown tensors, or a wrong shape.
    """
    source, spec = head_source.source, head_source.spec
    owner = f"the MTP head of {source.path}"
    head: MTPHead = source.family.head(model, config, spec)
    names_of = {key: name for name, key in head_source.keys.items()}

    def transform(weights: Weights) -> Weights:
        named = {names_of[key]: value for key, value in weights.items()}
        if head_source.final:
            return named
        return source.family.weights_by_module(named, model)

    keys = [*names_of]
    with _complete(owner):
        # Its tensors are made of one another in ways that no name tells.
        names, traced = _trace(source, transform, [keys])
        weights, own, origin = _weights(source, keys, transform, names, traced)
    _quantize_as_stored(head, weights, {})
    _check_shapes(head, weights, owner)
    shifted = {
        name: value.astype(mx.float32) + 1
        if head_source.shift and _centred(name, spec)
        else value
        for name, value in weights.items()
    }
    return _filled(head, source, _cast(model, shifted, own, dtype), origin)


def _trace(
    source: Source, transform: Transform, groups: Any
) -> tuple[dict[str, set[str]], dict[str, Traced]]:
    """The keys from which each parameter is made, and the rows where rows tell."""
    names: dict[str, set[str]] = {}
    traced: dict[str, Traced] = {}
    for group in groups:
        outputs, found = trace(transform, {k: source.info(k).shape for k in group})
        for name in outputs:
            if name in names:
                both = listing([*group, *names[name]])
                raise ValueError(f"{both} are the same tensor ({name})")
            names[name] = set(group)
        traced |= found
    return names, traced


def _weights(
    source: Source,
    keys: list[str],
    transform: Transform,
    names: dict[str, set[str]],
    traced: dict[str, Traced],
) -> tuple[Weights, dict[str, mx.Dtype], dict[str, Traced]]:
    """All parameters: values (stand-ins where the rows' origin is known), types, rows.

    Vectors are widened, so that sanitize adds to norms in float32.
    """
    stand_ins = {k: mx.zeros(source.info(k).shape, source.dtype(k)) for k in keys}
    weights = transform(dict(stand_ins))
    origin = {
        name: rows
        for name, rows in traced.items()
        if name in weights
        and rows.shape == weights[name].shape[:-1]
        and source.info(rows.pieces[0].key).shape[-1] == weights[name].shape[-1]
    }
    read = set().union(*(names.get(n, ()) for n in weights.keys() - origin.keys()))
    loaded = {
        key: value.astype(mx.float32) if value.ndim == 1 else value
        for key, value in source.load(sorted(read)).items()
    }
    own = {name: value.dtype for name, value in weights.items()}
    final = transform(stand_ins | loaded)
    # Not the row-wise ones of these: they would keep what they are made of in memory.
    return final | {name: weights[name] for name in origin}, own, origin


def _quantize_as_stored(
    module: nn.Module, weights: Weights, stated: dict[str, Any]
) -> None:
    """Give a module the packed layers that its weights have, as mlx-lm's loader does.

    Args:
        stated: the config's ``quantization``, which may name single layers.
    """

    def choose(path: str, layer: nn.Module) -> bool | dict[str, Any]:
        if f"{path}.scales" not in weights or not hasattr(layer, "to_quantized"):
            return False
        if isinstance(stated.get(path), dict):
            return stated[path]
        choice = infer_quant_config(path, layer, weights)
        if f"{path}.global_scale" in weights:
            choice["global_scale"] = True
        return choice

    if any(name.endswith(".scales") for name in weights):
        nn.quantize(module, class_predicate=choose)


@contextlib.contextmanager
def _complete(owner: str) -> Iterator[None]:
    """mlx-lm's ``sanitize`` meets a gap among the experts with a KeyError."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{owner} lacks the tensor {error.args[0]}") from error


def _cast(
    model: nn.Module, weights: Weights, own: dict[str, mx.Dtype], dtype: mx.Dtype | None
) -> Weights:
    """In the given type or else in their own; some stay as they are, as in mlx-lm."""
    casts: Callable[[str], bool] = getattr(model, "cast_predicate", lambda name: True)

    def wanted(name: str) -> mx.Dtype:
        floats = mx.issubdtype(own[name], mx.floating)
        return dtype if dtype and floats and casts(name) else own[name]

    return {name: value.astype(wanted(name)) for name, value in weights.items()}


def _build(source: Source, config: dict[str, Any]) -> nn.Module:
    try:
        # Building changes the rope parameters inside the config it is given.
        return source.family.build_model(copy.deepcopy(config))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
        raise ValueError(
            f"{source.path / 'config.json'} does not describe a "
            f"{source.family.spec.family} model: {one_line(e)}"
        ) from e


def _check_shapes(module: nn.Module, weights: Weights, owner: str) -> None:
    expected = {name: v.shape for name, v in tree_flatten(module.parameters())}
    if missing := sorted(expected.keys() - weights.keys()):
        raise ValueError(f"{owner} lacks the tensors {listing(missing)}")
    if unknown := sorted(weights.keys() - expected.keys()):
        raise ValueError(f"{owner} has unexpected tensors: {listing(unknown)}")
    wrong = [
        f"{name} {list(weights[name].shape)} instead of {list(shape)}"
        for name, shape in expected.items()
        if weights[name].shape != shape
    ]
    if wrong:
        raise ValueError(f"{owner} has tensors of a wrong shape: {listing(wrong)}")


def _centred(name: str, spec: MTPSpec) -> bool:
    return f".{name}".endswith(
        tuple(f".{suffix}" for suffix in spec.zero_centred_norms)
    )


def unshifted_note(head: Filled) -> list[str]:
    """A warning if a head's layer has norms near 0, where scales are near 1.

    A hint, no proof: it does not decide how a norm is stored.
    """
    values = dict(tree_flatten(head.module.parameters()))
    means = {
        name: value.astype(mx.float32).mean().item()
        for name, value in values.items()
        if "layers." in name and _centred(name, head.module.spec)
    }
    odd = [f"{name} {mean:.2f}" for name, mean in means.items() if mean < NEAR_ZERO]
    if not odd:
        return []
    return [
        f"norms of the MTP head are near 0 on average ({listing(odd)}); if hardly a "
        "draft is accepted, they are stored as w for a scale of 1 + w: convert again "
        "with --mtp-norms raw"
    ]


def _filled(
    module: nn.Module, source: Source, weights: Weights, origin: dict[str, Traced]
) -> Filled:
    module.load_weights(list(weights.items()), strict=True)
    return Filled(module, source, origin)
