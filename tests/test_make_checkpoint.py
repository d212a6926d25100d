"""Synthetic checkpoints: the text is followed, and drafts are accepted as asked."""

import importlib.util
import json
from collections import deque
from pathlib import Path

import mlx.core as mx
import pytest

import mlx_mtp

FILE = Path(__file__).parent.parent / "benchmarks" / "make_checkpoint.py"
FREQUENT = 1024


@pytest.fixture(scope="module")
def make_checkpoint():
    spec = importlib.util.spec_from_file_location("make_checkpoint", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def build(make_checkpoint, tmp_path_factory):
    def make(acceptance, outside=0.1):
        path = tmp_path_factory.mktemp("synthetic") / "model"
        text = make_checkpoint.CONFIG["text_config"] | {
            "hidden_size": 192,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "vocab_size": 3000,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        }
        make_checkpoint.build(
            path,
            make_checkpoint.CONFIG | {"text_config": text},
            acceptance,
            dtype=mx.float32,
            outside=outside,
            frequent=FREQUENT,
        )
        return path

    return make


@pytest.mark.parametrize("acceptance", [[0.9, 0.7, 0.5], [1.0], [0.0]], ids=str)
def test_acceptance_as_asked(build, acceptance):
    path = build(acceptance)
    loaded = mlx_mtp.load(path)
    text = json.loads((path / "text.json").read_text())
    assert len(set(text)) == len(text) == FREQUENT // 2
    rare = sum(token >= FREQUENT for token in text) / len(text)
    assert rare == pytest.approx(0.1, abs=0.04)
    count = 400 if acceptance[0] else 40
    responses = mlx_mtp.stream_generate(
        *loaded, text[:20], max_tokens=count, num_draft_tokens=3
    )
    tokens = []
    for last in responses:
        tokens.append(last.token)
    assert tokens == text[20 : 20 + count]
    stats = last.stats
    judged = [stats.num_drafts, *stats.num_accepted_tokens_per_pos]
    for asked, before, after in zip(acceptance, judged, judged[1:]):
        assert after / max(before, 1) == pytest.approx(asked, abs=0.16)


def test_only_dense_qwen(make_checkpoint, tmp_path):
    config = make_checkpoint.CONFIG | {"model_type": "deepseek_v3"}
    with pytest.raises(ValueError, match="dense"):
        make_checkpoint.build(
            tmp_path / "x", config, [1.0], dtype=mx.float32, outside=0, frequent=9
        )
    assert not deque(tmp_path.iterdir())
