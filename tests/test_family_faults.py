"""Faults planted in families: the check named beside each must fail."""

from dataclasses import replace

import mlx.core as mx
import pytest
import test_families as checks
from families import family

import mlx_mtp
from mlx_mtp.models import experts, head, latent_attention, linear_attention, mamba2
from mlx_mtp.models.deepseek_v3 import DeepseekV3
from mlx_mtp.models.exaone_moe import ExaoneMoe
from mlx_mtp.models.heads import MTPHeads
from mlx_mtp.models.linear_attention import RewindableKDA, RewindableLinearAttention
from mlx_mtp.models.mamba2 import RewindableMamba2
from mlx_mtp.speculative.cache import RewindableKVCache
from mlx_mtp.speculative.cache_list import RewindableCacheList
from mlx_mtp.speculative.module_cache import LateKVCache, ModuleCaches

pytestmark = checks.pytestmark
MTPHead = head.MTPHead
V32 = latent_attention.AbsorbedDeepseekV32Attention


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """A new case of a family, so that nothing is read before the fault is planted."""
    made = {}

    def case(name: str) -> checks.Case:
        if name not in made:
            root = tmp_path_factory.mktemp(name)
            made[name] = family(name).write(root / "raw", seed=7)
        out = made[name].parent / f"mlx{len(list(made[name].parent.iterdir()))}"
        mlx_mtp.convert(made[name], out)
        return checks.Case(family(name), made[name], out)

    return case


def spec(**changes):
    """Another value in every head that is built."""

    def plant(monkeypatch):
        right = MTPHead.__init__

        def wrong(self, layer, spec, *args, **kwargs):
            right(self, layer, spec, *args, **kwargs)
            self.spec = replace(spec, **changes)

        monkeypatch.setattr(MTPHead, "__init__", wrong)

    return plant


def embedding_of_the_target(monkeypatch):
    monkeypatch.setattr(MTPHead, "embed", lambda self, target, x: target.embed(x))


def output_of_the_target(monkeypatch):
    def wrong(self, target, state):
        return target.output(self.normed(target, state))

    monkeypatch.setattr(MTPHead, "logits", wrong)


def no_window(monkeypatch):
    right = RewindableKVCache.make_mask

    def wrong(self, num_new, return_array=False, window_size=None):
        return right(self, num_new, return_array)

    monkeypatch.setattr(RewindableKVCache, "make_mask", wrong)


def window_of_the_head(monkeypatch):
    monkeypatch.setattr(ExaoneMoe, "head_options", lambda self, args, config: {})


def head_without_positions(monkeypatch):
    right = ExaoneMoe.head_layer

    def wrong(self, args, config):
        layer = right(self, args, config)
        layer.self_attn.use_rope = False
        return layer

    monkeypatch.setattr(ExaoneMoe, "head_layer", wrong)


def only_the_first_is_rewound(monkeypatch):
    monkeypatch.setattr(
        RewindableCacheList, "keep", lambda self, n: self.caches[0].keep(n)
    )


def expanded_verification(monkeypatch):
    """mlx-lm's own branch for several rows: rounded otherwise than a single row's."""
    monkeypatch.setattr(DeepseekV3, "swaps", {})


def all_rows_choose_alike(monkeypatch):
    right = V32.choose

    def wrong(self, *args):
        chosen = right(self, *args)
        return (
            chosen if chosen is None else mx.broadcast_to(chosen[:, :1], chosen.shape)
        )

    monkeypatch.setattr(V32, "choose", wrong)


def choice_of_what_is_left_over(monkeypatch):
    """Entries past a row's position are picked, and then masked."""
    right = V32.choose

    def wrong(self, x, low, mask, cache):
        return right(self, x, low, None, cache)

    monkeypatch.setattr(V32, "choose", wrong)


def experts_reversed(monkeypatch):
    monkeypatch.setattr(
        experts.mx,
        "stack",
        lambda arrays: mx.concatenate([array[None] for array in reversed(arrays)]),
    )


def halves_swapped(monkeypatch):
    right = mx.split

    def wrong(x, *args, **kwargs):
        parts = right(x, *args, **kwargs)
        return parts[::-1] if x.ndim == 3 and kwargs.get("axis") == -2 else parts

    monkeypatch.setattr(experts.mx, "split", wrong)


def beginnings_are_seen(monkeypatch):
    monkeypatch.setattr(LateKVCache, "make_mask", RewindableKVCache.make_mask)


def beginning_not_rewound(monkeypatch):
    """Of a block the last position stands for the last that was kept."""

    def wrong(self, n):
        if self.inputs is not None:
            self.tails = tuple(x[:, -1:] for x in self.inputs)

    monkeypatch.setattr(ModuleCaches, "_cut", wrong)


def first_module_alone(monkeypatch):
    """As vLLM runs such heads."""
    monkeypatch.setattr(MTPHeads, "__init__", one_module)


def one_module(self, heads, right=MTPHeads.__init__):
    right(self, [heads[0]] * len(heads))


