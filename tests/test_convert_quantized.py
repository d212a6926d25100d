"""Bits of the target and of the head: what is quantised, and how it is marked."""

from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from checkpoints import build
from converting import HEAD_LINEARS, HEAD_NORMS, config_of, head_of, read, same

from mlx_mtp.convert import convert
from mlx_mtp.convert_cli import main

TOKENS = mx.array([[81, 97, 7, 7, 250, 3, 81, 12, 90, 200]])


@pytest.fixture
def raw(tmp_path) -> Path:
    return build(tmp_path / "raw")


@pytest.mark.parametrize("mtp_bits", [None, 8, 16])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, 64)])
def test_quantised_head(raw, tmp_path, bits, group_size, mtp_bits):
    convert(
        raw,
        tmp_path / "out",
        quantize=True,
        q_bits=bits,
        q_group_size=group_size,
        mtp_bits=mtp_bits,
    )
    check_head(tmp_path / "out", mtp_bits or bits, group_size)
    model, _ = mlx_lm.load(str(tmp_path / "out"))
    assert mx.isfinite(model(TOKENS)).all()


def check_head(path: Path, bits: int, group_size: int, mode: str = "affine") -> None:
    """15 weights; the 8 linear ones are packed and the marker says how."""
    head = head_of(path)
    names = {name.rsplit(".", 1)[0] for name in head}
    assert names == HEAD_LINEARS | HEAD_NORMS
    packed = {n.removesuffix(".scales") for n in head if n.endswith(".scales")}
    assert packed == (set() if bits == 16 else HEAD_LINEARS)
    quantization = {"group_size": group_size, "bits": bits, "mode": mode}
    stated = config_of(path)["mtp"]["quantization"]
    assert stated == (None if bits == 16 else quantization)
    for name in packed:
        assert head[f"{name}.weight"].shape[1] * 32 // bits in (64, 128)


def test_quantised_weights_are_near_the_source(raw, tmp_path):
    convert(raw, tmp_path / "out", quantize=True, mtp_bits=8)
    raw, head = read(raw), head_of(tmp_path / "out")
    for name in HEAD_LINEARS:
        parts = (head[f"{name}.{kind}"] for kind in ("weight", "scales", "biases"))
        error = mx.dequantize(*parts, 64, 8) - raw[f"mtp.{name}.weight"]
        assert mx.abs(error).max() <= mx.abs(head[f"{name}.scales"]).max()


def test_head_alone_is_quantised_by_mtp_bits(raw, tmp_path):
    convert(raw, tmp_path / "plain")
    convert(raw, tmp_path / "out", mtp_bits=4)
    check_head(tmp_path / "out", 4, 64)
    assert "quantization" not in config_of(tmp_path / "out")
    pattern = "model*.safetensors"
    assert same(read(tmp_path / "out", pattern), read(tmp_path / "plain", pattern))


def test_mode_without_affine_biases(raw, tmp_path):
    convert(raw, tmp_path / "out", quantize=True, q_mode="mxfp8")
    check_head(tmp_path / "out", 8, 32, "mxfp8")
    mlx_lm.load(str(tmp_path / "out"))


def test_indivisible_width_stays_with_a_note(tmp_path, capsys):
    out = tmp_path / "out"
    convert(build(tmp_path / "narrow", hidden=48), out, quantize=True, q_group_size=64)
    printed = capsys.readouterr().out
    assert "in the target" in printed
    assert "in the MTP head" in printed
    # Only these read attention heads or the MLP, which are 64 wide; fc reads 96.
    packed = {n.removesuffix(".scales") for n in head_of(out) if n.endswith(".scales")}
    assert packed == {"layers.0.self_attn.o_proj", "layers.0.mlp.down_proj"}
    assert "fc, layers.*.mlp.gate_proj, " in printed.split("in the MTP head")[1]
    model, _ = mlx_lm.load(str(out))
    assert mx.isfinite(model(TOKENS)).all()


def test_nothing_divisible_leaves_the_marker_empty(raw, tmp_path, capsys):
    convert(raw, tmp_path / "out", mtp_bits=4, q_group_size=128)
    packed = {n for n in head_of(tmp_path / "out") if n.endswith(".scales")}
    assert packed == {"fc.scales"}  # the one layer that is 128 wide
    convert(
        build(tmp_path / "narrow", hidden=48),
        tmp_path / "none",
        mtp_bits=4,
        q_group_size=128,
    )
    assert config_of(tmp_path / "none")["mtp"]["quantization"] is None
    assert "MTP head: 15 tensors, not quantised" in capsys.readouterr().out


def test_closing_lines(raw, tmp_path, capsys):
    out = tmp_path / "two words"
    convert(raw, out, quantize=True, q_bits=8, mtp_bits=16)
    printed = capsys.readouterr().out
    assert "MTP head: 15 tensors, not quantised" in printed
    assert "8 bits (affine, group size 64)" in printed
    assert f"python generate.py --model '{out}' --mtp --prompt" in printed


def test_options_without_effect_are_noted(raw, tmp_path, capsys):
    convert(raw, tmp_path / "out", q_bits=4, q_group_size=32)
    printed = capsys.readouterr().out
    assert "q_bits 4 has no effect without quantize" in printed
    assert "q_group_size 32 has no effect without quantize" in printed
    assert "quantization" not in config_of(tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"q_mode": "gguf"}, "'gguf' is not one of"),
        ({"quantize": True, "q_bits": 7}, "q_bits 7"),
        ({"quantize": True, "q_group_size": 48}, "q_group_size 48"),
        ({"quantize": True, "q_mode": "nvfp4", "q_group_size": 32}, "q_group_size 32"),
        ({"quantize": True, "q_mode": "mxfp8", "q_bits": 4}, "q_bits 4"),
        ({"mtp_bits": 7}, "mtp_bits 7"),
        ({"mtp_bits": 8, "q_mode": "mxfp4", "quantize": True}, "mtp_bits 8"),
        ({"dtype": "float64"}, "'float64' is not one of"),
    ],
    ids=str,
)
def test_wrong_option(capsys, raw, tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        convert(raw, tmp_path / "out", **options)
    flags = []
    for name, value in options.items():
        flags += [f"--{name.replace('_', '-')}", str(value)]
    flags = [flag for flag in flags if flag != "True"]
    with pytest.raises(SystemExit) as ended:
        main(["--hf-path", str(raw), "--mlx-path", str(tmp_path / "out"), *flags])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "error: " in error.splitlines()[-1]
    assert str(list(options.values())[-1]) in error.splitlines()[-1] or words in error
    assert not (tmp_path / "out").exists()
