"""``python -m mlx_mtp.benchmark``: plain decoding and MTP, side by side in one process.

Every prompt is run by every method in turn, in rotating order, and a method's speed is
compared with mlx-lm's on the same prompt in the same turn, so that what else the
machine does falls on all alike. Greedy; end tokens are ignored, so that all methods
generate the same text to the same length. The last line of the output is one JSON
document.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ._version import __version__
from .benchmark_costs import Costs, measure_costs
from .benchmark_exact import compare
from .benchmark_methods import Method, ours, simple, stock
from .benchmark_report import (
    plot,
    print_costs,
    print_exact,
    print_table,
    quartiles,
    rounded,
)
from .cli import run
from .draft_memory import AUTO, DraftMemory, machine
from .generate_cli import num_draft_tokens, positive
from .generate_step import NumDraftTokens, SpeculationStats
from .load import DEMO_PATH, load

MAX_TOKENS = 128
REPEATS = 3
COST_REPEATS = 7
PLAIN, OFF, SIMPLE = "mlx-lm", "mtp off", "simple scheme"
KS: tuple[NumDraftTokens, ...] = (AUTO, 1, 2, 3)
PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that merges two sorted lists.",
    "Translate into French: The library opens at nine, except on Sundays.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
)
# Of a synthetic checkpoint's text, which no prompt can describe.
TEXT_FILE, TEXT_PROMPT = "text.json", 32


@dataclass
class Runs:
    """What one method has done.

    Args:
        rates: tokens per second behind the first token, per run.
        first: seconds to the first token, per run.
        ratios: of rates to mlx-lm's on the same prompt in the same turn.
        counters: of each run with drafts.
        peak: bytes, the largest.
    """

    rates: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    counters: list[SpeculationStats] = field(default_factory=list)
    peak: int = 0


def timed(method: Method, prompt: Sequence[int], count: int, runs: Runs) -> list[int]:
    """Run once; the tokens."""
    mx.clear_cache()
    mx.reset_peak_memory()
    tokens = []
    start = time.perf_counter()
    for token in method(prompt, count, runs.counters):
        if not tokens:
            runs.first.append(time.perf_counter() - start)
        tokens.append(token)
        if len(tokens) == count:
            end = time.perf_counter()
    runs.rates.append((count - 1) / (end - start - runs.first[-1]))
    runs.peak = max(runs.peak, mx.get_peak_memory())
    return tokens


def alternate(
    methods: dict[str, Method],
    prompts: Sequence[Sequence[int]],
    *,
    count: int,
    repeats: int,
) -> dict[str, Runs]:
    """Every prompt by every method, ``repeats`` times, in rotating order."""
    results = {name: Runs() for name in methods}
    names = list(methods)
    for turn in range(repeats):
        for index, prompt in enumerate(prompts):
            shift = (turn * len(prompts) + index) % len(names)
            for name in names[shift:] + names[:shift]:
                timed(methods[name], prompt, count, results[name])
            plain = results[PLAIN].rates[-1]
            for result in results.values():
                result.ratios.append(result.rates[-1] / plain)
    return results


def methods_of(
    model: nn.Module, ks: Sequence[NumDraftTokens], with_simple: bool
) -> dict[str, Method]:
    methods = {PLAIN: stock(model), OFF: ours(model, None)}
    if model.mtp is not None:
        methods |= {str(k): ours(model, k) for k in ks}
        if with_simple:
            methods[SIMPLE] = simple(model)
    return methods


def conditional_acceptance(counters: Sequence[SpeculationStats]) -> list[float | None]:
    """Accepted drafts / drafts whose predecessors were accepted, by position."""
    accepted, judged = [0] * 9, [0] * 9
    for stats in counters:
        before = stats.num_draft_tokens_per_pos[:1]
        for i, n in enumerate(stats.num_accepted_tokens_per_pos):
            judged[i] += before[0] if i == 0 else _judged(stats, i)
            accepted[i] += n
    last = max((i + 1 for i, n in enumerate(judged) if n), default=0)
    return [a / j if j else None for a, j in zip(accepted, judged, strict=True)][:last]


def _judged(stats: SpeculationStats, position: int) -> float:
    """Rounds in which the draft was judged: those that had it and came so far.

    Where K varies, how many of the rounds that came so far had one more draft is
    taken to be the share among all rounds.
    """
    drafted = stats.num_draft_tokens_per_pos
    share = drafted[position] / drafted[position - 1]
    return stats.num_accepted_tokens_per_pos[position - 1] * share


def summary(name: str, runs: Runs, costs: Costs) -> dict[str, Any]:
    """One method's entry in the document."""
    entry: dict[str, Any] = {
        "tokens_per_second": statistics.median(runs.rates),
        "ratio": quartiles(runs.ratios),
        "ratio_minimum": min(runs.ratios),
        "first_token_seconds": statistics.median(runs.first),
        "peak_memory_gb": runs.peak / 1e9,
    }
    drafting = [stats for stats in runs.counters if stats.num_drafts]
    if name in (PLAIN, OFF):
        return entry
    entry["k"] = 1 if name == SIMPLE else int(name) if name.isdecimal() else name
    if name == SIMPLE:
        entry["k"] = SIMPLE
    if drafting:
        rates = conditional_acceptance(drafting)
        rounds = sum(stats.num_drafts for stats in drafting)
        accepted = sum(stats.num_accepted_tokens for stats in drafting)
        entry["conditional_acceptance"] = rates
        entry["mean_acceptance_length"] = 1 + accepted / rounds
        entry["drafted_tokens"] = sum(s.num_draft_tokens for s in drafting)
        entry["accepted_tokens"] = accepted
        known = [rate or 0.0 for rate in rates]
        if isinstance(entry["k"], int):
            entry["expected_speed_up"] = costs.expected_speed_up(entry["k"], known)
        elif name == AUTO:
            ks = range(min(len(known), len(costs.verify) - 1) + 1)
            entry["expected_speed_up"] = max(
                costs.expected_speed_up(k, known) for k in ks
            )
    return entry


