"""Faults planted on purpose: for each, a check of the suite must fail.

A lossless engine hides most faults of the head, and a tiny model hides some faults of
the state, so that the checks have teeth is itself tested.
"""

import dataclasses
import shutil

import mlx.core as mx
import pytest
from checkpoints import build
from checks import (
    assert_head_state,
    assert_same_stream,
    assert_target_state,
    engine_of,
    loop_of,
    mtp_stream,
    plain_stream,
    stock_state,
    stop_after,
    wrong_at,
)
from drafting import assert_drafts_equal_oracle

import mlx_mtp
from mlx_mtp import convert
from mlx_mtp.models import head as head_module
from mlx_mtp.models.gated_delta_net import RewindableGatedDeltaNet
from mlx_mtp.models.head import MTPHead
from mlx_mtp.models.qwen3_5 import Qwen35
from mlx_mtp.speculative.cache import RewindableKVCache
from mlx_mtp.speculative.draft import Drafter
from mlx_mtp.speculative.round import Engine

PROMPT = [ord(c) for c in "a fault must show"]
K = 3


@pytest.fixture(scope="module")
def mixed_dir(make_model_dir, text_chain):
    """Some drafts right, some wrong."""
    draft_succ = wrong_at(text_chain, range(0, len(text_chain), 3))
    return make_model_dir(
        "mixed faults", kind="noisy", succ=text_chain, draft_succ=draft_succ
    )


def check_stream(path):
    model, _ = mlx_mtp.load(path)
    assert_same_stream(mtp_stream(model, PROMPT, 40, K), plain_stream(path, PROMPT, 40))


def check_state(path):
    model, _ = mlx_mtp.load(path)
    engine = engine_of(model)
    loop = loop_of(engine, [PROMPT], K, 60)
    (tokens,) = stop_after(loop, 6)
    loop.stop([len(loop.last.tokens[0])])
    assert_target_state(engine, stock_state(path, PROMPT + tokens[:-1]))


def check_head(path):
    model, _ = mlx_mtp.load(path)
    engine = engine_of(model)
    loop = loop_of(engine, [PROMPT], K, 60, prefill_step_size=5)
    (tokens,) = stop_after(loop, 6)
    loop.stop([len(loop.last.tokens[0])])
    assert engine.drafter.cache.offset[0].item() >= len(PROMPT)
    assert_head_state(engine, PROMPT + tokens)


def no_rollback(monkeypatch):
    monkeypatch.setattr(Engine, "rollback", lambda self, block: None)


def one_token_too_many(monkeypatch):
    right = Engine.rollback

    def wrong(self, block):
        right(self, block._replace(kept=mx.minimum(block.kept + 1, block.width)))

    monkeypatch.setattr(Engine, "rollback", wrong)


def one_token_too_few(monkeypatch):
    right = Engine.rollback

    def wrong(self, block):
        right(self, block._replace(kept=mx.maximum(block.kept - 1, 1)))

    monkeypatch.setattr(Engine, "rollback", wrong)


def conv_window_not_rewound(monkeypatch):
    right = RewindableGatedDeltaNet.conv_window

    def wrong(self, conv_input, ends):
        width = conv_input.shape[1] - (self.conv_kernel_size - 1)
        return right(self, conv_input, width)

    monkeypatch.setattr(RewindableGatedDeltaNet, "conv_window", wrong)


def state_not_rewound(monkeypatch):
    right = RewindableGatedDeltaNet.replay

    def wrong(self, block, n):
        _, state = self.scan(block, None)
        return right(self, block, n)[0], state

    monkeypatch.setattr(RewindableGatedDeltaNet, "replay", wrong)


def kv_not_rewound(monkeypatch):
    monkeypatch.setattr(RewindableKVCache, "keep", lambda self, n: None)


@pytest.mark.parametrize(
    "plant",
    [
        no_rollback,
        one_token_too_many,
        one_token_too_few,
        conv_window_not_rewound,
        state_not_rewound,
        kv_not_rewound,
    ],
)
@pytest.mark.parametrize("check", [check_stream, check_state])
def test_state_faults(mixed_dir, monkeypatch, plant, check):
    check(mixed_dir)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(mixed_dir)


