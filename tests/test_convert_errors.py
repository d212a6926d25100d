"""What the converter refuses: one line naming the value, and nothing stays."""

import importlib
import json
from pathlib import Path

import mlx.core as mx
import pytest
from checkpoints import build
from converting import edit_config, head_of, rewrite

from mlx_mtp.convert import convert
from mlx_mtp.convert_cli import main

CONV = "model.language_model.layers.0.linear_attn.conv1d.weight"
FC, Q_NORM = "mtp.fc.weight", "mtp.layers.0.self_attn.q_norm.weight"
DOWN = "model.language_model.layers.1.mlp.down_proj.weight"
OTHER_DOWN = "language_model.model.layers.1.mlp.down_proj.weight"
HEAD_SHARD = "model-00003-of-00003.safetensors"


@pytest.fixture
def raw(tmp_path) -> Path:
    return build(tmp_path / "raw")


@pytest.fixture
def refuse(capsys, tmp_path):
    """The command fails with one line that holds ``words``, and writes nothing."""

    def check(source: str | Path, *words: str, out: str = "made/out") -> None:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(SystemExit) as ended:
            main(["--hf-path", str(source), "--mlx-path", str(tmp_path / out)])
        assert ended.value.code == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        for word in words:
            assert word in error
        assert sorted(tmp_path.rglob("*")) == before

    return check


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing directory", ("is no directory", "owner/name")),
        ("", ("config.json",)),
    ],
)
def test_no_checkpoint(refuse, monkeypatch, tmp_path, name, words):
    monkeypatch.chdir(tmp_path)
    refuse(name, *words)


def test_file_instead_of_directory(refuse, raw):
    refuse(raw / "config.json", "config.json is a file")


def test_hub_errors_are_one_line(refuse, monkeypatch):
    def download(*args, **kwargs):
        raise OSError("404\nnot found")

    hub = importlib.import_module("mlx_mtp.hub")
    monkeypatch.setattr(hub, "snapshot_download", download)
    refuse("nobody/nothing", "nobody/nothing", "404 not found")


@pytest.mark.parametrize("text", ["{", "[]", '{"text_config": 3}', "\xff"])
def test_unreadable_config(refuse, raw, text):
    (raw / "config.json").write_bytes(text.encode("latin-1"))
    refuse(raw, "config.json")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"model_type": "llama"}, ("'llama' is not supported", "qwen3_5")),
        ({"model_type": None}, ("None is not supported",)),
        ({"text_config": 3}, ("config.json does not hold",)),
        ({"text_config": {"hidden_size": "x"}}, ("config.json", "does not describe")),
        ({"quantization_config": {"bits": 4}}, ("quantised (quantization_config)",)),
    ],
    ids=str,
)
def test_unusable_config(refuse, raw, edit, words):
    edit_config(raw, lambda config: config.update(edit))
    refuse(raw, *words)


def test_file_named_by_the_index_is_missing(refuse, raw):
    (raw / HEAD_SHARD).unlink()
    refuse(raw, f"lacks {HEAD_SHARD}", "model.safetensors.index.json")


def test_no_weights(refuse, raw):
    for file in (*raw.glob("*.safetensors"), *raw.glob("*.index.json")):
        file.unlink()
    refuse(raw, "no *.safetensors")


@pytest.mark.parametrize("bytes_left", [4, 100, -1, -2000])
def test_truncated_file(refuse, raw, bytes_left):
    file = raw / HEAD_SHARD
    file.write_bytes(file.read_bytes()[:bytes_left])
    refuse(raw, HEAD_SHARD, "truncated or corrupt", "again")


def test_git_lfs_pointer(refuse, raw):
    (raw / HEAD_SHARD).write_text("version https://git-lfs.github.com/spec/v1\n")
    refuse(raw, HEAD_SHARD, "Git LFS pointer")


def test_tensor_in_two_files(refuse, raw):
    (raw / "copy.safetensors").write_bytes((raw / HEAD_SHARD).read_bytes())
    refuse(raw, "copy.safetensors", HEAD_SHARD, FC, "(15 in all)")


@pytest.mark.parametrize("name", [FC, Q_NORM])
def test_head_tensor_is_missing(refuse, raw, name):
    rewrite(raw, lambda w: w.pop(name))
    refuse(raw, "MTP head", f"lacks the tensors {name.removeprefix('mtp.')}")


def test_head_tensor_has_a_wrong_shape(refuse, raw):
    rewrite(raw, lambda w: w.update({FC: w[FC].T}))
    refuse(raw, "MTP head", "fc.weight [128, 64] instead of [64, 128]")


def test_head_has_an_unknown_tensor(refuse, raw):
    rewrite(raw, lambda w: w.update({"mtp.extra.weight": mx.zeros((2, 2))}))
    refuse(raw, "MTP head", "unexpected tensors: extra.weight")