def benchmark(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    ks: Sequence[NumDraftTokens] = KS,
    count: int = MAX_TOKENS,
    repeats: int = REPEATS,
    with_simple: bool = True,
    memory: Path | None = None,
) -> dict[str, Any]:
    """Measure a model.

    Args:
        model: from :func:`mlx_mtp.load`.
        prompts: token ids of each.
        ks: values of ``num_draft_tokens``. Default: auto, 1, 2 and 3.
        count: tokens to generate. Default: 128.
        repeats: turns. Default: 3.
        with_simple: include the simple scheme.
        memory: a file for what is learned of costs, instead of the user's.

    Returns:
        The document, without machine and model.
    """
    if memory is not None and model.mtp is not None:
        model.draft_memory = DraftMemory(memory)
    longest = max(prompts, key=len)
    costs = measure_costs(model, longest, repeats=COST_REPEATS)
    results = alternate(
        methods_of(model, ks, with_simple), prompts, count=count, repeats=repeats
    )
    return {
        "sampler": "greedy",
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "tokens": count,
        "repeats": repeats,
        "costs": {
            "verify_seconds": costs.verify,
            "verify_relative": costs.relative,
            "draft_relative": costs.relative_draft,
            "draft_whole_relative": (costs.draft_whole or 0.0) / costs.verify[0],
            "head_layer_relative": (costs.head_layer or 0.0) / costs.verify[0],
            "bandwidth_gb_s": costs.bandwidth / 1e9,
        },
        "methods": {name: summary(name, runs, costs) for name, runs in results.items()},
    }


