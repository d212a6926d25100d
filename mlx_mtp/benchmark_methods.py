"""Ways to generate greedily, each as an iterator over token ids, for benchmarks.

``stock`` is mlx-lm's own loop. ``simple`` is the scheme that needs no machinery: one
draft, all states copied before the verification, and the model run again on a miss.
"""

from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import ArraysCache, make_prompt_cache, trim_prompt_cache

from .draft_memory import NumDraftTokens
from .generate_step import SpeculationStats, steps, target_of
from .speculative.accept import greedy_tokens, log_probs

# What is asked of a method: prompt, tokens, and where to leave the counters, if any.
Method = Callable[[Sequence[int], int, list[SpeculationStats]], Iterator[int]]


def stock(model: nn.Module) -> Method:
    """Plain decoding by mlx-lm."""

    def run(
        prompt: Sequence[int], count: int, counters: list[SpeculationStats]
    ) -> Iterator[int]:
        for token, _ in generate_step(mx.array(prompt), model, max_tokens=count):
            yield token

    return run


def ours(model: nn.Module, num_draft_tokens: NumDraftTokens | None) -> Method:
    """This package; None for plain decoding without the head."""

    def run(
        prompt: Sequence[int], count: int, counters: list[SpeculationStats]
    ) -> Iterator[int]:
        mtp = num_draft_tokens is not None
        k = num_draft_tokens if mtp else 0
        iterator = steps(prompt, model, mtp=mtp, num_draft_tokens=k, max_tokens=count)
        for step in iterator:
            yield step.token
        counters.append(step.stats)

    return run


def simple(model: nn.Module) -> Method:
    """One draft, states copied, the model run again on a miss; the host waits."""

    def run(
        prompt: Sequence[int], count: int, counters: list[SpeculationStats]
    ) -> Iterator[int]:
        stats = SpeculationStats()
        with mx.stream(generation_stream):
            scheme = Simple(model, prompt)
            yield scheme.pending
            emitted = 1
            while emitted < count:
                tokens = scheme.round()
                stats = stats.after(1, len(tokens) - 1)
                yield from tokens[: count - emitted]
                emitted += len(tokens)
        counters.append(stats)

    return run


class Simple:
    """The state of the simple scheme behind a prompt."""

    def __init__(self, model: nn.Module, prompt: Sequence[int]):
        self.target, self.head = target_of(model), model.mtp
        self.cache = make_prompt_cache(model)
        self.head_cache = self.head.make_cache(1)
        ids = mx.array([list(prompt)])
        hidden = self.target.hidden(ids, self.cache)
        self.pending = self._last_token(hidden).item()
        # The head pairs each hidden state with the token behind it.
        following = mx.array([[*prompt[1:], self.pending]])
        self.state = self._draft_state(following, hidden)

    def round(self) -> list[int]:
        """One or two tokens."""
        logits = self.head.logits(self.target, self.state[:, -1:])
        draft = greedy_tokens(log_probs(logits)).item()
        arrays = [c for c in self.cache if isinstance(c, ArraysCache)]
        copies = [[mx.array(x) for x in c.cache] for c in arrays]
        mx.eval(copies)
        pair = mx.array([[self.pending, draft]])
        hidden = self.target.hidden(pair, self.cache)
        logits = self.target.logits(hidden)
        first, second = greedy_tokens(log_probs(logits))[0].tolist()
        if first == draft:
            tokens = [first, second]
        else:
            for cache, states in zip(arrays, copies, strict=True):
                cache.cache = states
            trim_prompt_cache([c for c in self.cache if c not in arrays], 2)
            hidden = self.target.hidden(pair[:, :1], self.cache)
            tokens = [first]
        self.state = self._draft_state(mx.array([tokens]), hidden)
        self.pending = tokens[-1]
        return tokens

    def _last_token(self, hidden: mx.array) -> mx.array:
        logits = self.target.logits(hidden[:, -1:])
        return greedy_tokens(log_probs(logits))

    def _draft_state(self, following: mx.array, hidden: mx.array) -> mx.array:
        embedding = self.head.embed(self.target, following)
        state = self.head(embedding, hidden, self.head_cache)
        mx.eval(state, self.head_cache.state)
        return state
