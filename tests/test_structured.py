"""Structured output with a grammar library: JSON schema enforced, MTP on."""

import json

import llguidance
import llguidance.hf
import mlx.core as mx
import numpy as np
import pytest
from checkpoints import END, VOCAB_SIZE

import mlx_mtp

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ann", "bob"]},
        "tags": {"type": "array", "items": {"enum": ["x", "yy"]}, "maxItems": 2},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "tags", "ok"],
    "additionalProperties": False,
}


class Grammar:
    """llguidance's matcher as a logits processor; it must see every token once."""

    def __init__(self, tokenizer):
        grammar = llguidance.LLMatcher.grammar_from_json_schema(
            json.dumps(SCHEMA), defaults={"whitespace_flexible": False}
        )
        fast = llguidance.hf.from_tokenizer(
            tokenizer._tokenizer, n_vocab=VOCAB_SIZE, eos_token=END
        )
        self.matcher, self.seen = llguidance.LLMatcher(fast, grammar), None

    def __call__(self, tokens, logits):
        if self.seen is None:
            self.seen = tokens.size  # the prompt is not part of the grammar
        for token in tokens[self.seen :].tolist():
            assert self.matcher.consume_token(token), self.matcher.get_error()
        self.seen = tokens.size
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[:VOCAB_SIZE].astype(bool)
        return mx.where(mx.array(allowed), logits, -mx.inf)


class RestorableGrammar(Grammar):
    """The same with the protocol, so that the drafts keep to the grammar as well."""

    def snapshot(self):
        return self.matcher.deep_copy(), self.seen

    def restore(self, state):
        self.matcher, self.seen = state


def run(loaded, grammar, **options):
    model, tokenizer = loaded
    responses = list(
        mlx_mtp.stream_generate(
            model,
            tokenizer,
            "Q",
            max_tokens=80,
            logits_processors=[grammar(tokenizer)],
            **options,
        )
    )
    return "".join(r.text for r in responses), responses[-1]


@pytest.fixture(scope="module")
def loaded(random_dir):
    return mlx_mtp.load(random_dir)


@pytest.mark.parametrize("grammar", [Grammar, RestorableGrammar])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_json_schema_greedy(loaded, grammar, k):
    want, _ = run(loaded, grammar, mtp=False)
    text, last = run(loaded, grammar, num_draft_tokens=k)
    assert text == want
    assert last.finish_reason == "stop"
    value = json.loads(text)
    assert list(value) == ["name", "tags", "ok"]
    assert value["name"] in ("ann", "bob")


def test_drafts_that_keep_to_the_grammar_are_accepted_more(loaded):
    """A random head knows nothing; within the grammar often one token is possible."""
    _, blind = run(loaded, Grammar, num_draft_tokens=3)
    _, guided = run(loaded, RestorableGrammar, num_draft_tokens=3)
    assert guided.stats.acceptance_rate > blind.stats.acceptance_rate + 0.2


@pytest.mark.parametrize("acceptance", ["rejection", "block", "coupled"])
@pytest.mark.parametrize("seed", [1, 2])
def test_json_schema_sampled(loaded, acceptance, seed):
    text, _ = run(loaded, RestorableGrammar, temp=1.5, seed=seed, acceptance=acceptance)
    assert set(json.loads(text)) == {"name", "tags", "ok"}


def test_coupled_equals_plain_under_a_grammar(loaded):
    options = {"temp": 1.5, "seed": 9, "acceptance": "coupled"}
    want, _ = run(loaded, Grammar, mtp=False, **options)
    for k in (1, 3):
        assert run(loaded, Grammar, num_draft_tokens=k, **options)[0] == want
        assert run(loaded, RestorableGrammar, num_draft_tokens=k, **options)[0] == want
