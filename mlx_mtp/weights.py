"""Loads the tensors of a source into the target and the head, in their final form.

mlx-lm's ``sanitize`` names the target's tensors, shifts its norms and moves its
convolutions; the head's norms are shifted here. Both additions happen in float32.
"""

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .cli import one_line
from .messages import listing
from .models.spec import MTPSpec
from .source import Source


def load_target(
    source: Source, keys: list[str], config: dict[str, Any], dtype: mx.Dtype | None
) -> nn.Module:
    """The target with its weights, unread until they are used.

    Args:
        keys: the source's tensors of the target.
        config: the config to build it from.
        dtype: type of the weights; None keeps each tensor's own.

    Raises:
        ValueError: unless every key fills a parameter, and every parameter is filled.
    """
    model = _build(source, config)
    raw = source.load(keys)
    names = _name_keys(model, raw)
    dtypes = {names[key]: value.dtype for key, value in raw.items()}
    # Norms are vectors: widened, so that sanitize adds in float32.
    weights = model.sanitize(
        {k: v.astype(mx.float32) if v.ndim == 1 else v for k, v in raw.items()}
    )
    if lost := [key for key, name in names.items() if name not in weights]:
        raise ValueError(f"mlx-lm does not know {listing(lost)} of {source.path}")
    _check_shapes(model, weights, f"{source.path}")
    casts = getattr(model, "cast_predicate", lambda name: True)
    return _fill(
        model,
        {
            name: value.astype(dtype if dtype and casts(name) else dtypes[name])
            for name, value in weights.items()
        },
    )


def load_head(
    source: Source, keys: dict[str, str], model: nn.Module, dtype: mx.Dtype | None
) -> nn.Module:
    """The MTP head with its weights, unread until they are used.

    Args:
        keys: the head's parameter names and their keys in the source.
        model: the target the head belongs to.
        dtype: type of the weights; None keeps each tensor's own.

    Raises:
        ValueError: for missing or unknown tensors, or a wrong shape.
    """
    family = source.family
    head = family.MTPHead(family.head_args(model))
    raw = source.load(keys.values())
    weights = {name: raw[key] for name, key in keys.items()}
    _check_shapes(head, weights, f"the MTP head of {source.path}")
    for name, value in weights.items():
        shifted = value.astype(mx.float32) + 1 if _centred(name, family.SPEC) else value
        weights[name] = shifted.astype(dtype or value.dtype)
    return _fill(head, weights)


def _build(source: Source, config: dict[str, Any]) -> nn.Module:
    try:
        # Building changes the rope parameters inside the config it is given.
        return source.family.build_model(copy.deepcopy(config))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
        raise ValueError(
            f"{source.path / 'config.json'} does not describe a "
            f"{source.family.SPEC.family} model: {one_line(e)}"
        ) from e


def _name_keys(model: nn.Module, raw: dict[str, mx.array]) -> dict[str, str]:
    """The parameter name that ``sanitize`` gives each key, one key at a time."""
    names, keys = {}, {}
    for key, value in raw.items():
        (name,) = model.sanitize({key: value}) or (key,)
        if name in keys:
            raise ValueError(f"{key} and {keys[name]} are the same tensor ({name})")
        names[key], keys[name] = name, key
    return names


def _check_shapes(module: nn.Module, weights: dict[str, mx.array], owner: str) -> None:
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


def _fill(module: nn.Module, weights: dict[str, mx.array]) -> nn.Module:
    module.load_weights(list(weights.items()), strict=True)
    return module
