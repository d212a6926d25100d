"""Which bits the target and the head get, and how they are given them.

Knows modules, no files and no model family.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.convert import QUANT_RECIPES, mixed_quant_predicate_builder
from mlx_lm.utils import quantize_model

Predicate = Callable[[str, nn.Module], bool | dict[str, Any]]
# The value of ``mtp_bits`` that leaves the head as it is.
HEAD_UNQUANTIZED = 16
DEFAULT_MODE = "affine"
# Which experts a token goes to is decided by small differences.
ROUTERS = ("mlp.gate", "shared_expert_gate")


@dataclass(frozen=True)
class Mode:
    """What mlx accepts for a mode; mlx-lm's defaults stand first."""

    group_sizes: tuple[int, ...]
    bits: tuple[int, ...]


MODES = {
    "affine": Mode((64, 32, 128), (4, 2, 3, 5, 6, 8)),
    "mxfp4": Mode((32,), (4,)),
    "nvfp4": Mode((16,), (4,)),
    "mxfp8": Mode((32,), (8,)),
}


@dataclass(frozen=True)
class Quantization:
    group_size: int
    bits: int
    mode: str

    def __str__(self) -> str:
        return f"{self.bits} bits ({self.mode}, group size {self.group_size})"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def divides(self, module: nn.Module) -> bool:
        return module.weight.shape[-1] % self.group_size == 0


@dataclass(frozen=True)
class Plan:
    """What to do with the target and the head; None leaves one as it is.

    Args:
        predicate: one of mlx-lm's recipes, or a function, for the target's layers.
    """

    target: Quantization | None
    head: Quantization | None
    predicate: str | Predicate | None = None
    notes: tuple[str, ...] = ()


def make_plan(
    quantize: bool,
    q_group_size: int | None,
    q_bits: int | None,
    q_mode: str,
    mtp_bits: int | None,
    mtp_group_size: int | None = None,
    mtp_mode: str | None = None,
    quant_predicate: str | Predicate | None = None,
) -> Plan:
    """Resolve the options of ``convert``; see there.

    Raises:
        ValueError: for a value the mode does not have.
    """
    for name, value in (("q_mode", q_mode), ("mtp_mode", mtp_mode or q_mode)):
        if value not in MODES:
            raise ValueError(f"{name} {value!r} is not one of {', '.join(MODES)}")
    recipe = quant_predicate if isinstance(quant_predicate, str) else None
    if recipe is not None and recipe not in QUANT_RECIPES:
        raise ValueError(
            f"quant_predicate {recipe!r} is not one of {', '.join(QUANT_RECIPES)}"
        )
    if recipe and q_mode != "affine":
        raise ValueError(
            f"quant_predicate {recipe!r} needs q_mode 'affine', not {q_mode!r}"
        )
    target = _quantization("q", q_group_size, q_bits, q_mode) if quantize else None
    if target is None:  # a wrong value is wrong without effect as well
        _quantization("q", q_group_size, q_bits, q_mode)
    head = target
    if mtp_bits == HEAD_UNQUANTIZED:
        head = None
    elif (mtp_bits, mtp_group_size, mtp_mode) != (None, None, None):
        same_mode = mtp_mode in (None, q_mode)
        if same_mode and mtp_group_size is None:
            mtp_group_size = q_group_size
        if same_mode and mtp_bits is None:
            mtp_bits = q_bits
        head = _quantization("mtp", mtp_group_size, mtp_bits, mtp_mode or q_mode)
    elif target is not None and recipe:
        # The recipe's larger number: the head is small.
        head = replace(target, bits=int(recipe.rpartition("_")[2]))
    named = {"q_bits": q_bits, "quant_predicate": recipe}
    if head is None:
        named["q_group_size"] = q_group_size
    notes = [
        f"{name} {value} has no effect without quantize (-q)"
        for name, value in named.items()
        if value is not None and not quantize
    ]
    return Plan(target, head, quant_predicate if quantize else None, tuple(notes))


def _quantization(
    prefix: str, group_size: int | None, bits: int | None, mode: str
) -> Quantization:
    known = MODES[mode]
    allowed = (*known.bits, HEAD_UNQUANTIZED) if prefix == "mtp" else known.bits
    sizes = known.group_sizes
    group_size = _choose(f"{prefix}_group_size", group_size, sizes, mode)
    return Quantization(
        group_size, _choose(f"{prefix}_bits", bits, allowed, mode), mode
    )


