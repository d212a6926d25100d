"""Every kind of source, made of one set of numbers, gives the same tensors."""

import json
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from checkpoints import build
from converting import config_of, edit_config, head_of, read, rewrite, same
from families import family

import mlx_mtp
from mlx_mtp import convert
from mlx_mtp.checkpoint import MTP_FILE, MTP_PREFIX
from mlx_mtp.convert_cli import main

# transformers says so of configs whose type it does not know.
pytestmark = pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated")
TOKENS = mx.array([[81, 97, 7, 7, 250, 3, 81, 12, 90, 200]])
TARGET = "model*.safetensors"
SHARD = "model-00003-of-00003.safetensors"
QUANTIZED = {"quantize": True, "q_group_size": 32}


@pytest.fixture(scope="module")
def raw(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("source") / "raw")


@pytest.fixture(scope="module")
def plain(raw) -> Path:
    convert(raw, raw.parent / "plain")
    return raw.parent / "plain"


@pytest.fixture(scope="module", params=[{}, QUANTIZED], ids=["plain", "4 bit"])
def stock(request, raw) -> Path:
    """What mlx-lm makes of the source: no head, but a config that promises one."""
    path = raw.parent / f"stock{len(request.param)}"
    mlx_lm.convert(str(raw), str(path), **request.param)
    return path


@pytest.mark.parametrize("options", [{}, QUANTIZED], ids=["plain", "4 bit"])
def test_converted_directory(raw, tmp_path, options):
    convert(raw, tmp_path / "once", **options)
    convert(tmp_path / "once", tmp_path / "twice")
    assert same(read(tmp_path / "twice"), read(tmp_path / "once"))
    assert config_of(tmp_path / "twice") == config_of(tmp_path / "once")


def test_converted_directory_is_quantised_as_the_original(raw, plain, tmp_path):
    convert(raw, tmp_path / "raw4", **QUANTIZED)
    convert(plain, tmp_path / "plain4", **QUANTIZED)
    assert same(read(tmp_path / "plain4"), read(tmp_path / "raw4"))
    assert config_of(tmp_path / "plain4") == config_of(tmp_path / "raw4")


def test_quantised_directory_is_not_quantised_again(raw, tmp_path):
    convert(raw, tmp_path / "once", **QUANTIZED)
    with pytest.raises(ValueError, match="quantised already; leave out"):
        convert(tmp_path / "once", tmp_path / "out", quantize=True)
    convert(tmp_path / "once", tmp_path / "half", dtype="float16")
    model, _ = mlx_mtp.load(tmp_path / "half")
    kinds = {v.dtype for k, v in read(tmp_path / "half").items() if "A_log" not in k}
    assert kinds == {mx.uint32, mx.float16}
    assert mx.isfinite(model(TOKENS)).all()


def sidecar(raw: Path, path: Path, name: str, *, prefix: bool, form: str) -> None:
    """The source with its head in a file beside it."""
    tensors = read(raw)
    head = {k: tensors.pop(k) for k in list(tensors) if k.startswith(MTP_PREFIX)}
    head = {k if prefix else k.removeprefix(MTP_PREFIX): v for k, v in head.items()}
    path.mkdir()
    for file in raw.iterdir():
        if file.suffix != ".safetensors" and "index" not in file.name:
            (path / file.name).write_bytes(file.read_bytes())
    (path / name).parent.mkdir(exist_ok=True)
    mx.save_safetensors(str(path / "model.safetensors"), tensors)
    mx.save_safetensors(str(path / name), head, {"format": form})


@pytest.mark.parametrize("prefix", [True, False], ids=["prefix", "no prefix"])
@pytest.mark.parametrize("name", [MTP_FILE, "mtp/weights.safetensors"])
def test_sidecar(raw, plain, tmp_path, name, prefix):
    sidecar(raw, tmp_path / "in", name, prefix=prefix, form="pt")
    convert(tmp_path / "in", tmp_path / "out")
    assert same(read(tmp_path / "out"), read(plain))


def test_sidecar_that_is_shifted_already(raw, plain, tmp_path):
    name = "model-mtp.safetensors"
    sidecar(raw, tmp_path / "in", name, prefix=False, form="mlx")
    mx.save_safetensors(str(tmp_path / "in" / name), head_of(plain), {"format": "mlx"})
    convert(tmp_path / "in", tmp_path / "out")
    assert same(read(tmp_path / "out"), read(plain))


