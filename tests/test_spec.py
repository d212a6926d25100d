"""The contract's data: where heads lie in a source, and which points are toggles."""

import mlx.core as mx
import pytest
from broken import copy_of, drop_head
from checks import assert_same_stream, mtp_stream, plain_stream
from converting import config_of, edit_config

import mlx_mtp
from mlx_mtp.models import FAMILIES
from mlx_mtp.models.spec import MTPSpec

PROMPT = [ord(c) for c in "toggles"]
SPEC = MTPSpec(
    family="some",
    model_types=("some",),
    prefixes=("model.layers.{layer}.", "model.mtp.{module}."),
    names=(("enorm.", "pre_fc_norm_embedding."), ("", "layers.0.")),
)


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("model.layers.4.enorm.weight", (0, "pre_fc_norm_embedding.weight")),
        ("model.layers.6.mlp.up.weight", (2, "layers.0.mlp.up.weight")),
        ("model.mtp.1.enorm.weight", (1, "pre_fc_norm_embedding.weight")),
        ("model.layers.3.enorm.weight", None),
        ("model.layers.40.norm.weight", (36, "layers.0.norm.weight")),
        ("xmodel.layers.4.enorm.weight", None),
        ("model.layers.x.enorm.weight", None),
        ("model.norm.weight", None),
    ],
)
def test_place_of_a_tensor(key, place):
    assert SPEC.locate(key, 4) == place


def test_unknown_number_of_layers():
    assert SPEC.locate("model.layers.4.enorm.weight", None) is None


def test_supported_families():
    names = mlx_mtp.supported_families()
    assert names == sorted(FAMILIES)
    assert {"qwen3_5", "qwen3_5_text"} <= set(names)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hiden": "pre_norm"}, ("'hiden'", "possible: hidden, chain, mask_first")),
        ({"hidden": "before"}, ("hidden 'before'", "'post_norm', 'pre_norm'")),
        ({"mask_first": 1}, ("mask_first 1", "False, True")),
        ({"output": "own"}, ("'output'",)),
    ],
)
def test_wrong_toggle(random_dir, values, words):
    with pytest.raises(ValueError) as refused:  # noqa: PT011, the words follow
        mlx_mtp.load(random_dir, mtp_config=values)
    message = str(refused.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "values",
    [
        {"hidden": "pre_norm"},
        {"chain": "pre_norm"},
        {"mask_first": True},
        {"hidden": "pre_norm", "chain": "pre_norm", "mask_first": True},
    ],
)
def test_toggles_change_drafts_and_never_the_output(random_dir, values):
    want = plain_stream(random_dir, PROMPT, 12)
    model, _ = mlx_mtp.load(random_dir, mtp_config=values)
    assert_same_stream(mtp_stream(model, PROMPT, 12, 3), want)
    plain, _ = mlx_mtp.load(random_dir)
    logits = [draft_logits(m, PROMPT) for m in (model, plain)]
    assert not mx.array_equal(*logits)


def draft_logits(model, ids) -> mx.array:
    """Of two chained steps behind ``ids``."""
    target, head = FAMILIES[model.model_type].target(model), model.mtp
    tokens, cache = mx.array([ids]), head.make_cache()
    hidden = target.hidden(tokens[:, :-1], target.make_cache())
    state = head(head.embed(target, tokens[:, 1:]), hidden, cache)[:, -1:]
    again = head(head.embed(target, tokens[:, -1:]), state, cache)
    return head.logits(target, mx.concatenate([state, again], axis=1))


def test_stages_of_the_target(random_dir):
    """Before and after the final norm give the same logits, and no module changes."""
    model, _ = mlx_mtp.load(random_dir)
    ids = mx.array([PROMPT])
    want, norm = model(ids), model.model.norm
    family = FAMILIES[model.model_type]
    post = family.target(model)
    early, _ = mlx_mtp.load(random_dir, mtp_config={"hidden": "pre_norm"})
    pre = family.target(early)
    hidden = [t.hidden(ids, t.make_cache()) for t in (post, pre)]
    assert not mx.allclose(*hidden)
    assert mx.array_equal(pre.norm(hidden[1]), hidden[0])
    for target, states in zip((post, pre), hidden):
        assert mx.array_equal(target.logits(states), want)
    assert model.model.norm is norm


def test_two_runs_at_once(random_dir):
    """On one model whose head reads the states before the final norm."""
    model, _ = mlx_mtp.load(random_dir, mtp_config={"hidden": "pre_norm"})
    prompts = (PROMPT, PROMPT[::-1])
    runs = [mlx_mtp.mtp_generate_step(p, model, max_tokens=6) for p in prompts]
    turns = list(zip(*runs))
    for got, prompt in zip(zip(*turns), prompts):
        assert_same_stream(list(got), plain_stream(random_dir, prompt, 6))


def test_toggle_of_the_marker(random_dir, tmp_path):
    path = copy_of(random_dir, tmp_path / "marked")
    edit_config(path, lambda c: c["mtp"].update(hidden="pre_norm"))
    assert mlx_mtp.load(path)[0].mtp.spec.hidden == "pre_norm"
    over = mlx_mtp.load(path, mtp_config={"hidden": "post_norm"})[0]
    assert over.mtp.spec.hidden == "post_norm"


def test_marker_of_an_earlier_version(random_dir, tmp_path):
    path = copy_of(random_dir, tmp_path / "old")
    later = ("chain", "mask_first", "embedding", "output")
    edit_config(path, lambda c: [c["mtp"].pop(name) for name in later])
    assert set(config_of(path)["mtp"]) == {
        "format",
        "family",
        "num_modules",
        "hidden",
        "quantization",
    }
    model, _ = mlx_mtp.load(path)
    assert model.mtp.spec == FAMILIES["qwen3_5"].spec


def test_toggles_without_a_head(random_dir, tmp_path):
    path = copy_of(random_dir, tmp_path / "plain")
    drop_head(path)
    with pytest.raises(ValueError, match="needs a checkpoint with an MTP head"):
        mlx_mtp.load(path, mtp_config={"hidden": "pre_norm"})