def drop_head(weights: dict[str, mx.array]) -> None:
    for key in [key for key in weights if key.startswith("mtp.")]:
        del weights[key]


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_head_is_promised_but_absent(refuse, tmp_path, flat):
    raw = build(tmp_path / "raw", flat=flat)
    rewrite(raw, drop_head)
    refuse(raw, "mtp_num_hidden_layers 1", "original repository")


def test_no_head_at_all(refuse, raw):
    rewrite(raw, drop_head)
    edit_config(raw, lambda c: c["text_config"].pop("mtp_num_hidden_layers"))
    refuse(raw, "no MTP head", "mlx_lm.convert")


def test_head_without_promise_is_converted(raw, tmp_path):
    edit_config(raw, lambda c: c["text_config"].pop("mtp_num_hidden_layers"))
    convert(raw, tmp_path / "out")
    assert len(head_of(tmp_path / "out")) == 15


def test_two_head_modules(refuse, raw):
    edit_config(raw, lambda c: c["text_config"].update(mtp_num_hidden_layers=2))
    refuse(raw, "mtp_num_hidden_layers 2", "those of 1 MTP module")


def test_unknown_prefix(refuse, tmp_path):
    raw = build(tmp_path / "raw", head_prefix="model.text.mtp.")
    refuse(raw, "unknown prefix", "model.text.mtp.fc.weight", "language_model.mtp.")


def test_head_under_two_prefixes(refuse, raw):
    rewrite(raw, lambda w: w.update({"model.mtp.fc.weight": w[FC]}))
    refuse(raw, "model.mtp.fc.weight", "same tensor")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda w: w.pop(DOWN), ("lacks the tensors", "layers.1.mlp.down_proj")),
        (lambda w: w.update({DOWN: w[DOWN][:8]}), ("wrong shape", "[8, 64] instead")),
        (
            lambda w: w.update({"model.language_model.extra": mx.zeros(3)}),
            ("unexpected tensors", "extra"),
        ),
        # mlx-lm drops whatever holds "mtp." anywhere in its name.
        (
            lambda w: w.update({"model.language_model.nomtp.weight": mx.zeros(3)}),
            ("does not know model.language_model.nomtp.weight",),
        ),
        (
            lambda w: w.update({OTHER_DOWN: w[DOWN]}),
            (OTHER_DOWN, DOWN, "same tensor"),
        ),
        (lambda w: w.pop("lm_head.weight"), ("no lm_head.weight", "tie_word_embed")),
    ],
    ids=[
        "missing",
        "shape",
        "unknown",
        "dropped by mlx-lm",
        "twice",
        "no output layer",
    ],
)
def test_target_is_not_whole(refuse, raw, edit, words):
    rewrite(raw, edit)
    refuse(raw, *words)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (DOWN.replace("weight", "qweight"), mx.zeros((8, 8), mx.int32)),
        (DOWN.replace("weight", "qzeros"), mx.zeros((8, 8), mx.int32)),
        (DOWN.replace("weight", "weight_packed"), mx.zeros((8, 8), mx.int32)),
        (DOWN.replace("weight", "weight_scale"), mx.zeros((64, 4), mx.uint8)),
        (DOWN.replace("weight", "weight_scale_inv"), mx.ones((1, 1))),
        (FC, mx.zeros((64, 128), mx.uint8)),
        (DOWN, mx.zeros((64, 8), mx.uint32)),
    ],
    ids=[
        "gptq",
        "awq",
        "compressed-tensors",
        "nvfp4",
        "fp8 scales",
        "8 bit head",
        "packed target",
    ],
)
def test_quantised_source(refuse, raw, key, value):
    rewrite(raw, lambda w: w.update({key: value}))
    refuse(raw, "is quantised", key, "original checkpoint")


def test_source_of_two_layouts(refuse, raw):
    rewrite(raw, lambda w: w.update({CONV: w[CONV].moveaxis(1, 2)}))
    refuse(raw, "mixes raw and converted", f"{CONV} [128, 4, 1]", "[128, 1, 4]")


def test_no_tokenizer(refuse, raw):
    for file in raw.glob("tokenizer*"):
        file.unlink()
    refuse(raw, "no tokenizer", "tokenizer.json")


def test_damaged_tokenizer(refuse, raw):
    (raw / "tokenizer.json").write_text("{")
    refuse(raw, "tokenizer", "cannot be loaded")


def test_output_exists(refuse, raw, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("here", "link"):
        refuse(raw, name, "already exists", out=name)


def test_index_must_be_readable(refuse, raw):
    (raw / "model.safetensors.index.json").write_text(json.dumps([]))
    refuse(raw, "model.safetensors.index.json cannot be read")
