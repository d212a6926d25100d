"""Experts of a source -> mlx-lm's stacked layout; sources have two of their own."""

import re
from collections import defaultdict

import mlx.core as mx

Weights = dict[str, mx.array]
ONE = re.compile(r"(.*\.)experts\.(\d+)\.(\w+_proj)\.weight")


def stack_experts(weights: Weights) -> Weights:
    """``experts.{e}.{gate,up,down}_proj.weight`` -> ``switch_mlp.{…}_proj.weight``.

    Raises:
        KeyError: names the tensor of an expert that is missing.

    Shapes:
        one expert: [O, I]; stacked: [E, O, I]
    """
    found: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    rest = dict(weights)
    for key in weights:
        if match := ONE.fullmatch(key):
            prefix, expert, name = match.groups()
            found[prefix, name][int(expert)] = key
            del rest[key]
    for (prefix, name), experts in found.items():
        others = (len(e) for (p, _), e in found.items() if p == prefix)
        for e in range(max(max(experts) + 1, *others)):
            if e not in experts:
                raise KeyError(f"{prefix}experts.{e}.{name}.weight")
        stacked = mx.stack([weights[experts[e]] for e in range(len(experts))])
        rest[f"{prefix}switch_mlp.{name}.weight"] = stacked
    return rest


def split_fused_experts(weights: Weights) -> Weights:
    """``experts.gate_up_proj`` and ``experts.down_proj`` -> ``switch_mlp.*``.

    Shapes:
        gate_up_proj: [E, 2 I, H], the gate first; down_proj: [E, H, I]
    """
    rest = {}
    for key, value in weights.items():
        prefix, _, name = key.rpartition("experts.")
        if name == "gate_up_proj":
            for part, half in zip(
                ("gate", "up"), mx.split(value, 2, axis=-2), strict=True
            ):
                rest[f"{prefix}switch_mlp.{part}_proj.weight"] = half
        elif name == "down_proj" and prefix:
            rest[f"{prefix}switch_mlp.down_proj.weight"] = value
        else:
            rest[key] = value
    return rest
