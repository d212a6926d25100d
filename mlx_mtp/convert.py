"""Hugging Face checkpoint -> MLX checkpoint that keeps its MTP head.

The target becomes what mlx-lm's converter makes of it, the head a file beside it, and
``config.json`` gets the marker that says so. Whether norms are shifted and convolutions
moved is decided once, over the whole source. Knows no family beyond its module's names.
"""

import argparse
import copy
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_tokenizer, save

from .checkpoint import MARKER, MTP_FILE, MTP_PREFIX, make_marker
from .cli import one_line, run
from .hub import CONVERT_PATTERNS, resolve
from .messages import count
from .parts import (
    TIE,
    check_promise,
    dropped_notes,
    head_keys,
    resolve_copies,
    resolve_tie,
    sort_tensors,
)
from .quantization import (
    DEFAULT_MODE,
    MODES,
    Plan,
    is_quantized,
    make_plan,
    quantize_head,
    quantize_target,
    skipped_note,
)
from .source import Source, open_source
from .staging import check_free, progress, staged
from .weights import load_head, load_target

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
) -> None:
    """Convert a checkpoint and its MTP head.

    ``mlx_path`` appears when everything is written; a failure leaves nothing behind.

    Args:
        hf_path: a local directory or a Hugging Face repository, in original layout.
        mlx_path: the directory to make.
        quantize: quantise the target, and the head unless ``mtp_bits`` says otherwise.
        q_group_size: group size; default: the mode's (affine 64).
        q_bits: bits per weight; default: the mode's (affine 4).
        q_mode: ``"affine"``, ``"mxfp4"``, ``"nvfp4"`` or ``"mxfp8"``.
        dtype: type of what is not quantised; default: the config's, or else the
            tensors' own.
        mtp_bits: bits of the head, 16 to leave it unquantised; default: the target's.
        revision: branch, tag or commit of the repository.

    Raises:
        ValueError: for a wrong option, or a source that cannot be converted whole.
        OSError: if the result cannot be written.
    """
    plan = make_plan(quantize, q_group_size, q_bits, q_mode, mtp_bits)
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    check_free(Path(mlx_path))
    target = Path(os.path.abspath(mlx_path))

    print("[INFO] Loading")
    source = open_source(resolve(hf_path, CONVERT_PATTERNS, revision))
    parts = sort_tensors(source)
    check_promise(source, parts)
    notes = [*plan.notes, *dropped_notes(parts)]
    tied, tie_notes = resolve_tie(source, parts)
    notes += tie_notes
    spec, copy_notes = resolve_copies(source, parts)
    notes += copy_notes
    config = _output_config(source, tied)
    target_dtype = _resolve_dtype(dtype, source)
    model = load_target(source, parts.main, config, target_dtype)
    head = load_head(source, head_keys(parts), model, spec, target_dtype)
    tokenizer = _load_tokenizer(source)

    model, config, quantize_notes = _quantize(model, head, config, source, plan)
    notes += quantize_notes
    summary = _summary(model, head, plan)
    _write(target, source.path, model, head, tokenizer, config)
    for line in (*summary, *(f"Note: {note}" for note in notes)):
        print(f"[INFO] {line}")
    print(f"[INFO] Saved to {mlx_path}. Try it:")
    print(
        f'python generate.py --model {shlex.quote(str(mlx_path))} --mtp --prompt "Hi"'
    )


def _resolve_dtype(dtype: str | None, source: Source) -> mx.Dtype | None:
    """The option's type, or else the config's; None to keep each tensor's own."""
    configs = (source.config, source.text_config)
    stated = (c.get(key) for c in configs for key in ("torch_dtype", "dtype"))
    name = dtype or next(filter(None, stated), None)
    return getattr(mx, name) if name in DTYPES else None


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
    return config


def _quantize(
    model: nn.Module,
    head: nn.Module,
    config: dict[str, Any],
    source: Source,
    plan: Plan,
) -> tuple[nn.Module, dict[str, Any], list[str]]:
    """Quantise as planned and put the marker into the config."""
    notes = []
    if plan.target is not None:
        print("[INFO] Quantizing")
        model, config, skipped = quantize_target(model, config, plan.target)
        if skipped:
            notes.append(skipped_note("target", skipped, plan.target))
    if plan.head is not None and (skipped := quantize_head(head, model, plan.head)):
        notes.append(skipped_note("MTP head", skipped, plan.head))
    quantization = plan.head.as_dict() if is_quantized(head) else None
    config[MARKER] = make_marker(head.spec, quantization)
    return model, config, notes


def _summary(model: nn.Module, head: nn.Module, plan: Plan) -> list[str]:
    parts = (("Target", model, plan.target), ("MTP head", head, plan.head))
    return [
        f"{name}: {count(len(tree_flatten(module.parameters())), 'tensor')}, "
        f"{quantization if is_quantized(module) else 'not quantised'}"
        for name, module, quantization in parts
    ]


def _write(
    target: Path,
    source_path: Path,
    model: nn.Module,
    head: nn.Module,
    tokenizer: Any,
    config: dict[str, Any],
) -> None:
    weights = {f"{MTP_PREFIX}{k}": v for k, v in tree_flatten(head.parameters())}
    total = sum(v.nbytes for v in weights.values())
    total += sum(v.nbytes for _, v in tree_flatten(model.parameters()))
    print("[INFO] Saving")
    with staged(target) as directory, progress(directory, total):
        try:
            mx.save_safetensors(
                str(directory / MTP_FILE), weights, metadata={"format": "mlx"}
            )
            save(directory, source_path, model, tokenizer, config, donate_model=True)
        except RuntimeError as error:  # mlx's for a full disk
            raise OSError(f"cannot write {target}: {one_line(error)}") from error


def configure_parser() -> argparse.ArgumentParser:
    """The command line; flags are named as mlx-lm's."""
    parser = argparse.ArgumentParser(
        prog="convert.py",
        description="Convert a Hugging Face checkpoint to MLX, with its MTP head.",
    )
    add = parser.add_argument
    add(
        "--hf-path",
        "--model",
        required=True,
        help="Local directory or Hugging Face repository (owner/name).",
    )
    add("--mlx-path", default=DEFAULT_MLX_PATH, help="Directory to make.")
    add("-q", "--quantize", action="store_true", help="Quantize the model.")
    add("--q-group-size", type=int, help="Group size for quantization.")
    add("--q-bits", type=int, help="Bits per weight for quantization.")
    add("--q-mode", default=DEFAULT_MODE, choices=[*MODES], help="Quantization mode.")
    add(
        "--dtype",
        choices=DTYPES,
        help="Type of the unquantized parameters. Default: the config's.",
    )
    add(
        "--mtp-bits",
        type=int,
        help="Bits per weight of the MTP head, 16 to leave it unquantized. "
        "Default: as the model.",
    )
    add("--revision", help="Branch, tag or commit of the repository.")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """The command ``convert``.

    Raises:
        SystemExit: 1 for a source that cannot be converted, 2 for a wrong option, 130
            after Ctrl-C.
    """
    parser = configure_parser()
    args = parser.parse_args(argv)
    try:
        make_plan(
            args.quantize, args.q_group_size, args.q_bits, args.q_mode, args.mtp_bits
        )
    except ValueError as error:
        parser.error(str(error))
    run(lambda: convert(**vars(args)))


if __name__ == "__main__":
    main()