def head_not_primed(monkeypatch):
    monkeypatch.setattr(Drafter, "prime", lambda self, *arrays: None)


def head_keeps_its_drafts(monkeypatch):
    """Rows made from the head's own output stay in its cache."""
    right = RewindableKVCache.rewind

    def wrong(self, offset, limit):
        right(self, offset + (self.limit - limit), self.limit)

    monkeypatch.setattr(RewindableKVCache, "rewind", wrong)


def pairs_shifted(monkeypatch):
    """The hidden state of x[t] with the embedding of x[t] instead of x[t + 1]."""
    right = Drafter.prime

    def wrong(self, next_tokens, hidden, lengths):
        right(self, mx.roll(next_tokens, 1, axis=1), hidden, lengths)

    monkeypatch.setattr(Drafter, "prime", wrong)


@pytest.mark.parametrize(
    "plant", [head_not_primed, head_keeps_its_drafts, pairs_shifted]
)
def test_head_cache_faults(random_dir, monkeypatch, plant):
    check_head(random_dir)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_head(random_dir)


def swapped_concat(monkeypatch):
    right = MTPHead.__call__

    def wrong(self, embedding, hidden, cache=None):
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = (
            self.pre_fc_norm_hidden,
            self.pre_fc_norm_embedding,
        )
        try:
            return right(self, hidden, embedding, cache)
        finally:
            self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = (
                self.pre_fc_norm_hidden,
                self.pre_fc_norm_embedding,
            )

    monkeypatch.setattr(MTPHead, "__call__", wrong)


def last_norm_left_out(monkeypatch):
    """Output layer and next draft step get the head's state without ``mtp.norm``."""

    def wrong(self, embedding, hidden, cache=None):
        e, h = self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)
        x = self.fc(mx.concatenate([e, h], axis=-1))
        mask = head_module.create_attention_mask(x, cache)
        return self.layers[0](x, mask, cache)

    monkeypatch.setattr(MTPHead, "__call__", wrong)


def missing_norm_shift(monkeypatch):
    names = Qwen35.spec.zero_centred_norms[:-1]
    spec = dataclasses.replace(Qwen35.spec, zero_centred_norms=names)
    monkeypatch.setattr(Qwen35, "spec", spec)


def check_drafts(path):
    raw = path / "raw"
    out = path / f"mlx{len(list(path.iterdir()))}"
    convert(str(raw), str(out))
    model, _ = mlx_mtp.load(out)
    assert_drafts_equal_oracle(model, raw, PROMPT, k=2, rounds=2, step_size=7)


@pytest.fixture(scope="module")
def raw_parent(tmp_path_factory):
    root = tmp_path_factory.mktemp("faults")
    build(root / "raw", "random", seed=5)
    return root


@pytest.mark.parametrize(
    "plant", [swapped_concat, last_norm_left_out, missing_norm_shift]
)
def test_head_faults(raw_parent, monkeypatch, plant):
    check_drafts(raw_parent)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_drafts(raw_parent)


def test_doubled_norm_shift(raw_parent, tmp_path):
    """A source whose head norms already hold the scale itself."""
    shutil.copytree(raw_parent / "raw", tmp_path / "shifted")
    for file in (tmp_path / "shifted").glob("*.safetensors"):
        tensors = mx.load(str(file))
        head = {
            name: value + 1 if name.startswith("mtp.") and value.ndim == 1 else value
            for name, value in tensors.items()
        }
        mx.save_safetensors(str(file), head, metadata={"format": "pt"})
    convert(str(tmp_path / "shifted"), str(tmp_path / "mlx"))
    model, _ = mlx_mtp.load(tmp_path / "mlx")
    with pytest.raises(AssertionError):
        assert_drafts_equal_oracle(
            model, raw_parent / "raw", PROMPT, k=2, rounds=2, step_size=7
        )
