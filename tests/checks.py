"""What the engine's tests compare, against stock mlx-lm as the reference."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import make_prompt_cache

import mlx_mtp
from mlx_mtp.models import FAMILIES
from mlx_mtp.speculative.loop import Loop
from mlx_mtp.speculative.round import Engine

Stream = list[tuple[int, mx.array]]


def plain_stream(path: Path, prompt: Sequence[int], count: int) -> Stream:
    """Tokens and log-probabilities of stock mlx-lm on the same directory."""
    model, _ = mlx_lm.load(str(path))
    return list(generate_step(mx.array(list(prompt)), model, max_tokens=count))


def mtp_stream(
    model, prompt: Sequence[int], count: int, k: int, **kwargs
) -> list[tuple[int, mx.array, bool]]:
    return list(
        mlx_mtp.mtp_generate_step(
            list(prompt), model, num_draft_tokens=k, max_tokens=count, **kwargs
        )
    )


def assert_same_stream(got, want: Stream) -> None:
    """Tokens equal, and the full log-probability rows equal to the last bit."""
    assert [step[0] for step in got] == [token for token, _ in want]
    for position, (step, (_, logprobs)) in enumerate(zip(got, want)):
        assert step[1].dtype == logprobs.dtype
        assert mx.array_equal(step[1], logprobs), f"log-probs differ at {position}"


def engine_of(model, *, head: bool = True, batch_size: int = 1) -> Engine:
    target = FAMILIES[model.model_type].target(model)
    return Engine(target, model.mtp if head else None, batch_size)


def loop_of(engine: Engine, prompts, k: int, count: int, **kwargs) -> Loop:
    arguments = {"prefill_step_size": 2048, "stream": generation_stream} | kwargs
    return Loop(engine, prompts, num_draft_tokens=k, max_tokens=count, **arguments)


def stop_after(loop: Loop, rounds: int) -> list[list[int]]:
    """Tokens per row that a loop has emitted after some rounds (the first is T = 1)."""
    rows = [[] for _ in loop.prompts]
    for result in islice(loop, rounds):
        for row, tokens in zip(rows, result.tokens):
            row += tokens
    return rows


def stock_state(path: Path, tokens: Sequence[int]) -> list:
    """Stock mlx-lm's caches after one forward over the tokens."""
    model, _ = mlx_lm.load(str(path))
    cache = make_prompt_cache(model)
    model(mx.array([list(tokens)]), cache=cache)
    return cache


def assert_target_state(engine: Engine, stock: list, row: int = 0) -> None:
    """Conv windows, recurrent states and KV rows equal stock mlx-lm's, bit for bit."""
    for layer, (ours, theirs) in enumerate(zip(engine.cache, stock)):
        if hasattr(theirs, "keys"):
            size = theirs.offset
            assert ours.offset[row].item() == size, f"layer {layer}: position"
            pairs = [
                ("keys", ours.keys[row, :, :size], theirs.keys[0, :, :size]),
                ("values", ours.values[row, :, :size], theirs.values[0, :, :size]),
            ]
        else:
            pairs = [
                ("conv window", ours[0][row], theirs[0][0]),
                ("recurrent state", ours[1][row], theirs[1][0]),
            ]
        for name, a, b in pairs:
            assert mx.array_equal(a, b), f"layer {layer}: {name}"


def assert_head_state(engine: Engine, tokens: Sequence[int], row: int = 0) -> None:
    """The head's rows equal a run over the pairs (hidden of x[t], embedding of x[t+1]).

    The head's cache may lack the newest positions: those of the last block.
    """
    target, cache = engine.target, engine.drafter.cache
    size = cache.offset[row].item()
    assert 0 < size < len(tokens)
    ids = mx.array([list(tokens)])
    hidden = target.hidden(ids, target.make_cache())
    fresh = engine.drafter.head.make_cache()
    engine.drafter.head(target.embed(ids[:, 1 : size + 1]), hidden[:, :size], fresh)
    assert mx.array_equal(cache.keys[row, :, :size], fresh.keys[0, :, :size])
    assert mx.array_equal(cache.values[row, :, :size], fresh.values[0, :, :size])


def wrong_at(succ: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    """A draft map that is right but after the given tokens."""
    draft = succ.copy()
    for token in tokens:
        draft[token] = (succ[token] + 7) % len(succ)
    return draft
