"""``python -m mlx_mtp.doctor``: is this machine fit for MTP, and how much does it gain?

A self-test of about a minute: versions and chip, each kernel against its operations,
blocks against single rows, what rounds cost, and plain decoding against MTP. Verdicts
are lines for people; the last line is one JSON document to paste into a report.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from .benchmark import PLAIN, benchmark, exactness, prompts_of, versions
from .benchmark_report import rounded
from .cli import run
from .doctor_kernels import check_kernels
from .draft_memory import AUTO, machine
from .generate_step import target_of
from .kernels.dispatch import on_metal
from .load import DEMO_PATH, load
from .speculative.prefill import prefill
from .speculative.round import Engine

TOKENS, LONGEST = 48, 60.0  # tokens per run, seconds for all runs together
EXACT_TOKENS = 24
EXACT_KS = (1, 3)
BUILDS = 10
NEAR_TIE = 0.25  # top-2 gap below which another rounding may choose the other token


def verdict(ok: bool | None, text: str) -> str:
    mark = {True: "ok  ", False: "FAIL", None: "note"}[ok]
    return f"[{mark}] {text}"


def tokens_within(model: nn.Module, prompt: Sequence[int], runs: int) -> int:
    """Tokens per run such that all take about as long as they may."""
    with mx.stream(generation_stream):
        engine = Engine(target_of(model))
        mx.eval(prefill(engine, [list(prompt)], 2048))
        start = time.perf_counter()
        for _ in range(2):
            mx.eval(engine.target.hidden(mx.array([prompt[-1:]]), engine.cache))
        step = (time.perf_counter() - start) / 2
    return max(8, min(TOKENS, int(LONGEST / (runs * max(step, 1e-6)))))


def build_seconds(model: nn.Module, prompt: Sequence[int], k: int) -> float:
    """What Python needs to build a round's graph, the median of some."""
    with mx.stream(generation_stream):
        engine = Engine(target_of(model), model.mtp)
        block = prefill(engine, [list(prompt)], 2048)
        mx.eval(block)
        times, limit = [], len(prompt)
        for _ in range(BUILDS):
            engine.bound(limit, block.width)
            start = time.perf_counter()
            block = engine.round(block, k)
            times.append(time.perf_counter() - start)
            mx.eval(block, engine.due())
            limit += block.width
    return statistics.median(times)


def examine(model: nn.Module, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Everything measured on the model."""
    prompt = max(prompts, key=len)[:64]
    document: dict[str, Any] = {"kernels": check_kernels()}
    if model.mtp is None:
        return document
    document["exact"] = exactness(model, [prompt], EXACT_KS, EXACT_TOKENS)
    ks = (AUTO, 1, 2, 3)
    count = tokens_within(model, prompt, runs=2 * (len(ks) + 2))
    document |= benchmark(
        model, [prompt], ks=ks, count=count, repeats=2, with_simple=False
    )
    builds = {str(k): build_seconds(model, prompt, k) for k in (0, 1, 3)}
    document["build_seconds"] = builds
    return document


def verdicts(document: dict[str, Any]) -> list[str]:
    """What the figures say, line by line."""
    lines = []
    if not document["kernels"]:
        lines.append(
            verdict(None, "no Metal GPU in use: the kernels have no part here")
        )
    for entry in document["kernels"]:
        error = entry.get("error") or f"relative error {entry['relative_error']:.1e}"
        lines.append(verdict(entry["ok"], f"kernel {entry['kernel']}: {error}"))
    if "methods" not in document:
        lines.append(verdict(False, "the model has no MTP head; convert the original"))
        return lines
    for entry in document["exact"]:
        lines.append(_exact_line(entry))
    costs = document["costs"]
    lines.append(
        verdict(
            None,
            f"a plain step takes {1e3 * costs['verify_seconds'][0]:.1f} ms "
            f"({costs['bandwidth_gb_s']:.1f} GB/s of weights); verifying 2, 3, 4 rows "
            f"costs {', '.join(f'{c:.2f}' for c in costs['verify_relative'][1:4])} of "
            f"it, a draft {costs['draft_relative']:.2f}",
        )
    )
    step = costs["verify_seconds"][0]
    share = document["build_seconds"]["0"] / step
    lines.append(
        verdict(
            None,
            f"Python builds a plain step in {share:.0%} of its time, a round with 3 "
            f"drafts in {1e3 * document['build_seconds']['3']:.1f} ms",
        )
    )
    lines += _speed_lines(document["methods"])
    return lines


def _exact_line(entry: dict[str, Any]) -> str:
    name = f"K = {entry['num_draft_tokens']}"
    if entry["exact"]:
        return verdict(
            True, f"{name}: tokens and log-probabilities are plain decoding's"
        )
    difference = f"log-probabilities within {entry['max_difference']:.1e}"
    if entry["diverged_at"] is None:
        return verdict(True, f"{name}: tokens are plain decoding's, {difference}")
    gap = entry["top2_gap"]
    return verdict(
        None if gap < NEAR_TIE else False,
        f"{name}: the text parts at token {entry['diverged_at']}, where the two "
        f"likeliest tokens are {gap:.2g} apart; {difference} before",
    )


def _speed_lines(methods: dict[str, Any]) -> list[str]:
    lines = []
    for name, method in methods.items():
        if name == PLAIN:
            continue
        ratio = method["ratio"][1]
        label = f"K = {name}" if name.isdecimal() else name
        text = f"{label}: {ratio:.2f} times mlx-lm's speed"
        if length := method.get("mean_acceptance_length"):
            text += f", {length:.2f} tokens per round with drafts"
        judged = name == AUTO or name.startswith("mtp")
        lines.append(verdict(ratio > 0.95 if judged else None, text))
    return lines


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mlx_mtp.doctor", description="A self-test of about a minute."
    )
    parser.add_argument(
        "--model",
        default=str(DEMO_PATH),
        help="directory written by convert.py; default: the tiny demo model, which "
        "shows that things work and is too small to gain",
    )
    return parser.parse_args(argv)


def command(args: argparse.Namespace) -> None:
    model, tokenizer = load(args.model)
    document = {"model": args.model, "machine": machine(), "versions": versions()}
    chip = document["machine"].get("device_name", "unknown chip")
    place = "Metal GPU" if on_metal() else str(mx.default_device())
    print(f"{chip}, {place}; mlx {mx.__version__}; {args.model}")
    document |= examine(model, prompts_of(Path(args.model), None, tokenizer))
    lines = verdicts(document)
    document["verdicts"] = lines
    print("\n".join(lines))
    print(json.dumps(rounded(document)))


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    run(lambda: command(args))


if __name__ == "__main__":
    main()
