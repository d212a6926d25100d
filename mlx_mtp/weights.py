"""Loads the tensors of a source into the target and the head, in their final form.

mlx-lm's ``sanitize`` names the target's tensors, shifts its norms and moves its
convolutions; the head's norms are shifted here. Both additions happen in float32.
"""

import contextlib
import copy
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .cli import one_line
from .messages import listing
from .models.head import MTPHead
from .models.spec import MTPSpec
from .source import Source

EXPERTS = re.compile(r"\.experts\.")


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
    raw = source.family.target_weights(source.load(keys))
    with _complete(f"{source.path}"):
        names = _name_keys(model, raw)
        # Norms are vectors: widened, so that sanitize adds in float32.
        weights = model.sanitize(
            {k: v.astype(mx.float32) if v.ndim == 1 else v for k, v in raw.items()}
        )
    used = set().union(*names.values())
    if lost := [key for key in raw if key not in used]:
        raise ValueError(f"mlx-lm does not know {listing(lost)} of {source.path}")
    _check_shapes(model, weights, f"{source.path}")
    dtypes = {name: raw[min(group)].dtype for name, group in names.items()}
    return _fill(model, _cast(model, weights, dtypes, dtype))


def load_head(
    source: Source,
    keys: dict[str, str],
    model: nn.Module,
    spec: MTPSpec,
    dtype: mx.Dtype | None,
) -> MTPHead:
    """The MTP head with its weights, unread until they are used.

    Args:
        keys: the head's parameter names and their keys in the source.
        model: the target the head belongs to.
        spec: the head's data.
        dtype: type of the weights; None keeps each tensor's own.

    Raises:
        ValueError: for missing or unknown tensors, or a wrong shape.
    """
    family, owner = source.family, f"the MTP head of {source.path}"
    head = family.head(model, source.config, spec)
    raw = source.load(keys.values())
    weights = {name: raw[key] for name, key in keys.items()}
    with _complete(owner):
        weights = family.weights_by_module(weights, model)
    _check_shapes(head, weights, owner)
    dtypes = {name: value.dtype for name, value in weights.items()}
    shifted = {
        name: value.astype(mx.float32) + 1 if _centred(name, spec) else value
        for name, value in weights.items()
    }
    return _fill(head, _cast(model, shifted, dtypes, dtype))


@contextlib.contextmanager
def _complete(owner: str) -> Iterator[None]:
    """mlx-lm's ``sanitize`` meets a gap among the experts with a KeyError."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{owner} lacks the tensor {error.args[0]}") from error


def _cast(
    model: nn.Module,
    weights: dict[str, mx.array],
    own: dict[str, mx.Dtype],
    dtype: mx.Dtype | None,
) -> dict[str, mx.array]:
    """In the given type or else in their own; some stay as they are, as in mlx-lm."""
    casts = getattr(model, "cast_predicate", lambda name: True)
    return {
        name: value.astype(dtype if dtype and casts(name) else own[name])
        for name, value in weights.items()
    }


def _build(source: Source, config: dict[str, Any]) -> nn.Module:
    try:
        # Building changes the rope parameters inside the config it is given.
        return source.family.build_model(copy.deepcopy(config))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
        raise ValueError(
            f"{source.path / 'config.json'} does not describe a "
            f"{source.family.spec.family} model: {one_line(e)}"
        ) from e


def _name_keys(model: nn.Module, raw: dict[str, mx.array]) -> dict[str, set[str]]:
    """The keys from which ``sanitize`` makes each parameter, group by group.

    The experts of a layer are one group: ``sanitize`` stacks them.
    """
    groups = defaultdict(dict)
    for key, value in raw.items():
        groups[EXPERTS.split(key)[0]][key] = value
    names = {}
    for group in groups.values():
        for name in model.sanitize(dict(group)):
            if name in names:
                both = listing([*group, *names[name]])
                raise ValueError(f"{both} are the same tensor ({name})")
            names[name] = set(group)
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
