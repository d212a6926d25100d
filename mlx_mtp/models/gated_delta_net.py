"""Gated DeltaNet layers whose state can be rewound inside a short block.

A short block (a verify pass) is recorded in the layer's cache. On Metal a layer runs
on the project's kernels and the rewind is part of the next block's launch; elsewhere
it runs on MLX's operations and the recurrence alone is replayed.
"""

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models import qwen3_5, qwen3_next
from mlx_lm.models.gated_delta import compute_g, gated_delta_update, normalize_qk

from ..kernels import dispatch
from ..kernels.gated_delta_prologue import (
    NORM_EPS,
    Columns,
    Sizes,
    Weights,
    gated_delta_prologue,
)
from ..kernels.gated_delta_verify import MAX_ROWS, Rows, gated_delta_verify
from ..kernels.gated_rms_norm import gated_rms_norm
from ..speculative.cache import MAX_BLOCK, RecurrentCache
from .joined_linear import JoinedLinear, joined

assert MAX_ROWS == MAX_BLOCK


class GatedDeltaBlock(NamedTuple):
    """What the recurrence of one layer read during a block of T tokens.

    Shapes:
        conv_input: [B, kernel - 1 + T, conv_dim]; state: [B, Hv, Dv, Dk] or None;
        q, k: [B, T, Hk, Dk]; v: [B, T, Hv, Dv]; a, b: [B, T, Hv]
    """

    conv_input: mx.array
    state: mx.array | None
    q: mx.array
    k: mx.array
    v: mx.array
    a: mx.array
    b: mx.array


class KernelBlock(NamedTuple):
    """The same for a block that ran on the kernels: the next launch replays it.

    Shapes:
        window: [B, kernel - 1, conv_dim], before the block; state: [B, Hv, Dv, Dk],
        before the block; qkv: [B, T, N], the projection with qkv in it; k, v, g, beta:
        see ``Rows``
    """

    window: mx.array
    state: mx.array
    qkv: mx.array
    k: mx.array
    v: mx.array
    g: mx.array
    beta: mx.array

    @property
    def rows(self) -> Rows:
        return Rows(self.k, self.v, self.g, self.beta)


class Projections(NamedTuple):
    """The layer's four projections of its input; qkv begins its array.

    Shapes:
        qkv: [B, T, 2 Hk Dk + Hv Dv]; z: [B, T, Hv Dv]; b, a: [B, T, Hv]
    """

    qkv: Columns
    z: Columns
    b: Columns
    a: Columns


def whole(array: mx.array) -> Columns:
    return Columns(array, 0, array.shape[-1])


