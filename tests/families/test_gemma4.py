"""The reference of Gemma 4's assistant against transformers' own drafting."""

import copy

import mlx.core as mx
import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.candidate_generator import (
    SinglePositionMultiTokenCandidateGenerator,
)
from transformers.modeling_outputs import ModelOutput

from families import DRAFTERS
from families.gemma4 import SLIDING

from .test_oracles import RIGHT, WRONG, difference, stock_model

LENGTH, K = 40, 4
every_drafter = pytest.mark.parametrize("name", [f.name for f in DRAFTERS])


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    made = {}
    for one in DRAFTERS:
        made[one.name] = one.load(one.write(tmp_path_factory.mktemp(one.name), seed=3))
    return made


@pytest.fixture(scope="module")
def tokens():
    return torch.from_numpy(np.random.default_rng(1).integers(0, 256, (1, LENGTH)))


def logit_difference(got, want) -> float:
    """Minus infinity has to stand in the same places."""
    allowed = torch.isfinite(want)
    if not torch.equal(torch.isfinite(got), allowed):
        return float("inf")
    return difference(got[allowed], want[allowed])


@every_drafter
def test_stock_target(name, references, tokens):
    reference = references[name]
    model = stock_model(reference.path, reference.is_head)
    got = np.array(model(mx.array(tokens.numpy())))
    assert difference(got, reference.target(tokens).logits) < RIGHT


@every_drafter
def test_drafts_of_transformers(name, references, tokens):
    """Within the window, where both agree on what a sliding layer sees."""
    reference = references[name]
    tokens = tokens[:, : reference.config.sliding_window - 1]
    assistant = reference.assistant
    assistant.generation_config = GenerationConfig(num_assistant_tokens=K)
    drafting = SinglePositionMultiTokenCandidateGenerator(
        assistant,
        reference.decoder.get_input_embeddings(),
        GenerationConfig(max_length=100),
    )
    read = tokens[:, :-1]
    outputs = ModelOutput(
        hidden_states=(reference.target(read).post_norm,),
        shared_kv_states=reference.kv(read),
    )
    found, logits = drafting.get_candidates(tokens, {}, outputs, False, 0)
    want = reference.drafts(tokens, K)
    assert found[:, -K:].tolist() == want.tokens.tolist()
    allowed = torch.isfinite(want.logits)
    assert allowed.all() != reference.assistant_config.use_ordered_embeddings
    assert difference(logits[allowed], want.logits[allowed]) < RIGHT
    lowest = logits.amin(-1, keepdim=True).expand_as(logits)
    assert torch.equal(logits[~allowed], lowest[~allowed])


@every_drafter
def test_assistant_tensors_are_used(name, references, tokens):
    reference = references[name]
    states = reference.target(tokens).post_norm
    rows = states[:, :-1], tokens[:, 1:], reference.kv(tokens[:, :-1])
    at = torch.arange(1, LENGTH)
    want = reference.head(*rows, at)
    noise = torch.Generator().manual_seed(0)
    unused = []
    for key, value in reference.raw_head.items():
        if not value.is_floating_point():
            other = value.roll(1)
        elif value.numel() == 1:
            other = -value  # a norm follows the last one: only its sign shows
        else:
            other = value + torch.randn(value.shape, generator=noise) * value.std()
        got = reference.with_head(reference.raw_head | {key: other}).head(*rows, at)
        errors = [logit_difference(got.logits, want.logits)]
        errors.append(difference(got.chain, want.chain))
        if max(errors) < WRONG:
            unused.append(key)
    assert unused == []


@every_drafter
def test_drafts_follow_the_teacher_forced_assistant(name, references, tokens):
    reference = references[name]
    want = reference.teacher_forced(tokens)[0].logits
    for length in range(2, LENGTH, 5):  # before and after the window is full
        got = reference.drafts(tokens[:, :length], 1).logits[:, 0]
        assert logit_difference(got, want[:, length - 2]) < RIGHT
    assert reference.drafts(tokens, K).tokens.shape == (1, K)


@every_drafter
def test_what_a_sliding_layer_sees(name, references, tokens):
    """The keys the target would see from there, and not one more."""
    reference, at = references[name], LENGTH - 1
    first = at - reference.config.sliding_window + 1
    states = reference.target(tokens).post_norm[:, at - 1 : at]
    kv, position = reference.kv(tokens), torch.tensor([at])
    want = reference.head(states, tokens[:, at:], kv, position).chain

    def error(index):
        keys, values = kv[SLIDING]
        values = values.clone()
        values[:, :, index] += 1
        other = kv | {SLIDING: (keys, values)}
        got = reference.head(states, tokens[:, at:], other, position).chain
        return difference(got, want)

    assert error(first) > WRONG
    assert error(at - 1) > WRONG
    assert error(first - 1) == error(at) == 0


@every_drafter
def test_faults_show(name, references, tokens):
    reference, k = references[name], 3
    want = reference.drafts(tokens, k)

    def error(reference, **toggles):
        got = reference.drafts(tokens, k, follow=want.tokens, **toggles)
        return logit_difference(got.logits[:, -1], want.logits[:, -1])

    class Moving(type(reference)):
        """Every draft one position further."""

        def head(self, states, tokens, kv, position):
            self.step += 1
            return super().head(states, tokens, kv, position + self.step)

    class Unscaled(type(reference)):
        """The embedding without the target's factor, as large as it is to the state."""

        def head(self, states, tokens, kv, position):
            return super().head(states * 8, tokens, kv, position)

    class Reversed(type(reference)):
        """A ring of keys read from the wrong end."""

        def kv(self, tokens):
            kept = super().kv(tokens)
            keys, values = kept[SLIDING]
            return kept | {SLIDING: (keys.flip(2), values.flip(2))}

    assert error(reference, hidden="pre_norm") > WRONG
    for fault in (Moving, Unscaled, Reversed):
        other = copy.copy(reference)
        other.__class__, other.step = fault, -1
        assert error(other) > WRONG, fault
