"""Loading: what is attached, what it costs in memory, and what is refused."""

import importlib
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from broken import BROKEN, check_line, copy_of, drop_head, index_head
from checkpoints import EOS_IDS, build
from checks import assert_same_stream, mtp_stream, plain_stream
from converting import HEAD_LINEARS, HEAD_NORMS
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

import mlx_mtp
from mlx_mtp.checkpoint import MTP_FILE
from mlx_mtp.models import FAMILIES
from mlx_mtp.models.gated_delta_net import RewindableGatedDeltaNet

QUESTION = [ord("Q")]
PROMPT = [ord(c) for c in "load me"]


@pytest.fixture
def good(oracle_dir, tmp_path) -> Path:
    return copy_of(oracle_dir, tmp_path / "good")


def assert_refused(path, *words: str, **options) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011, the words follow
        mlx_mtp.load(path, **options)
    check_line(str(refused.value), *words)


def test_head_and_tokenizer(oracle_dir):
    model, tokenizer = mlx_mtp.load(oracle_dir)
    names = {name for name, _ in tree_flatten(model.mtp.parameters())}
    assert names == {f"{name}.weight" for name in HEAD_LINEARS | HEAD_NORMS}
    assert not model.training
    assert not model.mtp.training
    assert tokenizer.eos_token_ids == set(EOS_IDS)
    assert tokenizer.has_chat_template


def test_string_as_path(oracle_dir):
    assert mlx_mtp.load(str(oracle_dir))[0].mtp is not None


def test_without_the_head(oracle_dir):
    model, _ = mlx_mtp.load(oracle_dir, mtp=False)
    assert model.mtp is None


def test_directory_of_stock_conversion(good):
    """It states ``mtp_num_hidden_layers: 1`` as the original did."""
    drop_head(good)
    model, _ = mlx_mtp.load(good)
    assert model.mtp is None


def test_promised_head_may_be_left_out(good):
    (good / MTP_FILE).unlink()
    model, tokenizer = mlx_mtp.load(good, mtp=False)
    text = mlx_mtp.generate(model, tokenizer, QUESTION, mtp=False)
    assert text == "aé🙂b"


def test_tokenizer_config(oracle_dir):
    options = {"eos_token": "<|endoftext|>"}
    _, tokenizer = mlx_mtp.load(oracle_dir, tokenizer_config=options)
    assert tokenizer.eos_token == "<|endoftext|>"


@pytest.mark.parametrize("indexed", [False, True])
def test_index_does_not_matter(good, indexed):
    if indexed:
        index_head(good)
    model, _ = mlx_mtp.load(good)
    got = mtp_stream(model, QUESTION, 9, 1)
    assert [from_draft for *_, from_draft in got] == [False, *[True, False] * 4]
    mlx_lm.load(str(good))


def test_no_weight_is_random(random_dir):
    """All that a fresh head draws is overwritten; a rest would only cost acceptance."""
    streams = []
    for seed in (1, 2):
        mx.random.seed(seed)
        model, _ = mlx_mtp.load(random_dir)
        steps = mtp_stream(model, PROMPT, 20, 3)
        head = dict(tree_flatten(model.mtp.parameters()))
        streams.append((steps, head))
    (first, first_head), (second, second_head) = streams
    assert [s[::2] for s in first] == [s[::2] for s in second]
    assert all(mx.array_equal(first_head[name], second_head[name]) for name in head)


class TestMemory:
    def test_swapped_layers_share_their_weights(self, random_dir):
        model, _ = load_model(random_dir)
        before = {name: id(value) for name, value in tree_flatten(model.parameters())}
        FAMILIES[model.model_type].make_rewindable(model)
        after = {name: id(value) for name, value in tree_flatten(model.parameters())}
        assert after == before
        layers = model.language_model.layers
        swapped = [layer for layer in layers if layer.is_linear]
        assert len(swapped) == 3
        for layer in swapped:
            assert type(layer.linear_attn) is RewindableGatedDeltaNet

    @pytest.mark.parametrize("name", ["random_dir", "oracle_dir"])
    def test_nothing_is_held_twice(self, name, request):
        path = request.getfixturevalue(name)
        stored = sum(f.stat().st_size for f in path.glob("*.safetensors"))
        mx.synchronize()
        before = mx.get_active_memory()
        model, _ = mlx_mtp.load(path)
        held = mx.get_active_memory() - before
        assert 0.95 * stored < held < 1.02 * stored
        assert model.mtp is not None

    def test_lazy(self, random_dir):
        stored = sum(f.stat().st_size for f in random_dir.glob("*.safetensors"))
        mx.synchronize()
        before = mx.get_active_memory()
        model, _ = mlx_mtp.load(random_dir, lazy=True)
        assert mx.get_active_memory() - before < 0.1 * stored
        got = mtp_stream(model, PROMPT, 12, 2)
        assert_same_stream(got, plain_stream(random_dir, PROMPT, 12))