def prompts_of(
    path: Path, file: Path | None, tokenizer: TokenizerWrapper
) -> list[list[int]]:
    """Token ids of the file's lines, of a synthetic checkpoint's text, or of ours.

    A line is text, or a JSON list of token ids.
    """
    if file is None and (path / TEXT_FILE).exists():
        text = json.loads((path / TEXT_FILE).read_text())
        starts = range(0, 4 * 2000, 2000)
        return [
            text[i : i + TEXT_PROMPT] for i in starts if i + TEXT_PROMPT < len(text)
        ]
    lines = PROMPTS if file is None else file.read_text().splitlines()
    prompts = [ids for line in lines if (ids := _ids(line, tokenizer))]
    if not prompts:
        raise ValueError(f"{file} holds no prompt; give one a line")
    return prompts


def _ids(line: str, tokenizer: TokenizerWrapper) -> list[int]:
    if line.startswith("["):
        try:
            return [int(token) for token in json.loads(line)]
        except (ValueError, TypeError):
            pass  # text that begins with a bracket
    if not line.strip():
        return []
    if not tokenizer.has_chat_template:
        return tokenizer.encode(line)
    message = {"role": "user", "content": line}
    return tokenizer.apply_chat_template([message], add_generation_prompt=True)


def exactness(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    ks: Sequence[NumDraftTokens],
    count: int,
) -> list[dict[str, Any]]:
    fixed = [k for k in ks if k != AUTO]
    return [
        {"prompt": index, **comparison.as_dict()}
        for index, prompt in enumerate(prompts)
        for comparison in compare(model, prompt, fixed, count)
    ]


def versions() -> dict[str, str]:
    return {
        "mlx_mtp": __version__,
        "mlx": mx.__version__,
        "mlx_lm": mlx_lm.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }


def k_list(text: str) -> list[NumDraftTokens]:
    return [num_draft_tokens(part) for part in text.split(",")]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mlx_mtp.benchmark", description="Plain decoding against MTP."
    )
    add = parser.add_argument
    add("--model", default=str(DEMO_PATH), help="directory written by convert.py")
    add(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="a prompt a line, as text or as a JSON list of token ids; default: a few "
        "questions, or a synthetic checkpoint's own text",
    )
    add(
        "--num-draft-tokens",
        type=k_list,
        default=list(KS),
        metavar="K,…",
        help="values to compare (default: auto,1,2,3)",
    )
    add("--max-tokens", "-m", type=positive, default=MAX_TOKENS)
    add("--repeats", type=positive, default=REPEATS)
    add("--no-simple", action="store_true", help="leave the simple scheme out")
    add(
        "--check-exact",
        action="store_true",
        help="compare tokens and log-probabilities with plain decoding, first",
    )
    add("--plot", metavar="FILE", help="speed-up and acceptance by K, as a picture")
    args = parser.parse_args(argv)
    if args.max_tokens < 2:
        parser.error(f"--max-tokens must be 2 or more, not {args.max_tokens}")
    return args


def report(args: argparse.Namespace) -> dict[str, Any]:
    """Print everything but the JSON line; the document."""
    model, tokenizer = load(args.model)
    prompts = prompts_of(Path(args.model), args.prompts, tokenizer)
    document = {"model": args.model, "machine": machine(), "versions": versions()}
    names = [document["machine"].get("device_name", ""), *versions().values()]
    print(f"{args.model}: {len(prompts)} prompts, {args.max_tokens} tokens, greedy")
    print(f"{', '.join(names)}\n")
    if args.check_exact and model.mtp is not None:
        ks = args.num_draft_tokens
        document["exact"] = exactness(model, prompts, ks, args.max_tokens)
        print_exact(document["exact"])
    document |= benchmark(
        model,
        prompts,
        ks=args.num_draft_tokens,
        count=args.max_tokens,
        repeats=args.repeats,
        with_simple=not args.no_simple,
    )
    print_costs(document)
    print_table(document)
    return document


def command(args: argparse.Namespace) -> None:
    document = report(args)
    if args.plot:
        plot(document, args.plot)
    print(json.dumps(rounded(document)))


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    run(lambda: command(args))


if __name__ == "__main__":
    main(sys.argv[1:])
