"""The converter on tiny checkpoints: what changes, what must not, and the options."""

import json
import re
from functools import cache
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from checkpoints import build
from converting import HEAD_NORMS, config_of, edit_config, read, rewrite, same

from mlx_mtp.checkpoint import MTP_FILE, read_marker
from mlx_mtp.convert import convert
from mlx_mtp.models.qwen3_5 import Qwen35

NORM = re.compile(
    r"(\.|^)(input_layernorm|post_attention_layernorm|[qk]_norm|pre_fc_norm_\w+"
    r"|model\.norm|mtp\.norm)\.weight$"
)
PREFIXES = ("mtp.", "model.mtp.", "language_model.mtp.", "model.language_model.mtp.")
TOKENS = mx.array([[81, 97, 7, 7, 250, 3, 81, 12, 90, 200]])


def output_name(key: str) -> str:
    """Where a raw tensor of the target lies in mlx-lm's layout."""
    if key.startswith("mtp."):
        return key
    key = key.replace("model.language_model.", "model.")
    return f"language_model.{key}"


def expected_value(key: str, value: mx.array) -> mx.array:
    if key.endswith("conv1d.weight"):
        return value.moveaxis(1, 2)
    shifted = NORM.search(output_name(key))
    return value + mx.array(1, mx.float32) if shifted else value


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    """Builds a source once per set of options; tests must not change it."""
    root = tmp_path_factory.mktemp("sources")

    @cache
    def source(**options) -> Path:
        return build(root / f"source{len(list(root.iterdir()))}", **options)

    return source


@pytest.fixture(scope="session")
def plain(sources, tmp_path_factory) -> Path:
    """The float32 checkpoint, converted without options."""
    out = tmp_path_factory.mktemp("plain") / "out"
    convert(sources(), out)
    return out


def test_norms_convolutions_and_nothing_else_change(sources, plain):
    raw, out = read(sources()), read(plain)
    assert out.keys() == {output_name(key) for key in raw}
    for key, value in raw.items():
        got = out[output_name(key)]
        assert got.dtype == value.dtype
        assert mx.array_equal(got, expected_value(key, value)), key


def test_every_norm_is_counted(sources, plain):
    raw, out = read(sources()), read(plain)
    changed = {
        name
        for name in map(output_name, raw)
        if "norm" in name and not mx.array_equal(out[name], unmoved(raw, name))
    }
    # Two per layer, q and k of the one attention layer, the last norm; the head's 7.
    assert len([n for n in changed if not n.startswith("mtp.")]) == 2 * 4 + 2 + 1
    assert {n.removeprefix("mtp.") for n in changed if n.startswith("mtp.")} == {
        f"{name}.weight" for name in HEAD_NORMS
    }


def unmoved(raw: dict[str, mx.array], name: str) -> mx.array:
    return next(value for key, value in raw.items() if output_name(key) == name)


def test_convolution_is_moved_once(plain):
    shapes = {v.shape for k, v in read(plain).items() if k.endswith("conv1d.weight")}
    assert shapes == {(128, 4, 1)}


@pytest.mark.parametrize("shards", [1, 8])
def test_shards_make_no_difference(sources, plain, tmp_path, shards):
    convert(sources(shards=shards), tmp_path / "out")
    assert same(read(tmp_path / "out"), read(plain))


@pytest.mark.parametrize("prefix", PREFIXES[1:])
def test_prefixes_make_no_difference(sources, plain, tmp_path, prefix):
    convert(sources(head_prefix=prefix), tmp_path / "out")
    assert same(read(tmp_path / "out"), read(plain))


def test_all_prefixes_are_tried():
    assert set(Qwen35.spec.prefixes) == set(PREFIXES)


def test_flat_form(sources, plain, tmp_path):
    convert(sources(flat=True), tmp_path / "out")
    assert same(read(tmp_path / "out"), read(plain))
    assert config_of(tmp_path / "out")["model_type"] == "qwen3_5"
    assert config_of(tmp_path / "out")["mtp"] == config_of(plain)["mtp"]
    mlx_lm.load(str(tmp_path / "out"))


def test_vision_is_dropped_with_a_note(sources, plain, tmp_path, capsys):
    convert(sources(vision=True), tmp_path / "out")
    assert same(read(tmp_path / "out"), read(plain))
    note = "dropped 1 vision tensor, the model reads text only: model.visual.patch_emb"
    assert note in capsys.readouterr().out


@pytest.mark.parametrize("index", [True, False], ids=["indexed", "not indexed"])
def test_head_in_a_file_of_its_own(plain, tmp_path, index):
    raw = build(tmp_path / "raw")
    (raw / "model-00003-of-00003.safetensors").rename(raw / MTP_FILE)
    index_file = raw / "model.safetensors.index.json"
    data = json.loads(index_file.read_text())
    kept = data["weight_map"].items()
    data["weight_map"] = {
        key: MTP_FILE if key.startswith("mtp.") else file
        for key, file in kept
        if index or not key.startswith("mtp.")
    }
    index_file.write_text(json.dumps(data))
    convert(raw, tmp_path / "out")
    assert same(read(tmp_path / "out"), read(plain))


