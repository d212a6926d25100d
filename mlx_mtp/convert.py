"""Checkpoint -> MLX checkpoint that keeps its MTP head, or gets that of its original.

The target becomes what mlx-lm's converter makes of it, the head a file beside it, and
``config.json`` gets the marker that says so. Whether norms are shifted and convolutions
moved is decided once, over the whole source. Knows no family beyond its module's names.
"""

import copy
import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import create_model_card, load_tokenizer, save_config

from .checkpoint import MARKER, MTP_FILE, MTP_PREFIX, make_marker
from .cli import one_line
from .head_source import NORMS, Norms, grafted_head, own_head
from .hub import fetch_head, fetch_source
from .layout import QUANTIZATION, open_source
from .messages import count
from .parts import TIE, dropped_notes, resolve_tie, sort_tensors
from .quantization import (
    DEFAULT_MODE,
    Plan,
    Predicate,
    is_quantized,
    make_plan,
    quantize_head,
    quantize_target,
    skipped_note,
    stored_quantization,
)
from .source import FP8_DTYPE, QUANTIZED_CONFIG, Source
from .staging import check_free, progress, staged
from .stream import total_bytes, write_head, write_target
from .weights import Filled, load_head, load_target, unshifted_note

DEFAULT_MLX_PATH = "mlx_model"
DTYPES = ("float16", "bfloat16", "float32")
# One of them holds a tokenizer's vocabulary.
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.*", "*.tiktoken")


def convert(
    hf_path: str | Path,
    mlx_path: str | Path = DEFAULT_MLX_PATH,
    quantize: bool = False,
    q_group_size: int | None = None,
    q_bits: int | None = None,
    q_mode: str = DEFAULT_MODE,
    dtype: str | None = None,
    mtp_bits: int | None = None,
    revision: str | None = None,
    *,
    quant_predicate: str | Predicate | None = None,
    mtp_from: str | Path | None = None,
    mtp_revision: str | None = None,
    mtp_norms: Norms | None = None,
    mtp_group_size: int | None = None,
    mtp_mode: str | None = None,
) -> None:
    """Convert a checkpoint and its MTP head.

    ``mlx_path`` appears when everything is written; a failure leaves nothing behind.

    Args:
        hf_path: a local directory or a Hugging Face repository, in original layout
            (FP8 is dequantised) or as mlx-lm writes it, quantised or not.
        mlx_path: the directory to make.
        quantize: quantise the target, and the head unless ``mtp_*`` say otherwise.
        q_group_size: group size; default: the mode's (affine 64).
        q_bits: bits per weight; default: the mode's (affine 4).
        q_mode: ``"affine"``, ``"mxfp4"``, ``"nvfp4"`` or ``"mxfp8"``.
        dtype: type of what is not quantised; default: the config's, or else the
            tensors' own. MLX directories keep theirs.
        mtp_bits: bits of the head, 16 to leave it unquantised; default: the target's,
            but 16 for the head of another checkpoint on a target that is not quantised
            in this run.
        revision: branch, tag or commit of the repository.
        quant_predicate: one of mlx-lm's mixed recipes (``"mixed_3_6"``), or a function
            of a layer's path and module that returns whether to quantise it, or with
            which ``group_size``, ``bits`` and ``mode``.
        mtp_from: directory or repository to take the head from, of which only the
            files with the head are downloaded; default: ``hf_path``.
        mtp_revision: branch, tag or commit of the repository ``mtp_from``.
        mtp_norms: how the head's norms are stored where that is no plain 1 + w matter:
            ``"raw"``, as w for a scale of 1 + w, or ``"shifted"``; default: as the
            files say.
        mtp_group_size: group size of the head; default: the target's.
        mtp_mode: quantisation mode of the head; default: the target's.

    Raises:
        ValueError: for a wrong option, or a source that cannot be converted whole.
        OSError: if the result cannot be written.
    """
    plan = make_plan(
        quantize,
        q_group_size,
        q_bits,
        q_mode,
        mtp_bits,
        mtp_group_size,
        mtp_mode,
        quant_predicate,
    )
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if mtp_norms is not None and mtp_norms not in NORMS:
        raise ValueError(f"mtp_norms {mtp_norms!r} is not one of {', '.join(NORMS)}")
    check_free(Path(mlx_path))
    target = Path(os.path.abspath(mlx_path))

    print("[INFO] Loading")
    source = open_source(fetch_source(hf_path, revision))
    _check_quantizable(source, plan)
    parts = sort_tensors(source)
    tied, tie_notes = resolve_tie(source, parts)
    if mtp_from is None:
        head_source, head_notes = own_head(source, parts, mtp_norms)
    else:
        path = fetch_head(mtp_from, source.family.spec, mtp_revision)
        head_source, head_notes = grafted_head(path, source, parts, mtp_norms)
        print(f"[INFO] MTP head of {mtp_from}; as in the target: {head_source.checked}")
        if parts.head:
            head_notes.append(f"the head of {hf_path} itself is left out")
    notes = [*plan.notes, *dropped_notes(parts), *tie_notes, *head_notes]
    config = _output_config(source, tied)
    model = load_target(source, parts.main, config, _resolve_dtype(dtype, source))
    head = load_head(
        head_source, model.module, config, _head_dtype(dtype, source, model.module)
    )
    notes += unshifted_note(head)
    tokenizer = _load_tokenizer(source)

    model, head, config, quantize_notes = _quantize(model, head, config, plan)
    notes += quantize_notes
    summary = _summary(model.module, head.module, config)
    _write(target, source.path, model, head, tokenizer, config)
    for line in (*summary, *(f"Note: {note}" for note in notes)):
        print(f"[INFO] {line}")
    print(f"[INFO] Saved to {mlx_path}. Try it:")
    print(
        f'python generate.py --model {shlex.quote(str(mlx_path))} --mtp --prompt "Hi"'
    )


