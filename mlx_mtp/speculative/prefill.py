"""Prompts -> caches. The head sees every prompt position, over chunk borders too."""

from collections.abc import Callable, Sequence

import mlx.core as mx

from .round import Block, Engine

Progress = Callable[[int, int], None]
Checkpoint = Callable[[int, mx.array | None], None]


def prefill(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    step_size: int,
    progress: Progress | None = None,
    checkpoint: Checkpoint = lambda done, carry: None,
) -> Block:
    """Run all prompts but their last tokens in chunks, then the last tokens as a step.

    The shapes are those of mlx-lm's plain generation, so rounding is the same.

    Args:
        engine: whose caches hold the same number of positions in every row.
        prompts: one list of token ids per row, none empty; lengths may differ.
        step_size: tokens per chunk.
        progress: called with the tokens done and the tokens in all (longest prompt).
        checkpoint: called when the caches hold a whole number of chunks, with the
            tokens done and the hidden state of the last.

    Returns:
        The block that holds each row's first token.
    """
    lengths = [len(prompt) for prompt in prompts]
    longest, shortest = max(lengths), min(lengths)
    report = progress or (lambda *_: None)
    report(0, longest)
    rows = mx.array([[*p, *[0] * (longest - len(p))] for p in prompts], mx.int32)
    before_last = mx.array(lengths, mx.int32) - 1
    engine.commit()
    checkpoint(0, engine.carry)
    engine.prime_carry(rows[:, :1])
    for start in range(0, longest - 1, step_size):
        end = min(start + step_size, longest - 1)
        # Only ragged chunks need to be told where the rows end.
        ragged = shortest - 1 < end
        chunk_lengths = mx.clip(before_last - start, 0, end - start) if ragged else None
        hidden = run_chunk(engine, rows[:, start : end + 1], chunk_lengths)
        engine.quantize(engine.length + end)
        checkpoint(end, hidden[:, -1:])
        report(end, longest)
        mx.clear_cache()
    last = mx.take_along_axis(rows, before_last[:, None], axis=1)
    return engine.first(last, engine.length + before_last)


def run_chunk(engine: Engine, tokens: mx.array, lengths: mx.array | None) -> mx.array:
    """Run and evaluate a chunk of T positions; returns their hidden states [B, T, H].

    Shapes:
        tokens: [B, T + 1], the chunk and one token more, for the head
        lengths: [B], how many of the T positions are real; None for all
    """
    if lengths is not None:
        for cache in engine.cache:
            cache.prepare(lengths)
    hidden = engine.target.hidden(tokens[:, :-1], engine.cache)
    if lengths is not None:
        for cache in engine.cache:
            cache.finalize()
    if engine.drafter:
        engine.drafter.prime(tokens[:, 1:], hidden, lengths)
    mx.eval([cache.state for cache in engine.caches])
    return hidden
