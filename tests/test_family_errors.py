"""Sources that must not convert, family by family: one line that says why."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from broken import check_line
from converting import config_of, edit_config, read, rewrite
from families import family

import mlx_mtp
from mlx_mtp.generate_cli import main as generate_main
from mlx_mtp.models import FAMILIES, UNSUPPORTED, family_of

# transformers says so of configs whose type it does not know.
pytestmark = pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated")


@pytest.fixture
def source(tmp_path):
    return lambda name: family(name).write(tmp_path / "raw", seed=1)


def assert_refused(raw: Path, *words: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011, the words follow
        mlx_mtp.convert(raw, raw.parent / "out")
    check_line(str(refused.value), *words)
    assert not (raw.parent / "out").exists()


@pytest.mark.parametrize("model_type", UNSUPPORTED)
def test_unsupported_families_have_a_reason(model_type, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    for run in (mlx_mtp.load, lambda path: mlx_mtp.convert(path, tmp_path / "out")):
        with pytest.raises(ValueError, match=f"'{model_type}' is not supported yet: "):
            run(tmp_path)


def test_no_family_is_both():
    assert not UNSUPPORTED.keys() & FAMILIES.keys()
    with pytest.raises(ValueError, match="'gpt2' is not supported; supported are: "):
        family_of({"model_type": "gpt2"})


@pytest.mark.parametrize(
    ("name", "key", "words"),
    [
        ("deepseek_v3", "model.layers.3.eh_proj.weight", ("MTP head", "fc.weight")),
        (
            "deepseek_v3",
            "model.layers.3.mlp.experts.2.up_proj.weight",
            ("MTP head", "experts.2.up_proj"),
        ),
        (
            "deepseek_v3",
            "model.layers.1.mlp.experts.7.down_proj.weight",
            ("experts.7.down_proj",),
        ),
        (
            "deepseek_v32",
            "model.layers.3.self_attn.indexer.wk.weight",
            ("MTP head", "indexer.wk.weight"),
        ),
        (
            "glm4_moe",
            "model.layers.3.mlp.gate.e_score_correction_bias",
            ("MTP head", "e_score_correction_bias"),
        ),
        ("mimo", "model.mtp_layers.0.final_layernorm.weight", ("lacks", "norm.weight")),
        ("ernie4_5_moe", "model.mtp_emb_norm.0.weight", ("pre_fc_norm_embedding",)),
        (
            "qwen3_5_moe_single_experts",
            "mtp.layers.0.mlp.experts.7.gate_proj.weight",
            ("MTP head", "experts.7.gate_proj"),
        ),
        ("qwen3_5_moe", "mtp.layers.0.mlp.experts.down_proj", ("down_proj",)),
        ("longcat_flash", "model.mtp.layers.0.hnorm.m.weight", ("pre_fc_norm_hidden",)),
        (
            "nemotron_h",
            "mtp.layers.1.mixer.experts.5.down_proj.weight",
            ("MTP head", "experts.5.down_proj"),
        ),
        (
            "bailing_hybrid",
            "model.layers.4.attention.kv_b_proj.weight",
            ("MTP head", "embed_q"),
        ),
        (
            "bailing_moe_v3",
            "model.layers.4.mlp.experts.7.up_proj.weight",
            ("MTP head", "experts.7.up_proj"),
        ),
        (
            "mimo_v2_flash",
            "model.mtp.layers.2.self_attn.attention_sink_bias",
            ("MTP head", "heads.2.layers.0.self_attn.attention_sink_bias"),
        ),
        (
            "qwen3_next",
            "model.layers.0.mlp.experts.3.gate_proj.weight",
            ("experts.3.gate_proj",),
        ),
    ],
)
def test_tensor_is_missing(source, name, key, words):
    raw = source(name)
    rewrite(raw, lambda w: w.pop(key))
    assert_refused(raw, "lacks", *words)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("deepseek_v3", "model.layers.3.mlp.extra.weight"),
        ("deepseek_v3", "model.layers.3.mlp.experts.8.up_proj.weight"),
        ("mimo", "model.mtp_layers.0.extra.weight"),
        ("ernie4_5_moe", "model.mtp_block.0.mlp.extra.weight"),
        ("exaone_moe", "mtp.layers.1.mlp.up_proj.weight"),
    ],
)
def test_tensor_is_unknown(source, name, key):
    raw = source(name)
    rewrite(raw, lambda w: w.update({key: mx.zeros((64, 64))}))
    assert_refused(raw, "unexpected tensors", key.rsplit(".", 3)[-2])


def test_second_module(source):
    """The released DeepSeek has one; a second one would be ignored silently."""
    raw = source("deepseek_v3")
    key = "model.layers.4.eh_proj.weight"
    rewrite(raw, lambda w: w.update({key: mx.zeros((64, 128))}))
    assert_refused(raw, "holds 2 MTP modules", "deepseek_v3 has 1")


@pytest.mark.parametrize(
    ("name", "prefix", "number"),
    [("mimo_v2_flash", "model.mtp.layers.1.", 1), ("step3p5", "model.layers.3.", 0)],
)
def test_module_is_missing(source, name, prefix, number):
    raw = source(name)
    rewrite(raw, lambda w: [w.pop(k) for k in list(w) if k.startswith(prefix)])
    assert_refused(raw, f"lacks module {number} of the MTP head")


def test_lists_without_entries_for_the_modules(source):
    """As in re-quantised repositories, which cut the lists to the target's layers."""
    raw = source("step3p5")
    edit_config(raw, lambda c: c.update(layer_types=c["layer_types"][:4]))
    assert_refused(raw, "layer_types", "4 entries", "layer 4", "module 1")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("nemotron_h", {"mtp_hybrid_override_pattern": "*M"}),
        ("nemotron_h", {"mtp_hybrid_override_pattern": "**"}),
        ("nemotron_h_latent", {"mtp_layers_block_type": ["mamba", "attention"]}),
    ],
)
def test_layers_that_a_head_cannot_have(source, name, change):
    raw = source(name)
    edit_config(raw, lambda c: c.update(change))
    assert_refused(raw, "the MTP head's layers are", str(*change.values()))