def _check_quantizable(source: Source, plan: Plan) -> None:
    if plan.target is not None and QUANTIZATION in source.config:
        raise ValueError(
            f"{source.path} is quantised already; leave out quantize (-q), or start "
            "from the original checkpoint"
        )


def _resolve_dtype(dtype: str | None, source: Source) -> mx.Dtype | None:
    """The option's type, or else the config's; None to keep each tensor's own."""
    if dtype is None and source.layout == "mlx":
        return None
    configs = (source.config, source.text_config)
    stated = (c.get(key) for c in configs for key in ("torch_dtype", "dtype"))
    name = dtype or next(filter(None, stated), None)
    return getattr(mx, name) if name in DTYPES else None


def _head_dtype(dtype: str | None, source: Source, model: nn.Module) -> mx.Dtype | None:
    """The target's. That of a finished target shows in its norms."""
    if dtype is not None or source.layout == "raw":
        return _resolve_dtype(dtype, source)
    norms = (
        v for k, v in tree_flatten(model.parameters()) if k.endswith("norm.weight")
    )
    return next((v.dtype for v in norms), FP8_DTYPE)


def _load_tokenizer(source: Source) -> Any:
    # Without files transformers makes an empty tokenizer of the model's kind.
    if not any(match for name in VOCABULARIES for match in source.path.glob(name)):
        raise ValueError(
            f"{source.path} has no tokenizer ({', '.join(VOCABULARIES)}); "
            "download its tokenizer files"
        )
    try:
        return load_tokenizer(
            source.path, eos_token_ids=source.config.get("eos_token_id")
        )
    except Exception as error:  # transformers raises many kinds
        raise ValueError(
            f"the tokenizer of {source.path} cannot be loaded, download its files "
            f"again ({one_line(error)})"
        ) from error


def _output_config(source: Source, tied: bool) -> dict[str, Any]:
    config = copy.deepcopy(source.config)
    config["model_type"] = config["model_type"].removesuffix("_text")
    # mlx-lm reads the inner value, transformers the outer one.
    for part in (config, config.get("text_config", config)):
        part[TIE] = tied
        for name in QUANTIZED_CONFIG:  # FP8 is dequantised
            if source.layout == "raw":
                part.pop(name, None)
    return config


def _quantize(
    model: Filled, head: Filled, config: dict[str, Any], plan: Plan
) -> tuple[Filled, Filled, dict[str, Any], list[str]]:
    """Quantise as planned and put the marker into the config."""
    notes = []
    if plan.target is not None:
        print("[INFO] Quantizing")
    choices = plan.target, plan.predicate

    def target(module: nn.Module) -> list[str]:
        nonlocal config
        _, config, skipped = quantize_target(module, config, *choices)
        return skipped

    if plan.target is not None:
        model, skipped = _packed(model, target)
        if skipped:
            notes.append(skipped_note("target", skipped, plan.target))
    if plan.head is not None and is_quantized(head.module):
        notes.append("the head is quantised already and stays as it is")
    elif plan.head is not None:
        head, skipped = _packed(
            head,
            lambda module: quantize_head(
                module, model.module, plan.head, head.source.family.alike
            ),
        )
        if skipped:
            notes.append(skipped_note("MTP head", skipped, plan.head))
    quantization = stored_quantization(head.module, plan.head)
    config = {**config, MARKER: make_marker(head.module.spec, quantization)}
    return model, head, config, notes


def _packed(
    filled: Filled, quantize: Callable[[nn.Module], list[str]]
) -> tuple[Filled, list[str]]:
    """Quantise a module in place; the unpacked weights are kept for the writer."""
    before = dict(tree_flatten(filled.module.parameters()))
    skipped = quantize(filled.module)
    after = dict(tree_flatten(filled.module.parameters()))
    stems = (n.removesuffix("scales") for n in after.keys() - before.keys())
    to_pack = {f"{s}weight": before[f"{s}weight"] for s in stems if s.endswith(".")}
    to_pack = {name: v for name, v in to_pack.items() if f"{name[:-6]}scales" in after}
    return replace(filled, to_pack=to_pack), skipped


def _summary(model: nn.Module, head: nn.Module, config: dict[str, Any]) -> list[str]:
    parts = (
        ("Target", model, config.get(QUANTIZATION)),
        ("MTP head", head, config[MARKER]["quantization"]),
    )
    return [
        f"{name}: {count(len(tree_flatten(module.parameters())), 'tensor')}, "
        + (
            "{bits} bits ({mode}, group size {group_size})".format(
                **{"mode": DEFAULT_MODE} | quantization
            )
            if quantization and is_quantized(module)
            else "not quantised"
        )
        for name, module, quantization in parts
    ]


def _write(
    target: Path,
    source_path: Path,
    model: Filled,
    head: Filled,
    tokenizer: Any,
    config: dict[str, Any],
) -> None:
    print("[INFO] Saving")
    total = total_bytes(model) + total_bytes(head)
    with staged(target) as directory:
        try:
            with progress(total) as report:
                write_head(directory / MTP_FILE, head, MTP_PREFIX, report)
                write_target(directory, model, report)
        except RuntimeError as error:  # mlx's for a file that cannot be read
            raise OSError(f"cannot write {target}: {one_line(error)}") from error
        save_config(config, directory / "config.json")
        tokenizer.save_pretrained(directory)
        for pattern in ("*.py", "generation_config.json"):  # as mlx-lm
            for file in source_path.glob(pattern):
                shutil.copy(file, directory)
        create_model_card(directory, None)
