"""Which bits the target and the head get, and how they are given them.

Knows modules, no files and no model family.
"""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model

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
    """What to do with the target and the head; None leaves one as it is."""

    target: Quantization | None
    head: Quantization | None
    notes: tuple[str, ...] = ()


def make_plan(
    quantize: bool,
    q_group_size: int | None,
    q_bits: int | None,
    q_mode: str,
    mtp_bits: int | None,
) -> Plan:
    """Resolve the options of ``convert``; see there.

    Raises:
        ValueError: for a value the mode does not have.
    """
    if q_mode not in MODES:
        raise ValueError(f"q_mode {q_mode!r} is not one of {', '.join(MODES)}")
    mode = MODES[q_mode]
    group_size = _choose("q_group_size", q_group_size, mode.group_sizes, q_mode)
    bits = _choose("q_bits", q_bits, mode.bits, q_mode)
    target = Quantization(group_size, bits, q_mode) if quantize else None
    if mtp_bits is None:
        head = target
    elif mtp_bits == HEAD_UNQUANTIZED:
        head = None
    else:
        allowed = (*mode.bits, HEAD_UNQUANTIZED)
        bits = _choose("mtp_bits", mtp_bits, allowed, q_mode)
        head = Quantization(group_size, bits, q_mode)
    notes = []
    if not quantize and q_bits is not None:
        notes.append(f"q_bits {q_bits} has no effect without quantize (-q)")
    if not quantize and head is None and q_group_size is not None:
        notes.append(f"q_group_size {q_group_size} has no effect without quantize (-q)")
    return Plan(target, head, tuple(notes))


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
    model: nn.Module, config: dict[str, Any], quantization: Quantization
) -> tuple[nn.Module, dict[str, Any], list[str]]:
    """Quantise the target as mlx-lm does.

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
        quant_predicate=_predicate(model, quantization),
    )
    return model, config, skipped


def quantize_head(
    head: nn.Module, model: nn.Module, quantization: Quantization
) -> list[str]:
    """Quantise the head in place, as mlx-lm does the layers of its target ``model``.

    Returns:
        The layers left alone because the group size does not divide their width.
    """
    skipped = _indivisible(head, quantization)
    predicate = _predicate(model, quantization)

    def choose(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or not quantization.divides(module):
            return False
        return predicate(path, module)

    nn.quantize(head, **quantization.as_dict(), class_predicate=choose)
    return skipped


def _predicate(
    model: nn.Module, quantization: Quantization
) -> Callable[[str, nn.Module], bool | dict[str, Any]]:
    """mlx-lm's choice for the model's layers; routers never have less than 8 bits."""
    theirs = getattr(model, "quant_predicate", None)

    def predicate(path: str, module: nn.Module) -> bool | dict[str, Any]:
        choice = theirs(path, module) if theirs else True
        if choice is True and path.endswith(ROUTERS):
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
