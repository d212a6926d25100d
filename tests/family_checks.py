"""Runs of one family's converted checkpoint that the tests compare."""

from collections.abc import Iterator, Sequence

import mlx.core as mx
from checks import loop_of

from mlx_mtp.models import FAMILIES
from mlx_mtp.speculative.draft import Drafts
from mlx_mtp.speculative.round import Block, Engine

# A prefill in such chunks runs latent attention in the form of a verify block.
CHUNK = 8


class PlannedEngine(Engine):
    """Drafts what the test says, so that a random head's drafts are accepted too.

    The head runs all the same. Row ``b`` drafts ``planned[b][p]`` at position p.
    """

    def __init__(self, model, planned: Sequence[Sequence[int]], **kwargs):
        target = FAMILIES[model.model_type].target(model)
        super().__init__(target, model.mtp, len(planned), **kwargs)
        self.planned = mx.array(planned, mx.int32)

    def draft(self, last: Block, num_draft_tokens: int) -> Drafts:
        super().draft(last, num_draft_tokens)
        at = last.position[:, None] + 1 + mx.arange(num_draft_tokens)
        return Drafts(mx.take_along_axis(self.planned, at, axis=1))


def plan(text: Sequence[int], vocab_size: int, room: int) -> list[int]:
    """The text with every fourth token replaced, and ``room`` for drafts behind it."""
    wrong = [(t + 1) % vocab_size if p % 4 == 3 else t for p, t in enumerate(text)]
    return wrong + [0] * room


def rounds(loop, count: int) -> Iterator[tuple[list[list[int]], mx.array]]:
    """Tokens and log-probabilities of the first rounds."""
    for number, result in enumerate(loop, 1):
        yield result.tokens, result.logprobs
        if number == count:
            return


def planned_loop(model, prompts, texts, k: int, **kwargs):
    """A loop that drafts each row's text, with some errors."""
    target = FAMILIES[model.model_type].target(model)
    longest = max(map(len, texts))
    plans = [plan(t, target.vocab_size, longest - len(t) + 16) for t in texts]
    engine = PlannedEngine(model, plans)
    kwargs = {"prefill_step_size": CHUNK} | kwargs
    return engine, loop_of(engine, prompts, k, 100, **kwargs)


def cached_arrays(cache, row: int = 0) -> list[mx.array]:
    """What a layer's cache holds of a row: states, or keys and values in order."""
    if hasattr(cache, "caches"):
        return [array for one in cache.caches for array in cached_arrays(one, row)]
    if not hasattr(cache, "offset"):
        return [array[row] for array in cache.cache]
    size = cache.offset[row].item()
    arrays = []
    for kept in (cache.keys, cache.values):
        parts = kept if isinstance(kept, tuple) else (kept,)
        arrays += [part[row, :, :size] for part in parts]
    return arrays


def assert_same_caches(got, want, row: int = 0) -> None:
    """Every layer's contents, bit for bit. ``want`` has one row."""
    for layer, (ours, fresh) in enumerate(zip(got, want, strict=True)):
        arrays = zip(cached_arrays(ours, row), cached_arrays(fresh), strict=True)
        for number, (a, b) in enumerate(arrays):
            assert a.shape == b.shape, f"layer {layer}, array {number}"
            assert mx.array_equal(a, b), f"layer {layer}, array {number}"


def fresh_states(model, tokens: Sequence[int]) -> tuple[list, mx.array]:
    """The target's caches and hidden states after the tokens, in chunks."""
    target = FAMILIES[model.model_type].target(model)
    cache, hidden = target.make_cache(), []
    for start in range(0, len(tokens), CHUNK):
        hidden.append(target.hidden(mx.array([tokens[start : start + CHUNK]]), cache))
    return cache, mx.concatenate(hidden, axis=1)


def fresh_head_cache(model, tokens: Sequence[int], size: int):
    """The head's cache after the first ``size`` pairs of the tokens."""
    target, head = FAMILIES[model.model_type].target(model), model.mtp
    _, hidden = fresh_states(model, tokens[:size])
    embedding = head.embed(target, mx.array([tokens[1 : size + 1]]))
    cache = head.make_cache()
    for start in range(0, size, CHUNK):
        part = slice(start, start + CHUNK)
        head(embedding[:, part], hidden[:, part], cache)
    return cache
