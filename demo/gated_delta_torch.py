"""A Gated DeltaNet layer that trains fast on a CPU.

Same mathematics as transformers' ``Qwen3_5GatedDeltaNet``; only the two slow parts are
replaced: the chunked delta rule (one triangular solve a chunk instead of a Python loop)
and the depthwise convolution (shifted multiply-adds; ``conv1d`` is slow backwards).
"""

import torch
import torch.nn.functional as F
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

CHUNK = 32


def causal_conv1d(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Depthwise causal convolution and SiLU. Shapes: x [B, C, T], weight [C, K]."""
    width, length = weight.shape[1], x.shape[-1]
    y = sum(
        F.pad(x, (width - 1 - i, 0))[..., :length] * weight[:, i, None]
        for i in range(width)
    )
    return F.silu(y)


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """Gated delta rule from a zero state, a chunk at a time.

    Within a chunk the updates form a unit lower triangular system, solved at once
    (Yang et al., 2024, https://arxiv.org/abs/2412.06464).

    Shapes:
        q, k: [B, T, Hk, Dk]; v: [B, T, Hv, Dv]; g (log decay), beta: [B, T, Hv];
        result: [B, T, Hv, Dv]
    """
    dtype, length = v.dtype, v.shape[1]
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    g, beta = (x.transpose(1, 2).float() for x in (g, beta))
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * q.shape[-1] ** -0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    if (groups := v.shape[1] // k.shape[1]) > 1:
        q, k = (x.repeat_interleave(groups, 1) for x in (q, k))
    if pad := -length % chunk:
        q, k, v = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v))
        g, beta = (F.pad(x, (0, pad)) for x in (g, beta))

    q, k, v = (x.unflatten(2, (-1, chunk)) for x in (q, k, v))  # [B, H, N, C, D]
    beta = beta.unflatten(2, (-1, chunk))[..., None]
    decay = g.unflatten(2, (-1, chunk)).cumsum(-1)
    between = (decay[..., :, None] - decay[..., None, :]).tril().exp().tril()
    lower = ((k * beta) @ k.transpose(-1, -2) * between).tril(-1)
    eye = torch.eye(chunk, dtype=lower.dtype)
    inverse = torch.linalg.solve_triangular(
        lower + eye, eye.expand_as(lower), upper=False, unitriangular=True
    )
    values = inverse @ (v * beta)
    keys = inverse @ (k * beta * decay.exp()[..., None])
    attention = q @ k.transpose(-1, -2) * between
    queries = q * decay.exp()[..., None]
    writes = k * (decay[..., -1:] - decay).exp()[..., None]
    total = decay[..., -1].exp()[..., None, None]

    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    outputs = []
    parts = (x.unbind(2) for x in (values, keys, queries, attention, writes, total))
    for value, key, query, attend, write, scale in zip(*parts, strict=True):
        new = value - key @ state
        outputs.append(query @ state + attend @ new)
        state = state * scale + write.transpose(-1, -2) @ new
    return torch.cat(outputs, 2)[:, :, :length].transpose(1, 2).to(dtype)


class FastGatedDeltaNet(Qwen3_5GatedDeltaNet):
    """The layer's training forward: whole sequences, no cache, no padding."""

    def forward(self, hidden_states: torch.Tensor, **_) -> torch.Tensor:
        x = hidden_states
        qkv = self.in_proj_qkv(x).transpose(1, 2)
        qkv = causal_conv1d(qkv, self.conv1d.weight[:, 0]).transpose(1, 2)
        q, k, v = qkv.split((self.key_dim, self.key_dim, self.value_dim), -1)
        q, k = (y.unflatten(-1, (-1, self.head_k_dim)) for y in (q, k))
        v, z = (y.unflatten(-1, (-1, self.head_v_dim)) for y in (v, self.in_proj_z(x)))
        g = F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        g = -self.A_log.float().exp() * g
        y = chunk_gated_delta_rule(q, k, v, g, self.in_proj_b(x).sigmoid())
        return self.out_proj(self.norm(y, z).flatten(-2))

    @classmethod
    def share(cls, layer: Qwen3_5GatedDeltaNet) -> "FastGatedDeltaNet":
        """The same layer, the same parameters, this class's forward."""
        fast = cls.__new__(cls)
        fast.__dict__ = layer.__dict__
        return fast
