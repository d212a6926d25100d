"""A target and a head that are tables, for tests that need thousands of runs.

The next token depends on the last one only, so there is nothing to cache and every
probability is known exactly.
"""

import mlx.core as mx
import numpy as np

from mlx_mtp.speculative.cache import RewindableKVCache


class MarkovTarget:
    """``logits(x) = table[token]``; the hidden state is the token's one-hot vector."""

    def __init__(self, table: np.ndarray):
        self.table = mx.array(table.astype(np.float32))
        self.vocab_size = len(table)

    def make_cache(self, batch_size: int = 1) -> list:
        return []

    def embed(self, tokens: mx.array) -> mx.array:
        return mx.eye(self.vocab_size)[tokens]

    def hidden(self, tokens: mx.array, cache: list) -> mx.array:
        return self.embed(tokens)

    def logits(self, hidden: mx.array) -> mx.array:
        return hidden @ self.table


class MarkovHead:
    """Drafts from row ``rows[token]`` of the target's table.

    With ``rows`` the identity it is perfect, with any other map it is wrong.
    """

    def __init__(self, rows: np.ndarray):
        self.rows = mx.array(np.eye(len(rows), dtype=np.float32)[rows])

    def embed(self, target: MarkovTarget, tokens: mx.array) -> mx.array:
        return target.embed(tokens)

    def logits(self, target: MarkovTarget, state: mx.array) -> mx.array:
        return target.logits(state)

    def make_cache(self, batch_size: int = 1) -> RewindableKVCache:
        return RewindableKVCache(batch_size)

    def __call__(self, embedding, hidden, cache) -> mx.array:
        rows = mx.zeros((*embedding.shape[:1], 1, embedding.shape[1], 1))
        cache.update_and_fetch(rows, rows)
        return embedding @ self.rows
