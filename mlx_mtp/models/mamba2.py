"""Mamba2 layers whose state can be rewound inside a short block.

mlx-lm runs several tokens in a parallel form, which rounds otherwise than one token
after the other and gives the last state only. Here a short block runs token by token,
so that its rows are those of plain decoding, and is recorded; the recurrence alone is
replayed. The forward follows mlx_lm.models.nemotron_h (MIT, Copyright 2025 Apple Inc.).
"""

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import nemotron_h
from mlx_lm.models.ssm import ssm_update

from ..speculative.cache import MAX_BLOCK, RecurrentCache
from .recorded import Recorded, conv_input, conv_window, ends_of


class Mamba2Block(NamedTuple):
    """What the recurrence of one layer read during a block of T tokens.

    Shapes:
        conv_input: [B, kernel - 1 + T, conv_dim]; state: [B, H, Dh, Ds] or None;
        x: [B, T, H, Dh]; b, c: [B, T, G, Ds]; dt: [B, T, H]
    """

    conv_input: mx.array
    state: mx.array | None
    x: mx.array
    b: mx.array
    c: mx.array
    dt: mx.array


class RewindableMamba2(Recorded, nemotron_h.NemotronHMamba2Mixer):
    def __call__(
        self,
        hidden_states: mx.array,
        mask: mx.array | None,
        cache: Any | None = None,
    ) -> mx.array:
        if isinstance(cache, RecurrentCache):
            cache.commit()
            if hidden_states.shape[1] <= MAX_BLOCK:
                return self.run_short(hidden_states, mask, cache)
        return super().__call__(hidden_states, mask, cache)

    def run_short(
        self, hidden_states: mx.array, mask: mx.array | None, cache: RecurrentCache
    ) -> mx.array:
        """[B, T, hidden_size] -> the same"""
        B, T, _ = hidden_states.shape
        inner, groups = self.intermediate_size, self.n_groups * self.ssm_state_size
        gate, conv, dt = mx.split(
            self.in_proj(hidden_states), [inner, inner + self.conv_dim], axis=-1
        )
        if mask is not None:
            conv = mx.where(mask[..., None], conv, 0)
        width = self.conv_kernel_size - 1
        conv = conv_input(conv, cache[0], width)
        x, b, c = mx.split(nn.silu(self.conv1d(conv)), [inner, inner + groups], axis=-1)
        block = Mamba2Block(
            conv,
            cache[1],
            x.reshape(B, T, self.num_heads, self.head_dim),
            b.reshape(B, T, self.n_groups, self.ssm_state_size),
            c.reshape(B, T, self.n_groups, self.ssm_state_size),
            dt,
        )
        y, state = self.scan(block, mask)
        cache[0], cache[1] = conv_window(conv, ends_of(cache, T), width), state
        cache.advance(T)
        cache.record(block, self.replay)
        return self.out_proj(self.norm(y.reshape(B, T, inner), gate))

    def scan(
        self, block: Mamba2Block, mask: mx.array | None
    ) -> tuple[mx.array, mx.array]:
        """Token by token -> outputs [B, T, H, Dh], last state.

        Tokens outside the mask [B, T] leave the state as it is.
        """
        outputs, state = [], block.state
        for t in range(block.x.shape[1]):
            x, b, c, dt = (a[:, t : t + 1] for a in block[2:])
            y, new = ssm_update(
                *(x, self.A_log, b, c, self.D.astype(x.dtype), dt, self.dt_bias),
                *(state, self.time_step_limit),
            )
            outputs.append(y)
            if mask is not None:
                old = mx.zeros_like(new) if state is None else state
                new = mx.where(mask[:, t, None, None, None], new, old)
            state = new
        return mx.concatenate(outputs, axis=1), state

    def replay(self, block: Mamba2Block, n: mx.array) -> tuple[mx.array, mx.array]:
        """Conv window and state after the first ``n`` [B] tokens of a block."""
        _, state = self.scan(block, mx.arange(block.x.shape[1]) < n[:, None])
        window = conv_window(block.conv_input, n, self.conv_kernel_size - 1)
        return window, state


REWINDABLE = {nemotron_h.NemotronHMamba2Mixer: RewindableMamba2}