def mamba_in_parallel(monkeypatch):
    """mlx-lm's form for several rows: rounded otherwise than a single row's."""

    def wrong(self, block, mask, right=RewindableMamba2.scan):
        if mask is not None:
            return right(self, block, mask)
        return mamba2.ssm_update(
            *(block.x, self.A_log, block.b, block.c, self.D, block.dt, self.dt_bias),
            *(block.state, self.time_step_limit),
        )

    monkeypatch.setattr(RewindableMamba2, "scan", wrong)


def lightning_in_parallel(monkeypatch):
    def wrong(self, block, mask, right=RewindableLinearAttention.scan):
        if mask is not None:
            return right(self, block, mask)
        rows = (block.q, block.k, block.v, self._slope)
        return linear_attention.recurrent_gla(*rows, scale=self.scale, h=block.state)

    monkeypatch.setattr(RewindableLinearAttention, "scan", wrong)


def state_not_rewound(layer):
    """The state is the one behind the whole block."""

    def state_of_the_whole_block(monkeypatch):
        right = layer.scan
        monkeypatch.setattr(
            layer, "scan", lambda self, block, _: right(self, block, None)
        )

    return state_of_the_whole_block


def window_not_rewound(module):
    """The convolution goes on with the last inputs, rejected ones among them."""

    def window_of_the_whole_block(monkeypatch):
        def wrong(x, ends, width):
            return mx.contiguous(x[:, -width:])

        monkeypatch.setattr(module, "conv_window", wrong)

    return window_of_the_whole_block


def gate_left_out(monkeypatch):
    def wrong(self, out, x):
        return self.dense(out.reshape(*out.shape[:2], -1))

    monkeypatch.setattr(latent_attention.AbsorbedBailingV3MLA, "project", wrong)


def latents_not_scaled(monkeypatch):
    monkeypatch.delattr(latent_attention.AbsorbedLongcatFlashMLA, "latents")


HEAD, DRAFTS = checks.test_head_equals_torch, checks.test_drafts_equal_torch
STATES, TARGET = checks.test_states, checks.test_target_equals_torch


def same(case):
    checks.test_drafts_change_nothing(case, 3)


FAULTS = [
    ("mimo", spec(concat="embedding_first"), HEAD),
    ("mimo", spec(mask_first=False), HEAD),
    ("mimo", spec(hidden="post_norm"), DRAFTS),
    ("mimo", spec(chain="post_norm"), DRAFTS),
    ("ernie4_5_moe_no_bias", spec(final_norm="none"), HEAD),
    ("ernie4_5_moe_no_bias", spec(mask_first=False), HEAD),
    ("glm4_moe", spec(chain="pre_norm"), DRAFTS),
    ("glm4_moe_lite", embedding_of_the_target, HEAD),
    ("glm4_moe_lite", output_of_the_target, HEAD),
    ("exaone_moe", no_window, TARGET),
    ("exaone_moe", no_window, DRAFTS),
    ("exaone_moe", window_of_the_head, HEAD),
    ("exaone_moe", head_without_positions, HEAD),
    ("deepseek_v32", only_the_first_is_rewound, STATES),
    ("deepseek_v32", only_the_first_is_rewound, same),
    ("deepseek_v32", all_rows_choose_alike, same),
    ("deepseek_v32", choice_of_what_is_left_over, same),
    ("deepseek_v3", expanded_verification, same),
    ("mimo_v2_flash", spec(modules="chained"), DRAFTS),
    ("step3p5", beginnings_are_seen, DRAFTS),
    ("mimo_v2_flash", beginning_not_rewound, DRAFTS),
    ("mimo_v2_flash", beginning_not_rewound, STATES),
    ("step3p5", spec(modules="target_fed"), DRAFTS),
    ("step3p5", spec(hidden="post_norm"), DRAFTS),
    ("step3p5", spec(chain="post_norm"), DRAFTS),
    ("step3p5", beginning_not_rewound, DRAFTS),
    ("mimo_v2_flash", first_module_alone, HEAD),
    ("step3p5", output_of_the_target, HEAD),
    ("nemotron_h", mamba_in_parallel, same),
    ("nemotron_h", state_not_rewound(RewindableMamba2), STATES),
    ("nemotron_h", window_not_rewound(mamba2), STATES),
    ("nemotron_h", experts_reversed, HEAD),
    ("bailing_hybrid", lightning_in_parallel, same),
    ("bailing_hybrid", state_not_rewound(RewindableLinearAttention), STATES),
    ("bailing_moe_v3", state_not_rewound(RewindableKDA), STATES),
    ("bailing_moe_v3", window_not_rewound(linear_attention), STATES),
    ("bailing_moe_v3", gate_left_out, DRAFTS),
    ("longcat_flash", latents_not_scaled, DRAFTS),
    ("qwen3_5_moe_single_experts", experts_reversed, HEAD),
    ("qwen3_5_moe", halves_swapped, HEAD),
]


@pytest.mark.parametrize(
    ("name", "plant", "check"),
    FAULTS,
    ids=lambda x: getattr(x, "__qualname__", x).split(".")[0],
)
def test_fault_is_seen(make, monkeypatch, name, plant, check):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(make(name))