def _choose(name: str, value: int | None, allowed: tuple[int, ...], mode: str) -> int:
    if value is None:
        return allowed[0]
    if value not in allowed:
        raise ValueError(
            f"{name} {value} is not possible with mode {mode!r}; "
            f"possible: {', '.join(map(str, sorted(allowed)))}"
        )
    return value


def quantize_target(
    model: nn.Module,
    config: dict[str, Any],
    quantization: Quantization,
    predicate: str | Predicate | None = None,
) -> tuple[nn.Module, dict[str, Any], list[str]]:
    """Quantise the target as mlx-lm does.

    Args:
        predicate: a recipe or a function that chooses for each layer, as in mlx-lm;
            default: the model's own.

    Returns:
        The model, its new config, and the layers left alone because the group size
        does not divide their width.
    """
    skipped = _indivisible(model, quantization)
    model, config = quantize_model(
        model,
        config,
        quantization.group_size,
        quantization.bits,
        mode=quantization.mode,
        quant_predicate=_predicate(model, quantization, predicate),
    )
    return model, config, skipped


def quantize_head(
    head: nn.Module,
    model: nn.Module,
    quantization: Quantization,
    alike: Callable[[str, nn.Module], str] = lambda path, model: path,
) -> list[str]:
    """Quantise the head in place, as mlx-lm does the layers of its target ``model``.

    ``alike`` gives the path that mlx-lm's rules are asked for in place of the head's.

    Returns:
        The layers left alone because the group size does not divide their width.
    """
    skipped = _indivisible(head, quantization)
    predicate = _predicate(model, quantization)

    def choose(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or not quantization.divides(module):
            return False
        return predicate(alike(path, model), module)

    nn.quantize(head, **quantization.as_dict(), class_predicate=choose)
    return skipped


def _predicate(
    model: nn.Module,
    quantization: Quantization,
    chosen: str | Predicate | None = None,
) -> Predicate:
    """mlx-lm's choice for the model's layers; routers never have less than 8 bits."""
    theirs = chosen or getattr(model, "quant_predicate", None)
    if isinstance(chosen, str):
        theirs = mixed_quant_predicate_builder(chosen, model, quantization.group_size)

    def predicate(path: str, module: nn.Module) -> bool | dict[str, Any]:
        choice = theirs(path, module) if theirs else True
        least = choice is True or isinstance(chosen, str)
        if choice and least and path.endswith(ROUTERS):
            choice = {"group_size": quantization.group_size, "bits": 8}
        # mlx-lm names 64 whatever is asked for.
        if isinstance(choice, dict) and module.weight.shape[-1] % choice["group_size"]:
            return False
        return choice

    return predicate


def is_quantized(module: nn.Module) -> bool:
    """Whether any layer is; all may be too narrow for the group size."""
    names = (name for name, _ in tree_flatten(module.parameters()))
    return any(name.endswith(".scales") for name in names)


def stored_quantization(
    head: nn.Module, planned: Quantization | None
) -> dict[str, Any] | None:
    """What the marker says of a head; None if no layer is quantised.

    Args:
        planned: how it was quantised; None if its source has done it.
    """
    layers = [layer for _, layer in head.named_modules() if hasattr(layer, "scales")]
    if not layers:
        return None
    if planned is not None:
        return planned.as_dict()
    names = ("group_size", "bits", "mode")
    kinds = Counter(tuple(getattr(layer, n) for n in names) for layer in layers)
    return dict(zip(names, kinds.most_common(1)[0][0], strict=True))


def skipped_note(part: str, skipped: list[str], quantization: Quantization) -> str:
    # Layers of a kind have the same width.
    kinds = sorted({re.sub(r"\.\d+\.", ".*.", path) for path in skipped})
    return (
        f"not quantised in the {part}, because the group size "
        f"{quantization.group_size} does not divide their width: {', '.join(kinds)}"
    )


def _indivisible(model: nn.Module, quantization: Quantization) -> list[str]:
    return [
        path
        for path, module in model.named_modules()
        if hasattr(module, "to_quantized") and not quantization.divides(module)
    ]