QUANTIZED = {
    "4 bits": ({"quantize": True, "q_bits": 4, "q_group_size": 32}, (4, 32), (4, 32)),
    "8 bits": ({"quantize": True, "q_bits": 8, "q_group_size": 32}, (8, 32), (8, 32)),
    "4 bits, head 8": (
        {"quantize": True, "q_bits": 4, "q_group_size": 32, "mtp_bits": 8},
        (4, 32),
        (8, 32),
    ),
    "4 bits, head 16": (
        {"quantize": True, "q_bits": 4, "q_group_size": 32, "mtp_bits": 16},
        (4, 32),
        None,
    ),
    "head alone": ({"mtp_bits": 8, "q_group_size": 32}, None, (8, 32)),
    "mxfp8": ({"quantize": True, "q_mode": "mxfp8"}, (8, 32), (8, 32)),
}


def bits_of(module: nn.Module) -> set[tuple[int, int] | None]:
    """(bits, group size) of every linear layer, None for a plain one."""
    kinds = (nn.Linear, nn.QuantizedLinear)
    layers = [m for _, m in module.named_modules() if isinstance(m, kinds)]
    packed = nn.QuantizedLinear
    return {(m.bits, m.group_size) if isinstance(m, packed) else None for m in layers}


class TestQuantized:
    @pytest.fixture(params=QUANTIZED)
    def case(self, request, make_model_dir, text_chain):
        """Path and bits. An oracle's output layer keeps its text in four bits too."""
        convert_args, target_bits, head_bits = QUANTIZED[request.param]
        path = make_model_dir(
            f"load {request.param}", convert_args, kind="oracle", succ=text_chain
        )
        return path, target_bits, head_bits

    def test_bits(self, case):
        path, target_bits, head_bits = case
        model, _ = mlx_mtp.load(path)
        assert bits_of(model.language_model) == {target_bits}
        assert bits_of(model.mtp) == {head_bits}
        linears = {n for n, m in model.mtp.named_modules() if hasattr(m, "bits")}
        assert linears == (set() if head_bits is None else HEAD_LINEARS)

    def test_drafts_are_right(self, case):
        path, *_ = case
        model, _ = mlx_mtp.load(path)
        got = mtp_stream(model, QUESTION, 9, 3)
        assert_same_stream(got, plain_stream(path, QUESTION, 9))
        pattern = [False, *[True, True, True, False] * 2]
        assert [from_draft for *_, from_draft in got] == pattern


@pytest.mark.parametrize("name", BROKEN)
def test_broken_directory(good, name):
    break_directory, words = BROKEN[name]
    break_directory(good)
    assert_refused(good, *words)


@pytest.mark.parametrize("shards", [1, 3])
def test_raw_directory(tmp_path, shards):
    raw = build(tmp_path / "raw", shards=shards)
    way_out = f"python convert.py --hf-path {raw} --mlx-path"
    assert_refused(raw, "raw layout", way_out)
    assert_refused(raw, "raw layout", way_out, mtp=False)


@pytest.mark.parametrize("path", ["/nowhere/at/all", "no such directory", Path("a/b")])
def test_missing_directory(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert_refused(path, str(path), "is no directory", "owner/name")


def test_file_instead_of_directory(good):
    file = good / "config.json"
    assert_refused(file, str(file), "is a file")


class TestRepository:
    @pytest.fixture
    def hub(self):
        return importlib.import_module("mlx_mtp.hub")

    def test_download(self, hub, monkeypatch, oracle_dir):
        asked = {}

        def download(name, **options):
            asked.update(name=name, **options)
            return str(oracle_dir)

        monkeypatch.setattr(hub, "snapshot_download", download)
        model, _ = mlx_mtp.load("owner/model", revision="v1")
        assert model.mtp is not None
        assert (asked["name"], asked["revision"]) == ("owner/model", "v1")
        assert MTP_FILE in asked["allow_patterns"]
        assert "model*.safetensors" in asked["allow_patterns"]

    @pytest.mark.parametrize("kind", [OSError, ValueError])
    def test_failure(self, hub, monkeypatch, kind):
        def download(*args, **options):
            raise kind("404\nnot found")

        monkeypatch.setattr(hub, "snapshot_download", download)
        assert_refused("owner/model", "owner/model", "404 not found")