def test_shard_that_the_index_does_not_name(raw, plain, tmp_path):
    source = build(tmp_path / "in")
    index = source / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    kept = {k: f for k, f in data["weight_map"].items() if f != SHARD}
    index.write_text(json.dumps(data | {"weight_map": kept}))
    convert(source, tmp_path / "out")
    assert same(read(tmp_path / "out"), read(plain))


def head_shard(raw: Path, path: Path) -> Path:
    """Of the original what a graft needs: config, index and the head's shard."""
    path.mkdir()
    for name in (SHARD, "config.json", "model.safetensors.index.json"):
        (path / name).write_bytes((raw / name).read_bytes())
    return path


def drafter(plain: Path, path: Path) -> Path:
    """A repository of a head alone, as mlx-vlm writes it."""
    path.mkdir()
    mx.save_safetensors(
        str(path / "model.safetensors"), head_of(plain), {"format": "mlx"}
    )
    text = config_of(plain)["text_config"]
    config = {"model_type": "qwen3_5_mtp", "text_config": text}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("kind", ["original", "converted", "drafter"])
def test_graft(raw, plain, stock, tmp_path, capsys, kind):
    donors = {
        "original": lambda: head_shard(raw, tmp_path / "donor"),
        "converted": lambda: plain,
        "drafter": lambda: drafter(plain, tmp_path / "donor"),
    }
    convert(stock, tmp_path / "out", mtp_from=donors[kind]())
    assert same(read(tmp_path / "out", TARGET), read(stock))
    assert same(head_of(tmp_path / "out"), head_of(plain))
    compared = "model_type qwen3_5, hidden_size 64, vocab_size 288, num_hidden_layers 4"
    assert f"as in the target: {compared}" in capsys.readouterr().out
    model, _ = mlx_mtp.load(tmp_path / "out")
    assert model.mtp is not None
    mlx_lm.load(str(tmp_path / "out"))


def test_graft_with_bits_of_its_own(raw, stock, tmp_path):
    options = {"mtp_bits": 8, "mtp_group_size": 32}
    convert(stock, tmp_path / "out", mtp_from=raw, **options)
    convert(raw, tmp_path / "raw8", **options)
    assert same(head_of(tmp_path / "out"), head_of(tmp_path / "raw8"))
    assert config_of(tmp_path / "out")["mtp"] == config_of(tmp_path / "raw8")["mtp"]


def test_graft_has_the_type_of_the_target(raw, tmp_path):
    mlx_lm.convert(str(raw), str(tmp_path / "half"), dtype="float16")
    convert(tmp_path / "half", tmp_path / "out", mtp_from=raw)
    assert {v.dtype for v in head_of(tmp_path / "out").values()} == {mx.float16}


def test_base_without_a_head_is_refused_with_the_way_out(stock, tmp_path):
    with pytest.raises(ValueError, match="add its head with --mtp-from ORIGINAL"):
        convert(stock, tmp_path / "out")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"hidden_size": 32}, "hidden_size 32 and 64"),
        ({"vocab_size": 300}, "vocab_size 300 and 288"),
        ({"num_hidden_layers": 8}, "num_hidden_layers 8 and 4"),
    ],
    ids=str,
)
def test_graft_of_another_model(stock, raw, tmp_path, edit, words):
    donor = head_shard(raw, tmp_path / "donor")
    edit_config(donor, lambda config: config["text_config"].update(edit))
    with pytest.raises(ValueError, match=f"do not belong together: {words}"):
        convert(stock, tmp_path / "out", mtp_from=donor)


def test_graft_of_another_family(stock, tmp_path):
    other = family("mimo").write(tmp_path / "mimo")
    with pytest.raises(ValueError, match="model_type 'mimo' and 'qwen3_5'"):
        convert(stock, tmp_path / "out", mtp_from=other)


def test_graft_without_the_shard(stock, raw, tmp_path):
    donor = head_shard(raw, tmp_path / "donor")
    (donor / SHARD).unlink()
    with pytest.raises(ValueError, match=f"lacks {SHARD}, where its head lies"):
        convert(stock, tmp_path / "out", mtp_from=donor)


@pytest.mark.parametrize("norms", ["raw", "shifted"])
def test_norms_of_an_unknown_form(raw, plain, stock, tmp_path, norms):
    """Nothing in the file says whether 1 is in the norms already."""
    donor = drafter(plain, tmp_path / "donor")
    head = head_of(plain)
    if norms == "raw":
        tensors = read(raw).items()
        head = {k.removeprefix("mtp."): v for k, v in tensors if k[:4] == "mtp."}
    mx.save_safetensors(str(donor / "model.safetensors"), head)
    with pytest.raises(ValueError, match="nothing says how the norms"):
        convert(stock, tmp_path / "out", mtp_from=donor)
    convert(stock, tmp_path / "out", mtp_from=donor, mtp_norms=norms)
    assert same(head_of(tmp_path / "out"), head_of(plain))


