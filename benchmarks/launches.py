"""Launches, bytes and build time of a decoding step, counted without a GPU.

    python benchmarks/launches.py                    # Qwen3.5-0.8B's sizes, random
    python benchmarks/launches.py --model DIRECTORY  # a converted checkpoint

Prints a table, then one line of JSON. See ``metal_graph`` for what is counted.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from metal_graph import launches, leaf, logged, metal_shaped, primitives
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache
from mlx_lm.utils import load_model

from mlx_mtp import load
from mlx_mtp.generate_step import target_of
from mlx_mtp.models import family_of
from mlx_mtp.speculative.cache import RecurrentCache
from mlx_mtp.speculative.draft import MOST_WAITING
from mlx_mtp.speculative.loop import pack
from mlx_mtp.speculative.round import Block, Engine

CONFIG = Path(__file__).parent / "configs" / "qwen3.5-0.8b.json"
MAX_DRAFTS = 4
PROMPT = 8


class Models(NamedTuple):
    """The same checkpoint twice: mlx-lm's own model, and with this project's layers."""

    stock: nn.Module
    ours: nn.Module


def random_models(config: dict) -> Models:
    """Of a config's sizes, in bfloat16."""
    family = family_of(config)
    stock, ours = family.build_model(config), family.build_model(config)
    stock.set_dtype(mx.bfloat16)
    mx.eval(stock.parameters())
    ours.update(stock.parameters())
    family.make_rewindable(ours)
    ours.mtp = family.head(ours, config, family.spec)
    ours.mtp.set_dtype(mx.bfloat16)
    mx.eval(ours.parameters())
    return Models(stock.eval(), ours.eval())


def loaded_models(path: str) -> Models:
    ours, _ = load(path)
    if ours.mtp is None:
        raise SystemExit(f"{path} has no MTP head")
    return Models(load_model(Path(path))[0], ours)


def greedy_step(model: nn.Module, cache: list[Any], token: mx.array) -> list[mx.array]:
    """mlx-lm's plain step: token and log-probabilities."""
    logits = model(token[None], cache=cache)[:, -1, :]
    logprobs = logits - mx.logsumexp(logits, keepdims=True)
    return [mx.argmax(logprobs, axis=-1), logprobs]


class Plain:
    """mlx-lm's loop, one step after the other."""

    def __init__(self, model: nn.Module):
        self.model, self.cache = model, model.make_cache()
        prompt = mx.arange(PROMPT)[None]
        mx.eval(model(prompt, cache=self.cache), self.state())
        self.token = mx.array([1])

    def state(self) -> list[mx.array]:
        return arrays_of([cache.state for cache in self.cache])

    def step(self) -> list[mx.array]:
        outputs = greedy_step(self.model, self.cache, self.token)
        self.token = outputs[0]
        return outputs


class Rounds:
    """This project's loop with K drafts."""

    def __init__(self, model: nn.Module, num_draft_tokens: int):
        self.model, self.engine = model, Engine(target_of(model), model.mtp)
        self.num_draft_tokens = num_draft_tokens
        target, tokens = self.engine.target, mx.arange(PROMPT)[None]
        hidden = target.hidden(tokens, self.engine.cache)
        self.engine.drafter.prime(tokens, hidden, None)
        first = self.engine.first(mx.array([[1]]), mx.array([PROMPT]))
        self.blocks = [first]
        self.settle()

    def settle(self) -> None:
        mx.eval(list(self.blocks[-1]), self.state())

    def state(self) -> list[mx.array]:
        caches = self.engine.caches
        pending = [c.pending for c in caches if isinstance(c, RecurrentCache)]
        blocks = [c.block for c in caches if isinstance(c, RecurrentCache)]
        return arrays_of([[cache.state for cache in caches], pending, blocks])

    def step(self) -> list[mx.array]:
        last: Block = self.blocks[-1]
        width = self.num_draft_tokens + 1
        self.engine.bound(PROMPT + width * len(self.blocks), last.width)
        self.engine.snapshot()
        block = self.engine.round(last, self.num_draft_tokens)
        self.blocks.append(block)
        return [pack(block), block.logprobs]


