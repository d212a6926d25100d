"""Gemma 4 with its assistant, by the same checks as the families with a head."""

import functools
import json
import shutil
from functools import cached_property

import mlx.core as mx
import numpy as np
import pytest
import test_families as checks
import torch
from broken import check_line
from converting import edit_config, rewrite
from families import DRAFTERS, family
from families.gemma4 import ASSISTANT
from family_checks import draft_logits

import mlx_mtp
from mlx_mtp.generate_cli import main as generate_main
from mlx_mtp.load import DEMO_PATH
from mlx_mtp.models.assistant import Assistant, ClusteredOutput
from mlx_mtp.models.gemma4 import Gemma4Target
from mlx_mtp.speculative.assistant_drafter import AssistantDrafter

K = 3


class Case(checks.Case):
    @cached_property
    def model(self):
        return mlx_mtp.load(self.path, draft_model=self.path / ASSISTANT)[0]


@pytest.fixture(scope="module")
def make_case(tmp_path_factory):
    @functools.cache
    def make(name: str) -> Case:
        raw = family(name).write(tmp_path_factory.mktemp(name) / "raw", seed=7)
        return Case(family(name), raw, raw)  # mlx-lm reads it as it is

    return make


@pytest.fixture(params=[f.name for f in DRAFTERS])
def case(request, make_case):
    return make_case(request.param)


def check_drafts(case: Case) -> None:
    """Impossible tokens in the same places, the others' logits equal torch's."""
    for tokens, got in draft_logits(case.model, checks.PROMPT, case.text, K, 4):
        want = case.reference.drafts(tokens, K, got.argmax(-1).tolist()).logits[0]
        allowed = torch.isfinite(want).numpy()
        assert np.array_equal(np.isfinite(got), allowed)
        assert checks.difference(mx.array(got[allowed]), want[allowed]) < checks.RIGHT


def test_assistant_equals_torch(case):
    check_drafts(case)


@pytest.mark.parametrize("k", [1, 4])
def test_drafts_change_nothing(case, k):
    checks.test_drafts_change_nothing(case, k)


def same(case):
    checks.test_drafts_change_nothing(case, K)


CHECKS = [
    checks.test_target_equals_torch,
    checks.test_stock_mlx_lm,
    checks.test_rows,
    checks.test_batch,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_as_a_family(case, check):
    check(case)


def test_prompt_cache(case, tmp_path):
    checks.test_prompt_cache(case, tmp_path)


def test_command(make_case, capsys):
    path = make_case("gemma4").path
    command = ["--model", str(path), "--prompt", "Hi", "--max-tokens", "5", "--json"]
    texts = []
    for options in ([], ["--mtp", "--draft-model", str(path / ASSISTANT)]):
        generate_main(command + options)
        document = json.loads(capsys.readouterr().out)
        texts.append(document["tokens"])
    assert texts[0] == texts[1]


def position_moves(monkeypatch):
    """Every draft at a position of its own."""
    right = Assistant.__call__

    def wrong(self, embedding, hidden, shared, masks, position):
        self.step = getattr(self, "step", -1) + 1
        return right(self, embedding, hidden, shared, masks, position + self.step % K)

    monkeypatch.setattr(Assistant, "__call__", wrong)


def embedding_not_scaled(monkeypatch):
    embed = Gemma4Target.embed
    monkeypatch.setattr(Gemma4Target, "embed", lambda self, x: embed(self, x) / 8)


def no_window(monkeypatch):
    monkeypatch.setattr(Gemma4Target, "window", 99)


def first_layer_of_a_type(monkeypatch):
    def wrong(self, caches):
        pairs = list(zip(self.model.args.layer_types, caches))
        return dict(reversed(pairs))

    monkeypatch.setattr(Gemma4Target, "shared", wrong)


def chain_not_projected_from_the_norm(monkeypatch):
    right = Assistant.chain
    monkeypatch.setattr(Assistant, "chain", lambda self, x: right(self, 2 * x))


def all_tokens_possible(monkeypatch):
    def wrong(self, x, embedding):
        return embedding.as_linear(x)

    monkeypatch.setattr(ClusteredOutput, "__call__", wrong)


def left_over_keys_seen(monkeypatch):
    """Those of rejected drafts, and the room behind."""
    right = Assistant.masks

    def wrong(self, target, position, size):
        return right(self, target, mx.full(position.shape, size), size)

    monkeypatch.setattr(Assistant, "masks", wrong)


def last_of_the_block(monkeypatch):
    """Whether it was kept or not."""
    right = AssistantDrafter.make

    def wrong(self, tokens, hidden, kept, *rest):
        return right(self, tokens, hidden, mx.full(kept.shape, tokens.shape[1]), *rest)

    monkeypatch.setattr(AssistantDrafter, "make", wrong)


@pytest.mark.parametrize(
    "plant",
    [
        position_moves,
        embedding_not_scaled,
        no_window,
        first_layer_of_a_type,
        chain_not_projected_from_the_norm,
        all_tokens_possible,
        left_over_keys_seen,
        last_of_the_block,
    ],
)
def test_fault_is_seen(make_case, monkeypatch, plant):
    old = make_case("gemma4")
    case = Case(old.family, old.raw, old.path)
    case.__dict__ |= {"plain": old.plain, "reference": old.reference}
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_drafts(case)


@pytest.fixture
def raw(make_case, tmp_path):
    return shutil.copytree(make_case("gemma4").path, tmp_path / "raw")


def assert_refused(raw, *words):
    with pytest.raises(ValueError) as refused:  # noqa: PT011, the words follow
        mlx_mtp.load(raw, draft_model=raw / ASSISTANT)
    check_line(str(refused.value), *words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(backbone_hidden_size=96), ("another model", "96")),
        (lambda c: c["text_config"].update(vocab_size=300), ("vocab_size is 300",)),
        (lambda c: c["text_config"].update(head_dim=8), ("head_dim is 8",)),
        (lambda c: c.update(model_type="gemma4_unified_assistant"), ("unified",)),
    ],
)
def test_assistant_of_another_model(raw, change, words):
    edit_config(raw / ASSISTANT, change)
    assert_refused(raw, *words)


def test_assistant_is_incomplete(raw):
    rewrite(raw / ASSISTANT, lambda w: w.pop("post_projection.weight"))
    assert_refused(raw, "post_projection.weight", "download the assistant again")


def test_gemma_is_not_converted(raw, tmp_path):
    with pytest.raises(ValueError, match="assistant checkpoint drafts for it"):
        mlx_mtp.convert(raw, tmp_path / "out")


def test_only_gemma_takes_a_draft_model(make_case):
    assistant = make_case("gemma4").path / ASSISTANT
    with pytest.raises(ValueError, match="a qwen3_5 model drafts with its MTP head"):
        mlx_mtp.load(DEMO_PATH, draft_model=assistant)
