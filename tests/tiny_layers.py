"""Random tensors of the tiny checkpoints' layers, in raw Hugging Face layout."""

from dataclasses import dataclass

import numpy as np

WEIGHT_STD = 0.15

Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class Dims:
    """Sizes; ``hk``, ``hv``, ``dk``, ``dv`` are those of the Gated DeltaNet layers."""

    hidden: int
    layers: int
    interval: int
    hk: int
    hv: int
    dk: int
    dv: int
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 64
    kernel: int = 4

    def full_attention(self, layer: int) -> bool:
        return (layer + 1) % self.interval == 0


class Maker:
    """Draws the tensors of the layers, in raw layout."""

    def __init__(self, dims: Dims, *, seed: int, norm_std: float):
        self.dims, self.norm_std = dims, norm_std
        self.rng = np.random.default_rng(seed)

    def normal(self, *shape: int, std: float = WEIGHT_STD) -> np.ndarray:
        return (self.rng.standard_normal(shape) * std).astype(np.float32)

    def norm(self, size: int) -> np.ndarray:
        return self.normal(size, std=self.norm_std)

    def attention(self, gain: float) -> Weights:
        d = self.dims
        q, kv = d.heads * d.head_dim, d.kv_heads * d.head_dim
        return {
            "q_proj.weight": self.normal(2 * q, d.hidden),  # query and output gate
            "k_proj.weight": self.normal(kv, d.hidden),
            "v_proj.weight": self.normal(kv, d.hidden),
            "o_proj.weight": gain * self.normal(d.hidden, q),
            "q_norm.weight": self.norm(d.head_dim),
            "k_norm.weight": self.norm(d.head_dim),
        }

    def gated_delta(self, gain: float) -> Weights:
        d = self.dims
        values = d.hv * d.dv
        channels = 2 * d.hk * d.dk + values
        return {
            "in_proj_qkv.weight": self.normal(channels, d.hidden),
            "in_proj_z.weight": self.normal(values, d.hidden),
            "in_proj_b.weight": self.normal(d.hv, d.hidden),
            "in_proj_a.weight": self.normal(d.hv, d.hidden),
            "conv1d.weight": self.normal(channels, 1, d.kernel, std=0.45),
            "dt_bias": np.ones(d.hv, np.float32),
            "A_log": np.log(self.rng.uniform(0.5, 4, d.hv)).astype(np.float32),
            "norm.weight": 1 + self.norm(d.dv),  # the one norm centred on one
            "out_proj.weight": gain * self.normal(d.hidden, values),
        }

    def layer(self, full_attention: bool, gain: float) -> Weights:
        d = self.dims
        name = "self_attn" if full_attention else "linear_attn"
        mixer = self.attention(gain) if full_attention else self.gated_delta(gain)
        return {f"{name}.{key}": value for key, value in mixer.items()} | {
            "mlp.gate_proj.weight": self.normal(d.intermediate, d.hidden),
            "mlp.up_proj.weight": self.normal(d.intermediate, d.hidden),
            "mlp.down_proj.weight": gain * self.normal(d.hidden, d.intermediate),
            "input_layernorm.weight": self.norm(d.hidden),
            "post_attention_layernorm.weight": self.norm(d.hidden),
        }