def arrays_of(tree: Any) -> list[mx.array]:
    return [x for _, x in tree_flatten(tree) if isinstance(x, mx.array)]


def launches_per_step(run: Plain | Rounds) -> int:
    """What one more step adds to the graph, everything it leaves lazy included."""
    run.step()  # the first step behind a prefill is not like the others
    if isinstance(run, Rounds):
        run.settle()
    else:
        mx.eval(run.token, run.state())
    counts, outputs = [], []
    for _ in range(2):
        outputs += run.step()
        counts.append(launches(primitives(outputs, run.state())))
    return counts[1] - counts[0]


def stock_layer_launches(model: nn.Module, num_tokens: int) -> int | None:
    """Of mlx-lm's own Gated DeltaNet layer."""
    layers = [m for _, m in model.named_modules() if hasattr(m, "conv1d")]
    if not layers:
        return None
    layer, cache = layers[0], ArraysCache(2)
    x = leaf((1, num_tokens, layer.hidden_size), layer.conv1d.weight.dtype)
    mx.eval(layer(x, None, cache), cache.cache)
    return launches(primitives(layer(x, None, cache), cache.cache))


def delta_layer_launches(model: nn.Module, num_tokens: int) -> int | None:
    """Of one Gated DeltaNet layer in a verify step of ``num_tokens`` rows."""
    layers = [m for _, m in model.named_modules() if hasattr(m, "conv1d")]
    if not layers:
        return None
    layer, cache = layers[0], RecurrentCache(2)
    dtype = layer.conv1d.weight.dtype
    x = leaf((1, num_tokens, layer.hidden_size), dtype)
    mx.eval(layer(x, None, cache), cache.state, list(cache.block))
    cache.keep(mx.array([1]))
    out = layer(x, None, cache)
    return launches(primitives(out, cache.state, list(cache.block)))


def build_seconds(runs: list[Plain | Rounds], repeats: int) -> list[float]:
    """Median CPU seconds of Python per step, the runs taking turns.

    Nothing is evaluated: a graph takes as long to build behind a lazy one.
    """
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, seconds in zip(runs, times, strict=True):
            start = time.thread_time()
            run.step()
            seconds.append(time.thread_time() - start)
    return [statistics.median(x) for x in times]


def state_traffic(run: Plain | Rounds) -> tuple[float, float]:
    """How often a step reads and writes the recurrent state, per layer.

    Counted in the arguments of the recurrence's launches.
    """
    states = [c[1].shape for c in recurrent(run) if c[1] is not None]
    with logged() as log:
        run.step()
    reads = sum(launch.inputs.count(states[0]) for launch in log) if states else 0
    writes = sum(launch.outputs.count(states[0]) for launch in log) if states else 0
    layers = max(len(states), 1)
    return reads / layers, writes / layers


def recurrent(run: Plain | Rounds) -> list[Any]:
    caches = run.cache if isinstance(run, Plain) else run.engine.cache
    return [cache for cache in caches if isinstance(cache, ArraysCache)]


class Traffic(NamedTuple):
    """Bytes that a step or a round has to move at least.

    Args:
        weights: of target and head, an output layer once per use.
        kv: keys and values, read at ``context`` positions.
        state: recurrent states, convolution windows and the records of a block, read
            and written.
    """

    weights: int
    kv: int
    state: int


def nbytes(module: nn.Module) -> int:
    return sum(x.nbytes for x in arrays_of(module.parameters()))


def kv_bytes(caches: list[Any], context: int) -> int:
    pairs = [(c.keys, c.values) for c in caches if hasattr(c, "keys")]
    rows = [x for pair in pairs for x in pair]
    return sum(context * x.shape[1] * x.shape[3] * x.dtype.size for x in rows)