class Rewindable(nn.Module):
    """Put before mlx-lm's layer: shares its weights, records short blocks in its cache.

    The forward follows mlx_lm.models.qwen3_5.GatedDeltaNet (MIT, Copyright 2026 Apple
    Inc.). With any other cache the stock forward runs.
    """

    @classmethod
    def from_base(cls, layer: nn.Module) -> "Rewindable":
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        new.__dict__.update(layer.__dict__)
        dict.update(new, layer)
        return new

    def __call__(
        self,
        inputs: mx.array,
        mask: mx.array | None = None,
        cache: Any | None = None,
    ) -> mx.array:
        if not isinstance(cache, RecurrentCache):
            return super().__call__(inputs, mask, cache)
        short = inputs.shape[1] <= MAX_BLOCK and mask is None
        if short and not self.training and dispatch.usable(self.sizes(inputs.dtype)):
            out = self.out_proj(self.run_kernels(inputs, cache))
        else:
            out = self.out_proj(self.run_ops(inputs, mask, cache))
        group = getattr(self, "sharding_group", None)
        return out if group is None else mx.distributed.all_sum(out, group=group)

    def project(self, inputs: mx.array) -> Projections:
        """[B, T, hidden_size] -> what the recurrence and its gate read."""
        raise NotImplementedError

    def join_projections(self) -> None:
        """Make one matrix of the projections where their formats agree."""

    def sizes(self, dtype: mx.Dtype) -> Sizes:
        sizes = self.get("_sizes")
        if sizes is None or sizes.dtype != dtype:
            self["_sizes"] = sizes = Sizes(
                *(self.num_k_heads, self.num_v_heads),
                *(self.head_k_dim, self.head_v_dim),
                *(self.conv_kernel_size, dtype),
            )
        return sizes

    @property
    def note(self) -> str | None:
        """Why a layer that has run does without the kernels although it should not."""
        sizes = self.get("_sizes")
        return sizes and dispatch.failure(sizes)

    def run_kernels(self, inputs: mx.array, cache: RecurrentCache) -> mx.array:
        """A short block -> [B, T, Hv Dv] in three launches behind the projection.

        The rewind that is pending in the cache is carried out on the way, and the
        state that the cache gets is the one before the block.
        """
        B, T, _ = inputs.shape
        qkv, z, b, a = self.project(inputs)
        previous, n_prev = cache.deferred(KernelBlock, B)
        window, state = self._start(cache, previous, inputs)
        before = qkv if previous is None else qkv._replace(array=previous.qkv)
        window, q, rows = gated_delta_prologue(
            *(window, before, n_prev, qkv, a, b),
            *(self.kernel_weights(), self.sizes(inputs.dtype)),
        )
        replayed = rows if previous is None else previous.rows
        out, state = gated_delta_verify(state, replayed, n_prev, q, rows)
        cache[0], cache[1] = window, state
        cache.record(KernelBlock(window, state, qkv.array, *rows), self.replay_kernels)
        cache.keep_all(T)
        return gated_rms_norm(out, z, self.norm.weight, self.norm.eps)

    def _start(
        self, cache: RecurrentCache, previous: KernelBlock | None, inputs: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Window and state to start from, zeros for an empty cache."""
        B = inputs.shape[0]
        window, state = cache[0], cache[1]
        if window is None:
            window = mx.zeros(
                (B, self.conv_kernel_size - 1, self.conv_dim), inputs.dtype
            )
        if state is None:
            state = mx.zeros((B, self.num_v_heads, self.head_v_dim, self.head_k_dim))
        return window, state

    def kernel_weights(self) -> Weights:
        return Weights(self["conv1d"]["weight"], self["A_log"], self["dt_bias"])

    def replay_kernels(
        self, block: KernelBlock, n: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Conv window and state after the first ``n`` [B] tokens of a block.

        The launches of a forward, with the block itself as the one before; what they
        compute for a block behind it is not used.
        """
        qkv = Columns(block.qkv, 0, self.conv_dim)
        gates = Columns(block.qkv, 0, self.num_v_heads)
        window, q, rows = gated_delta_prologue(
            *(block.window, qkv, n, qkv, gates, gates),
            *(self.kernel_weights(), self.sizes(block.qkv.dtype)),
        )
        _, state = gated_delta_verify(block.state, block.rows, n, q, rows)
        return window, state

    def run_ops(
        self, inputs: mx.array, mask: mx.array | None, cache: RecurrentCache
    ) -> mx.array:
        """Any block -> [B, T, Hv Dv] in MLX's operations."""
        B, T, _ = inputs.shape
        cache.commit()
        qkv, z, b, a = (columns.sliced() for columns in self.project(inputs))
        if mask is not None:
            qkv = mx.where(mask[..., None], qkv, 0)
        window = cache[0]
        if window is None:
            window = mx.zeros((B, self.conv_kernel_size - 1, self.conv_dim), qkv.dtype)
        conv_input = mx.concatenate([window, qkv], axis=1)
        conv_out = nn.silu(self.conv1d(conv_input))
        q, k, v = (
            x.reshape(B, T, -1, dim)
            for x, dim in zip(
                mx.split(conv_out, [self.key_dim, 2 * self.key_dim], axis=-1),
                (self.head_k_dim, self.head_k_dim, self.head_v_dim),
                strict=True,
            )
        )
        q, k = normalize_qk(q, k, inv_scale=self.head_k_dim**-0.5, eps=NORM_EPS)
        block = GatedDeltaBlock(conv_input, cache[1], q, k, v, a, b)
        out, state = self.scan(block, mask)
        ends = T if cache.lengths is None else mx.clip(cache.lengths, 0, T)
        cache[0], cache[1] = self.conv_window(conv_input, ends), state
        cache.advance(T)
        if T <= MAX_BLOCK:
            cache.record(block, self.replay)
        out = self.norm(out, z.reshape(B, T, -1, self.head_v_dim))
        return out.reshape(B, T, -1)

    def scan(
        self, block: GatedDeltaBlock, mask: mx.array | None
    ) -> tuple[mx.array, mx.array]:
        """The delta rule over a block -> outputs [B, T, Hv, Dv], last state."""
        Hk, Dk, Hv, Dv = *block.k.shape[2:], *block.v.shape[2:]
        long = block.q.shape[1] > MAX_BLOCK and mask is None and not self.training
        if long and dispatch.native_scan(Hk, Hv, Dk, Dv):
            return self.native_scan(block)
        return gated_delta_update(
            *(block.q, block.k, block.v, block.a, block.b),
            *(self.A_log, self.dt_bias, block.state, mask),
            use_kernel=not self.training,
        )

    def native_scan(self, block: GatedDeltaBlock) -> tuple[mx.array, mx.array]:
        """The same by MLX's own chunked kernels, which return the last state only."""
        g = compute_g(self.A_log, block.a, self.dt_bias)
        out, state = mx.fast.gated_delta_update(
            *(block.q, block.k, block.v, g, mx.sigmoid(block.b)),
            initial_state=block.state,
        )
        return out, state

    def conv_window(self, conv_input: mx.array, ends: int | mx.array) -> mx.array:
        """The inputs the convolution needs next, after ``ends`` tokens of the block."""
        width = self.conv_kernel_size - 1
        if isinstance(ends, int):
            return mx.contiguous(conv_input[:, ends : ends + width])
        at = (ends[:, None] + mx.arange(width))[..., None]
        return mx.take_along_axis(conv_input, at, axis=1)

    def replay(self, block: GatedDeltaBlock, n: mx.array) -> tuple[mx.array, mx.array]:
        """Conv window and state after the first ``n`` [B] tokens of a block.

        Only the recurrence runs again: no projection, no MLP.
        """
        mask = mx.arange(block.q.shape[1]) < n[:, None]
        _, state = self.scan(block, mask)
        return self.conv_window(block.conv_input, n), state


PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


class RewindableGatedDeltaNet(Rewindable, qwen3_5.GatedDeltaNet):
    """Qwen3.5's layer: four projections."""

    _joined: JoinedLinear | None = None

    def project(self, inputs: mx.array) -> Projections:
        if self._joined is not None and self._joined.stands(self):
            return Projections(*self._joined(inputs))
        return Projections(*(whole(self[name](inputs)) for name in PROJECTIONS))

    def join_projections(self) -> None:
        self._joined = joined({name: self[name] for name in PROJECTIONS})


class RewindableQwen3NextGatedDeltaNet(Rewindable, qwen3_next.Qwen3NextGatedDeltaNet):
    """Qwen3-Next's layer: two projections, their rows grouped by key head."""

    def project(self, inputs: mx.array) -> Projections:
        B, T, _ = inputs.shape
        q, k, v, z, b, a = self.fix_query_key_value_ordering(
            self.in_proj_qkvz(inputs), self.in_proj_ba(inputs)
        )
        qkv = mx.concatenate([x.reshape(B, T, -1) for x in (q, k, v)], axis=-1)
        return Projections(*map(whole, (qkv, z.reshape(B, T, -1), b, a)))


REWINDABLE = {
    qwen3_5.GatedDeltaNet: RewindableGatedDeltaNet,
    qwen3_next.Qwen3NextGatedDeltaNet: RewindableQwen3NextGatedDeltaNet,
}


def swap_gated_delta(model: nn.Module) -> None:
    """Swap the model's Gated DeltaNet layers in place; the weights are shared."""
    swaps = []
    for name, module in model.named_modules():
        if type(module) in REWINDABLE:
            layer = REWINDABLE[type(module)].from_base(module)
            if dispatch.on_metal():
                layer.join_projections()
            swaps.append((name, layer))
    model.update_modules(tree_unflatten(swaps))