def test_marker(plain):
    config = config_of(plain)
    assert config["mtp"] == {
        "format": 1,
        "family": "qwen3_5",
        "num_modules": 1,
        "hidden": "post_norm",
        "chain": "post_norm",
        "mask_first": False,
        "embedding": "shared",
        "output": "shared",
        "quantization": None,
    }
    assert read_marker(config) == config["mtp"]
    assert read_marker({"model_type": "qwen3_5"}) is None


def test_config_is_otherwise_that_of_the_source(sources, plain):
    config = config_of(plain)
    config.pop("mtp")
    assert config.pop("eos_token_id") == [258, 256]  # from generation_config.json
    assert config == config_of(sources())
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (plain / name).exists()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_stock_logits_are_those_of_the_source(tmp_path, dtype, tie):
    raw = build(tmp_path / "raw", dtype=dtype, tie=tie)
    # Without a stated dtype mlx-lm and the converter keep that of every tensor.
    edit_config(raw, lambda config: config["text_config"].pop("dtype"))
    convert(raw, tmp_path / "out")
    expected, _ = mlx_lm.load(str(raw))
    got, _ = mlx_lm.load(str(tmp_path / "out"))
    assert mx.array_equal(got(TOKENS), expected(TOKENS))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "float16"},
        {"quantize": True, "q_bits": 4, "q_group_size": 32},
        {"quantize": True, "q_bits": 8},
        {"quantize": True, "q_mode": "mxfp4"},
    ],
    ids=str,
)
def test_target_is_what_stock_conversion_makes(sources, tmp_path, options):
    # From float32, where mlx-lm adds in float32 too.
    convert(sources(), tmp_path / "out", **options)
    mlx_lm.convert(str(sources()), str(tmp_path / "stock"), **options)
    got = read(tmp_path / "out", "model*.safetensors")
    assert same(got, read(tmp_path / "stock"))
    ours, stock = config_of(tmp_path / "out"), config_of(tmp_path / "stock")
    assert ours.get("quantization") == stock.get("quantization")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", None])
def test_dtype_is_applied_after_the_addition(sources, tmp_path, dtype):
    source = sources(dtype=mx.bfloat16)
    convert(source, tmp_path / "out", dtype=dtype)
    wanted = getattr(mx, dtype or "bfloat16")
    raw, out = read(source), read(tmp_path / "out")
    for key, value in raw.items():
        got = out[output_name(key)]
        kept = key.endswith("A_log")
        assert got.dtype == (mx.float32 if kept else wanted), key
        expected = expected_value(key, value.astype(mx.float32))
        assert mx.array_equal(got, expected.astype(got.dtype)), key


def test_addition_in_bfloat16_would_differ():
    # What the test above can see: most sums have no bfloat16 of their own.
    norm = mx.array(np.linspace(-0.9, 0.9, 64), mx.bfloat16)
    assert not mx.array_equal(
        (norm + 1).astype(mx.float32), norm.astype(mx.float32) + 1
    )


@pytest.mark.parametrize(
    ("tie", "level"),
    [(tie, level) for tie in (False, True) for level in ("inner", "outer", "both")]
    + [(False, "neither")],
)
def test_tie_is_resolved(tmp_path, tie, level):
    raw = build(tmp_path / "raw", tie=tie)

    def edit(config: dict) -> None:
        if level in ("outer", "neither"):
            config["text_config"].pop("tie_word_embeddings")
        if level in ("inner", "neither"):
            config.pop("tie_word_embeddings")

    edit_config(raw, edit)
    convert(raw, tmp_path / "out")
    config = config_of(tmp_path / "out")
    assert config["text_config"]["tie_word_embeddings"] is tie
    model, _ = mlx_lm.load(str(tmp_path / "out"))
    assert ("lm_head" in model.language_model) is not tie


def test_tied_output_layer_is_dropped_with_a_note(tmp_path, capsys):
    raw = build(tmp_path / "raw", tie=True)
    rewrite(raw, lambda w: w.update({"lm_head.weight": mx.ones((288, 64))}))
    convert(raw, tmp_path / "out")
    assert "dropped lm_head.weight" in capsys.readouterr().out
    assert not any("lm_head" in name for name in read(tmp_path / "out"))


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_contradicting_tie_is_decided_by_the_tensors(tmp_path, capsys, tie):
    raw = build(tmp_path / "raw", tie=tie)
    edit_config(raw, lambda config: config.update(tie_word_embeddings=not tie))
    convert(raw, tmp_path / "out")
    assert "both true and false" in capsys.readouterr().out
    config = config_of(tmp_path / "out")
    assert config["text_config"]["tie_word_embeddings"] is tie
    assert config["tie_word_embeddings"] is tie


def test_parents_are_made_and_the_mode_is_the_usual(sources, tmp_path):
    out = tmp_path / "a" / "b"
    convert(sources(), out)
    (tmp_path / "usual").mkdir()
    assert out.stat().st_mode == (tmp_path / "usual").stat().st_mode
    assert [p.name for p in out.parent.iterdir()] == ["b"]