def test_step_in_mlx_layout(source):
    """Its norms may have been shifted; nothing but names tells."""
    raw = source("step3p5")

    def rename(w):
        for key in [k for k in w if ".moe." in k]:
            w[key.replace(".moe.", ".mlp.experts.")] = w.pop(key)

    rewrite(raw, rename)
    assert_refused(raw, "not in the original layout", ".moe.")


def test_more_drafts_than_modules(source, capsys):
    raw = source("mimo_v2_flash")
    mlx_mtp.convert(raw, raw.parent / "out")
    capsys.readouterr()
    command = ["--model", str(raw.parent / "out"), "--prompt", "Hi", "--mtp"]
    for k in (3, 4):
        generate_main([*command, "--max-tokens", "2", "--num-draft-tokens", str(k)])
        note = "4 drafts per round, but the MTP head has 3 modules"
        assert (note in capsys.readouterr().err) == (k == 4)


def test_head_is_promised_but_absent(source):
    """As in re-quantised repositories, whose config still counts it."""
    raw = source("glm4_moe")
    rewrite(raw, lambda w: [w.pop(k) for k in list(w) if ".layers.3." in k])
    assert_refused(raw, "num_nextn_predict_layers 1", "no MTP tensor")
    edit_config(raw, lambda c: c.update(num_nextn_predict_layers=0))
    assert_refused(raw, "has no MTP head")


@pytest.mark.parametrize("part", ["main_proj", "markov_head", "confidence_head"])
def test_dspark_head(source, part):
    raw = source("qwen3_next")
    rewrite(raw, lambda w: w.update({f"mtp.{part}.weight": mx.zeros((2, 2))}))
    assert_refused(raw, "DSpark", f"mtp.{part}.weight")


@pytest.mark.parametrize("name", ["deepseek_v3", "mimo", "exaone_moe"])
def test_raw_directory_is_not_loaded(source, name):
    raw = source(name)
    with pytest.raises(ValueError, match="raw layout; convert it first"):
        mlx_mtp.load(raw)


def test_unused_tensors_are_noted(source, capsys):
    """mlx-lm's ERNIE has no bias for the choice of experts."""
    raw = source("ernie4_5_moe")
    mlx_mtp.convert(raw, raw.parent / "out")
    note = "dropped 2 tensors, mlx-lm's model does not use them: model.layers.1.mlp"
    assert note in capsys.readouterr().out


def test_ends_that_are_copies_are_dropped(source, capsys):
    raw = source("deepseek_v3")
    mlx_mtp.convert(raw, raw.parent / "out")
    printed = capsys.readouterr().out
    for pair in (
        "layers.3.embed_tokens.weight, the same as model.embed_tokens.weight",
        "layers.3.shared_head.head.weight, the same as lm_head.weight",
    ):
        assert pair in printed
    names = read(raw.parent / "out", "mtp.safetensors")
    assert not {"mtp.embed_tokens.weight", "mtp.lm_head.weight"} & set(names)


@pytest.mark.parametrize("end", ["embed_tokens", "shared_head.head"])
def test_one_end_of_its_own(source, end):
    """One number that differs makes it the head's own."""
    raw = source("glm4_moe")

    def change(weights):
        key = f"model.layers.3.{end}.weight"
        weights[key] = weights[key] + mx.zeros_like(weights[key]).at[5, 7].add(0.5)

    rewrite(raw, change)
    mlx_mtp.convert(raw, raw.parent / "out")
    marker = config_of(raw.parent / "out")["mtp"]
    own = {"embed_tokens": "embedding", "shared_head.head": "output"}[end]
    layers = {name: marker[name] for name in ("embedding", "output")}
    assert layers == dict.fromkeys(layers, "shared") | {own: "own"}
    model, _ = mlx_mtp.load(raw.parent / "out")
    name = "lm_head" if own == "output" else "embed_tokens"
    want = read(raw)[f"model.layers.3.{end}.weight"]
    assert mx.array_equal(model.mtp[name].weight, want)


def test_dtype(source):
    """The experts' bias stays float32, in target and head, as in mlx-lm."""
    raw = source("deepseek_v3")
    mlx_mtp.convert(raw, raw.parent / "out", dtype="bfloat16")
    kinds = {
        (name.endswith("e_score_correction_bias"), array.dtype)
        for name, array in read(raw.parent / "out").items()
    }
    assert kinds == {(True, mx.float32), (False, mx.bfloat16)}


def test_latent_caches_are_not_quantised(source):
    raw = source("glm4_moe_lite")
    mlx_mtp.convert(raw, raw.parent / "out")
    model, _ = mlx_mtp.load(raw.parent / "out")
    with pytest.raises(ValueError, match=r"kv_bits 8 .* latent cache \(MLA\)"):
        list(mlx_mtp.mtp_generate_step([1], model, kv_bits=8))