def traffic(run: Plain | Rounds, context: int) -> Traffic:
    reads, writes = state_traffic(run)
    layers = recurrent(run)
    states = sum(c[1].nbytes for c in layers) * (reads + writes)
    windows = 2 * sum(c[0].nbytes for c in layers)
    model = run.model
    named = dict(model.named_modules())
    names = [n for n in named if n.rsplit(".", 1)[-1] in ("lm_head", "embed_tokens")]
    output = named[sorted(names, key=lambda n: not n.endswith("lm_head"))[0]]
    head = getattr(model, "mtp", None)
    weights = nbytes(model) - (nbytes(head) if head else 0)
    if len(names) > 1:  # of an embedding of its own only a few rows are read
        weights -= sum(nbytes(named[n]) for n in names if n.endswith("embed_tokens"))
    if isinstance(run, Plain):
        return Traffic(weights, kv_bytes(run.cache, context), int(states + windows))
    K = run.num_draft_tokens
    # Of the head: over the block, then one for each further draft. Without drafts,
    # positions wait and are shown to it together.
    passes = K or 1 / MOST_WAITING
    records = [arrays_of(c.block.rows) for c in layers if c.block]
    records = 2 * sum(x.nbytes for rows in records for x in rows)
    return Traffic(
        int(weights + passes * nbytes(head) + K * nbytes(output)),
        kv_bytes(run.engine.cache, context)
        + int(passes * kv_bytes([run.engine.drafter.cache], context)),
        int(states + windows + records),
    )


def measure(models: Models, context: int, repeats: int) -> dict[str, Any]:
    """All counts, under the JSON line's names."""
    drafts = range(MAX_DRAFTS + 1)
    plain, rounds = Plain(models.stock), [Rounds(models.ours, K) for K in drafts]
    result = {
        "launches_plain": launches_per_step(plain),
        "launches_round": {K: launches_per_step(rounds[K]) for K in drafts},
        "launches_delta_layer": delta_layer_launches(models.ours, 2),
        "launches_delta_layer_stock": stock_layer_launches(models.stock, 2),
    }
    traffics = [state_traffic(run) for run in rounds]
    result["state_reads_per_round"] = {K: traffics[K][0] for K in drafts}
    result["state_writes_per_round"] = {K: traffics[K][1] for K in drafts}
    result["bytes_plain"] = traffic(plain, context)._asdict()
    result["bytes_round"] = {K: traffic(rounds[K], context)._asdict() for K in drafts}
    seconds = build_seconds([plain, *rounds], repeats)
    result["build_ms_plain"] = round(seconds[0] * 1e3, 3)
    result["build_ms_round"] = {K: round(seconds[1 + K] * 1e3, 3) for K in drafts}
    result["build_ratio"] = {K: round(seconds[1 + K] / seconds[0], 3) for K in drafts}
    return result


def print_table(result: dict[str, Any]) -> None:
    MB = 1e6
    print(f"{'':12}{'launches':>10}{'build ms':>10}{'state r/w':>12}", end="")
    print(f"{'weights MB':>12}{'KV MB':>8}{'state MB':>10}")
    rows = [("plain", result["launches_plain"], result["build_ms_plain"], "")]
    rows = [(*rows[0], result["bytes_plain"])]
    for K in result["launches_round"]:
        reads = result["state_reads_per_round"][K]
        writes = result["state_writes_per_round"][K]
        rows.append(
            (
                f"round K = {K}",
                result["launches_round"][K],
                result["build_ms_round"][K],
                f"{reads:.0f} / {writes:.0f}",
                result["bytes_round"][K],
            )
        )
    for name, count, ms, state, size in rows:
        print(f"{name:12}{count:>10}{ms:>10.2f}{state:>12}", end="")
        print(f"{size['weights'] / MB:>12.1f}{size['kv'] / MB:>8.1f}", end="")
        print(f"{size['state'] / MB:>10.1f}")
    print(
        f"A Gated DeltaNet layer in a verify step: {result['launches_delta_layer']} "
        f"launches (mlx-lm: {result['launches_delta_layer_stock']})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a converted checkpoint with an MTP head")
    parser.add_argument("--config", default=CONFIG, help="sizes for random weights")
    parser.add_argument("--context", type=int, default=1024, help="positions in KV")
    parser.add_argument("--repeats", type=int, default=30, help="of a build timing")
    args = parser.parse_args()
    with metal_shaped():
        if args.model:
            models = loaded_models(args.model)
        else:
            models = random_models(json.loads(Path(args.config).read_text()))
        result = measure(models, args.context, args.repeats)
    print_table(result)
    print(json.dumps({"model": str(args.model or args.config), **result}))


if __name__ == "__main__":
    main()