def test_norms_near_zero_are_noted(raw, plain, stock, tmp_path, capsys):
    """The file says that they are shifted; they are not."""
    donor = drafter(plain, tmp_path / "donor")
    head = {k[4:]: v for k, v in read(raw).items() if k.startswith(MTP_PREFIX)}
    mx.save_safetensors(str(donor / "model.safetensors"), head, {"format": "mlx"})
    convert(stock, tmp_path / "out", mtp_from=donor)
    printed = capsys.readouterr().out
    assert "near 0 on average (layers.0." in printed
    assert "--mtp-norms raw" in printed
    convert(stock, tmp_path / "good", mtp_from=donor, mtp_norms="raw")
    assert same(head_of(tmp_path / "good"), head_of(plain))
    assert "near 0" not in capsys.readouterr().out


def test_command(raw, stock, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["--hf-path", str(stock), "--mlx-path", str(out)]
    main([*command, "--mtp-from", str(raw), "--mtp-mode", "mxfp8"])
    assert config_of(out)["mtp"]["quantization"]["mode"] == "mxfp8"
    capsys.readouterr()
    out.rename(tmp_path / "done")
    for options in (["--mtp-from", str(stock)], ["--mtp-from", "nowhere"], []):
        with pytest.raises(SystemExit) as ended:
            main([*command, *options])
        error = capsys.readouterr().err
        assert (ended.value.code, error[:7], error.count("\n")) == (1, "error: ", 1)
        assert not out.exists()


@pytest.mark.parametrize(
    "name", ["deepseek_v3", "qwen3_5_moe_single_experts", "ernie4_5_moe", "mimo"]
)
def test_graft_in_other_families(name, tmp_path):
    raw = family(name).write(tmp_path / "raw", seed=3)
    convert(raw, tmp_path / "whole")
    convert(raw, tmp_path / "base")
    (tmp_path / "base" / MTP_FILE).unlink()
    edit_config(tmp_path / "base", lambda config: config.pop("mtp"))
    convert(tmp_path / "base", tmp_path / "out", mtp_from=raw)
    assert same(read(tmp_path / "out"), read(tmp_path / "whole"))
    assert config_of(tmp_path / "out") == config_of(tmp_path / "whole")


@pytest.mark.parametrize(
    "options",
    [{"q_group_size": 32}, {"q_bits": 8}, {"q_mode": "mxfp4"}, {"q_mode": "nvfp4"}],
    ids=str,
)
def test_copies_are_recognised_when_packed(tmp_path, options):
    """DeepSeek's head has copies of both ends; one of them is changed here."""
    raw = family("deepseek_v3").write(tmp_path / "raw", seed=3)
    convert(raw, tmp_path / "base", quantize=True, mtp_bits=16, **options)
    (tmp_path / "base" / MTP_FILE).unlink()
    edit_config(tmp_path / "base", lambda config: config.pop("mtp"))
    key = "model.layers.3.embed_tokens.weight"
    rewrite(raw, lambda w: w.update({key: w[key] * mx.array([1.0] * 63 + [1.5])}))
    convert(tmp_path / "base", tmp_path / "out", mtp_from=raw)
    marker = config_of(tmp_path / "out")["mtp"]
    assert (marker["embedding"], marker["output"]) == ("own", "shared")


def test_mixed_types(raw, tmp_path):
    """Each tensor keeps its own unless the config names one for all."""
    source = build(tmp_path / "in")
    kinds = (mx.float32, mx.float16, mx.bfloat16)

    def mix(tensors):
        for number, key in enumerate(sorted(tensors)):
            tensors[key] = tensors[key].astype(kinds[number % 3])

    rewrite(source, mix)
    edit_config(source, lambda config: config["text_config"].pop("dtype"))
    convert(source, tmp_path / "own")
    convert(source, tmp_path / "half", dtype="bfloat16")
    own, half = read(tmp_path / "own"), read(tmp_path / "half")
    assert {v.dtype for v in own.values()} == set(kinds)
    exempt = {k for k, v in half.items() if v.dtype != mx.bfloat16}
    assert all(k.endswith("A_log") for k in exempt)
    model, _ = mlx_mtp.load(tmp_path / "half")
    assert mx.isfinite(model(TOKENS)).all()
