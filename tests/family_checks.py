"""Runs of one family's converted checkpoint that the tests compare."""

from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np
from checks import loop_of

from mlx_mtp.models import FAMILIES
from mlx_mtp.speculative.draft import Drafts
from mlx_mtp.speculative.module_drafter import drafter_of
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
        self.made: list[mx.array] = []  # the logits of the head's own drafts

    def choose(self, start, logits, index):
        self.made.append(logits)
        return super().choose(start, logits, index)

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


def draft_logits(
    model, prompt: Sequence[int], text: Sequence[int], k: int, count: int
) -> Iterator[tuple[list[int], np.ndarray]]:
    """Of every round: the tokens known before it, and the head's logits [K, V].

    What is judged is the text with errors, so drafts are accepted and rejected.
    """
    engine, loop = planned_loop(model, [prompt], [text], k, depth=0)
    tokens = list(prompt)
    for number, ((new,), _) in enumerate(rounds(loop, count + 1)):
        tokens += new
        made = engine.made[number * k : (number + 1) * k]
        if len(made) == k:
            yield list(tokens), np.stack([np.array(x[0, 0]) for x in made])


def cached_arrays(cache, row: int = 0) -> list[mx.array]:
    """What a layer's cache holds of a row: states, or keys and values in order."""
    if hasattr(cache, "caches"):
        arrays = [array for one in cache.caches for array in cached_arrays(one, row)]
        return arrays + [tail[row] for tail in getattr(cache, "tails", ())]
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
    drafter = drafter_of(model.mtp, FAMILIES[model.model_type].target(model), 1)
    _, hidden = fresh_states(model, tokens[:size])
    following = mx.array([tokens[1 : size + 1]])
    for start in range(0, size, CHUNK):
        part = slice(start, start + CHUNK)
        drafter.prime(following[:, part], hidden[:, part], None)
    return drafter.cache
