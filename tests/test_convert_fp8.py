"""FP8 sources against torch: blocks of any size, single scales, scales per row."""

from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
import torch
from checkpoints import build
from converting import config_of, edit_config, read, same
from families import family
from safetensors.torch import load_file, save_file

import mlx_mtp
from mlx_mtp import convert
from mlx_mtp.fp8 import make_scale

# transformers says so of configs whose type it does not know.
pytestmark = pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated")
LARGEST = 448.0
SHAPES = [(5, 7), (128, 128), (130, 257), (3, 40, 33), (1, 1)]
FORMS = ["blocks", "one", "per matrix", "per row", "flat rows"]
WEIGHT = "model.language_model.layers.1.mlp.down_proj.weight"
SCALE = f"{WEIGHT}_scale_inv"


def expand(scale: torch.Tensor, shape: torch.Size, block: tuple[int, int]):
    """A scale per block -> a scale per element of the last two axes."""
    rows = scale.repeat_interleave(block[0], -2)[..., : shape[-2], :]
    return rows.repeat_interleave(block[1], -1)[..., : shape[-1]]


def to_fp8(
    weight: torch.Tensor, block: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed weight, its scales, and what they stand for, in float32."""
    *outer, rows, columns = weight.shape
    blocks = [-(-n // b) for n, b in zip((rows, columns), block, strict=True)]
    scale = torch.zeros(*outer, *blocks)
    for i in range(blocks[0]):
        for j in range(blocks[1]):
            cut = np.s_[..., i * block[0] : (i + 1) * block[0], :]
            part = weight[cut][..., j * block[1] : (j + 1) * block[1]]
            scale[..., i, j] = part.abs().amax((-2, -1)) / LARGEST
    wide = expand(scale, weight.shape, block)
    packed = (weight / wide).to(torch.float8_e4m3fn)
    return packed, scale, packed.float() * wide


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "form", ["blocks", "one", "per matrix", "per row", "flat rows"]
)
def test_values_are_those_of_torch(shape, form):
    torch.manual_seed(sum(shape))
    weight, rows, columns = torch.randn(shape), *shape[-2:]
    block = {"blocks": (16, 24), "per row": (1, columns), "flat rows": (1, columns)}
    block = block.get(form, (rows, columns))
    packed, scale, want = to_fp8(weight, block)
    if form == "one":
        scale = scale.amax()
        want = packed.float() * scale
    elif form == "flat rows":
        scale = scale[..., 0]
    # Asked for blocks, as the config does; shapes tell the other forms.
    asked = block if form == "blocks" else (128, 128)
    stored = make_scale("s", scale.numpy(), shape, asked)
    data = mx.array(packed.view(torch.uint8).numpy()).reshape(-1, columns)
    got = np.array(stored.dequantize(data)).reshape(shape)
    assert np.array_equal(got, want.numpy())
    total = data.shape[0]
    for start in {0, total // 3, total - 1}:
        some = stored.dequantize(data[start : start + 7], start)
        assert np.array_equal(some, got.reshape(-1, columns)[start : start + 7])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scales_must_be_numbers(bad):
    with pytest.raises(ValueError, match="x_scale_inv holds NaN or infinite"):
        make_scale("x_scale_inv", np.array([1, bad], np.float32), (2, 3), (128, 128))


def test_scales_must_fit():
    with pytest.raises(ValueError, match=r"x \[2, 2\] does not fit a weight \[8, 8\]"):
        make_scale("x", np.ones((2, 2), np.float32), (8, 8), (128, 128))


def store_fp8(raw: Path, form: str, block: tuple[int, int]) -> None:
    """Pack a source's projections; ``dequantised`` beside it is what they stand for."""
    other = raw.parent / "dequantised"
    other.mkdir()
    for file in raw.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    for file in raw.glob("*.safetensors"):
        plain, packed = load_file(file), {}
        for key, value in load_file(file).items():
            if not key.endswith(("proj.weight", "experts.gate_up_proj", "down_proj")):
                packed[key] = value
                continue
            size = block if form == "blocks" else tuple(value.shape[-2:])
            weight, scale, plain[key] = to_fp8(value.float(), size)
            plain[key] = plain[key].to(torch.bfloat16)
            packed[key] = weight
            if form == "blocks":
                packed[f"{key}_scale_inv"] = scale
            else:
                # One scale; some exporters store it without axes, some with one.
                packed[f"{key}_scale"] = scale.reshape(-1 if value.ndim == 3 else ())
                if key.endswith("weight"):
                    stem = key.removesuffix("weight")
                    packed[f"{stem}input_scale"] = torch.ones(())
        save_file(packed, file, {"format": "pt"})
        save_file(plain, other / file.name, {"format": "pt"})
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    settings |= {"weight_block_size": list(block)} if form == "blocks" else {}
    edit_config(raw, lambda config: config.update(quantization_config=settings))


@pytest.mark.parametrize("form", ["blocks", "one"])
@pytest.mark.parametrize(
    "name", ["qwen3_5", "qwen3_5_moe", "deepseek_v3", "qwen3_next", "mimo"]
)
def test_fp8_source(name, form, tmp_path, capsys):
    raw = tmp_path / "raw"
    build(raw) if name == "qwen3_5" else family(name).write(raw, seed=4)
    store_fp8(raw, form, (48, 40))
    for path in (raw, tmp_path / "dequantised"):  # every tensor in its own type
        edit_config(path, lambda c: [p.pop(k, None) for p in parts(c) for k in TYPES])
    convert(tmp_path / "dequantised", tmp_path / "want")
    capsys.readouterr()
    convert(raw, tmp_path / "out")
    assert same(read(tmp_path / "out"), read(tmp_path / "want"))
    assert config_of(tmp_path / "out") == config_of(tmp_path / "want")
    noted = (
        "activation scales, only weights are stored in FP8" in capsys.readouterr().out
    )
    assert noted == (form == "one")
    model, _ = mlx_mtp.load(tmp_path / "out")
    assert model.mtp is not None


TYPES = ("torch_dtype", "dtype")


def parts(config: dict) -> list[dict]:
    return [config, config.get("text_config", {})]


@pytest.mark.parametrize("options", [{}, {"quantize": True, "q_group_size": 32}])
def test_mlx_lm_reads_the_same(options, tmp_path):
    """Where mlx-lm dequantises as well: DeepSeek, in blocks of 128 x 128."""
    raw = family("deepseek_v3").write(tmp_path / "raw", seed=5)
    store_fp8(raw, "blocks", (128, 128))
    edit_config(raw, lambda config: config.update(torch_dtype="bfloat16"))
    convert(raw, tmp_path / "out", **options)
    # mlx-lm knows the head of the release by its number only.
    target = {k: v for k, v in read(raw).items() if ".layers.3." not in k}
    for file in raw.glob("*.safetensors"):
        file.unlink()
    mx.eval(target)
    mx.save_safetensors(str(raw / "model.safetensors"), target)
    edit_config(raw, lambda config: config.pop("quantization_config"))
    mlx_lm.convert(str(raw), str(tmp_path / "stock"), **options)
    got = read(tmp_path / "out", "model*.safetensors")
    assert same(got, read(tmp_path / "stock"))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop(SCALE), f"lacks the FP8 scales of {WEIGHT}"),
        (lambda t: t[SCALE].fill_(np.nan), f"{SCALE} holds NaN or infinite scales"),
        (
            lambda t: t.update({SCALE: torch.ones(7, 7)}),
            rf"{SCALE} \[7, 7\] does not fit a weight",
        ),
        (
            lambda t: t.update({WEIGHT: t[WEIGHT].to(torch.float8_e5m2)}),
            WEIGHT,
        ),
    ],
    ids=["no scale", "NaN", "shape", "another FP8"],
)
def test_fp8_source_is_refused(edit, words, tmp_path):
    raw = build(tmp_path / "raw")
    store_fp8(raw, "blocks", (48, 40))
    for file in raw.glob("*.safetensors"):
        tensors = load_file(file)
        if SCALE in tensors:
            edit(tensors)
            save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=words):
        convert(raw, tmp_path / "out")
    assert not (tmp_path / "out").exists()
