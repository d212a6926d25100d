"""The references against mlx_lm's stock models and transformers' generic MTP model.

A directory that mlx_lm and transformers read alike has the right config and names; a
head tensor that changes nothing would let a fault of the converter pass.
"""

import copy
import json
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mlx_lm.utils import _get_classes
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpLayer, MtpModel
from transformers.utils import logging

from families import FAMILIES, family
from families.reference import Reference, causal_mask

RIGHT = 1e-4  # upper bound of the relative error of rounding
WRONG = 1e-3  # lower bound of the relative effect of a real difference
LENGTH = 40
# Families that transformers' generic MTP model can load, and what it has to be told.
GENERIC = {
    "deepseek_v3": {},
    "deepseek_v32": {
        "num_mtp_layers": 1,
        "mtp_layer_types": ["indexed_attention"],
        "mtp_mlp_layer_types": ["sparse"],
    },
    "exaone_moe": {
        "num_mtp_layers": 1,
        "mtp_layer_types": ["sliding_attention"],
        "mtp_mlp_layer_types": ["dense"],
    },
    "exaone_moe_full_head": {
        "num_mtp_layers": 1,
        "mtp_layer_types": ["full_attention"],
        "mtp_mlp_layer_types": ["dense"],
    },
    "glm4_moe": {},
    "glm4_moe_air": {},
    "glm4_moe_lite": {"num_mtp_layers": 1, "mtp_mlp_layer_types": ["sparse"]},
    "qwen3_5_moe": {"num_mtp_layers": 1, "mtp_layer_types": ["full_attention"]},
    "qwen3_5_moe_single_experts": {
        "num_mtp_layers": 1,
        "mtp_layer_types": ["full_attention"],
    },
    "qwen3_next": {"num_mtp_layers": 1, "mtp_layer_types": ["full_attention"]},
}
# Families whose loading it does not know: the MTP layer alone.
GENERIC_LAYER = [
    "bailing_hybrid",
    "bailing_moe_v3",
    "ernie4_5_moe",
    "longcat_flash",
    "mimo",
    "mimo_v2_flash",
    "nemotron_h",
    "nemotron_h_latent",
    "step3p5",
]
# Families whose target mlx_lm computes otherwise, and why.
STOCK_DIFFERS = {
    "ernie4_5_moe": "it drops e_score_correction_bias",
}

every_family = pytest.mark.parametrize("name", [f.name for f in FAMILIES])


def difference(got, want) -> float:
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    @cache
    def load(name):
        chosen = family(name)
        return chosen.load(chosen.write(tmp_path_factory.mktemp(name), seed=3))

    return load


@pytest.fixture(scope="module")
def tokens():
    return torch.from_numpy(np.random.default_rng(1).integers(0, 256, (1, LENGTH)))


@pytest.fixture(scope="module")
def many_tokens():
    """Enough for every expert to be chosen."""
    return torch.from_numpy(np.random.default_rng(2).integers(0, 256, (4, LENGTH)))


def stock_model(path: Path, is_head):
    """mlx_lm's own model; ``sanitize`` gets the target's tensors alone."""
    config = json.loads((path / "config.json").read_text())
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    weights = {}
    for shard in path.glob("*.safetensors"):
        weights |= {k: v for k, v in mx.load(str(shard)).items() if not is_head(k)}
    model.load_weights(list(model.sanitize(weights).items()))
    return model.eval()


@every_family
def test_stock_target(name, references, tokens):
    reference = references(name)
    model = stock_model(reference.path, reference.is_head)
    got = np.array(model(mx.array(tokens.numpy())))
    error = difference(got, reference.target(tokens).logits)
    if name in STOCK_DIFFERS:
        assert error > WRONG  # once it agrees, the entry is out of date
    else:
        assert error < RIGHT


@every_family
def test_head_tensors_are_used(name, references, many_tokens):
    reference, tokens = references(name), many_tokens
    states = getattr(reference.target(tokens), reference.toggles.hidden)
    want = reference.teacher_forced(tokens, states)
    noise = torch.Generator().manual_seed(0)
    unused = []
    for key, value in reference.raw_head.items():
        other = value + torch.randn(value.shape, generator=noise) * value.std()
        head = reference.with_head(reference.raw_head | {key: other})
        got = zip(head.teacher_forced(tokens, states), want, strict=True)
        if max(difference(g.logits, w.logits) for g, w in got) < WRONG:
            unused.append(key)
    assert unused == []


@every_family
def test_toggles_make_a_difference(name, references, tokens):
    reference, tokens = references(name), tokens[:, :6]  # shorter than any window
    other = {"pre_norm": "post_norm", "post_norm": "pre_norm"}
    usual, k = reference.toggles, reference.num_modules + 2
    want = reference.drafts(tokens, k)
    for toggle in (
        {"hidden": other[usual.hidden]},
        {"chain": other[usual.chain]},
        {"final_norm": "none"},
        {"mask_first": not usual.mask_first},
    ):
        got = reference.drafts(tokens, k, follow=want.tokens, **toggle)
        assert difference(got.logits[:, -1], want.logits[:, -1]) > WRONG, toggle


@every_family
def test_drafts_follow_the_teacher_forced_head(name, references, tokens):
    """Draft m is the last entry of module m; no draft depends on what comes after."""
    reference = references(name)
    want = reference.teacher_forced(tokens)
    k = len(want)
    for length in (LENGTH // 2, LENGTH - k):
        follow = tokens[:, length : length + k]
        got = reference.drafts(tokens[:, :length], k, follow=follow).logits
        for m in range(k):
            assert difference(got[:, m], want[m].logits[:, length - 2]) < RIGHT
    assert reference.drafts(tokens, k + 3).tokens.shape == (1, k + 3)


@pytest.mark.parametrize("name", GENERIC)
def test_generic_head(name, references, tokens):
    """transformers' own MTP model, with its own loading of the raw tensors."""
    path = references(name).path
    reference = family(name).load(path)
    model, config = reference.model, reference.config
    # It uses the target's embedding and output layer, whatever the head has.
    shared = (".embed_tokens.weight", ".shared_head.head.weight")
    head = reference.raw_head.items()
    reference.build({k: v for k, v in head if not k.endswith(shared)})
    # Its patterns name the released models' numbers of layers.
    model._keys_to_ignore_on_load_unexpected = [
        rf"model\.layers\.{config.num_hidden_layers}\.",
        r"^mtp\.",
    ]
    for key, value in GENERIC[name].items():
        setattr(config, key, value)
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        generic = MtpModel.from_pretrained(model).eval()
    finally:
        logging.set_verbosity(level)
    hidden = reference.target(tokens).post_norm[:, :-1]
    want = reference.head(hidden, tokens[:, 1:])
    with torch.no_grad():
        chain = run_generic(generic, hidden, tokens[:, 1:])
        logits = model.lm_head(chain)
    assert difference(chain, want.chain) < RIGHT
    assert difference(logits, want.logits) < RIGHT


def run_generic(generic, hidden, tokens):
    positions = torch.arange(1, LENGTH)[None]  # those of the tokens
    cache = MtpCache(config=generic.config)
    types = getattr(generic.config, "layer_types", None) or ["full_attention"]
    if types != ["indexed_attention"]:
        return generic.forward_layer(0, hidden, positions, cache, input_ids=tokens)
    # forward_layer knows no mask for this type: only its layer is compared.
    embedding = generic.embed_tokens(tokens)
    return generic.layers[0](
        embedding,
        hidden,
        position_embeddings=generic.rotary_emb(embedding, positions),
        attention_mask=causal_mask(LENGTH - 1),
        position_ids=positions,
        cache=cache,
    )


@pytest.mark.parametrize("name", GENERIC_LAYER)
def test_generic_layer(name, references, tokens):
    """transformers' MTP layer around the reference's block."""
    reference = references(name)
    hidden = getattr(reference.target(tokens), reference.toggles.hidden)[:, :-1]
    for part in getattr(reference, "modules", [reference]):
        own_norm = "norm" in part.weights
        layer = generic_layer(part, own_norm)
        chain = "post_norm" if own_norm else "pre_norm"
        toggles = {"chain": chain, "mask_first": False}
        want = Reference.head(part, hidden, tokens[:, 1:], **toggles).chain
        positions = torch.arange(1, LENGTH)[None]
        with torch.no_grad():
            embedding = part.main_embedding(tokens[:, 1:])
            rotary = part.rotary(embedding, positions)
            mask = part.mask(LENGTH - 1)
            got = layer(embedding, hidden, rotary, mask, positions, None)
        assert difference(got, want) < RIGHT


def test_generic_drafting(references, tokens):
    """transformers' loop over chained modules, which feeds the normed state on."""
    reference = references("step3p5")

    class Loop:
        layers = reference.modules

        def forward_layer(self, i, states, positions, _, input_ids):
            part, self.current = self.layers[i], i
            embedding = part.main_embedding(input_ids)
            rotary, mask = part.rotary(embedding, positions), part.mask(LENGTH - 1)
            layer = generic_layer(part, True)
            return layer(embedding, states, rotary, mask, positions, None)

        def _project_to_logits(self, states):
            return F.linear(states, self.layers[self.current].weights["output"])

    states = reference.target(tokens[:, :-1]).pre_norm
    positions = torch.arange(1, LENGTH)[None]
    with torch.no_grad():
        found = MtpModel.forward(Loop(), tokens[:, 1:], states, None, positions, None)
    want = reference.drafts(tokens, reference.num_modules, chain="post_norm")
    assert found[0].tolist() == want.tokens.tolist()
    assert difference(found[1], want.logits) < RIGHT


def generic_layer(part, own_norm):
    config = copy.deepcopy(part.config)
    config.mtp_hidden_states_first = part.hidden_first
    config.rms_norm_eps = part.eps
    norm_class, block = type(part.main_norm), copy.deepcopy(part.block)
    layer = MtpLayer(config, lambda *_: block, norm_class, 0, own_norm)
    names = {"enorm": "enorm", "hnorm": "hnorm", "proj": "eh_proj", "norm": "post_norm"}
    own = part.weights.items()
    state = {f"{names[k]}.weight": v for k, v in own if k in names}
    state |= {f"mtp_block.{k}": v for k, v in block.state_dict().items()}
    layer.load_state_dict(state)
    return layer.eval()


@pytest.mark.parametrize("name", [f.name for f in FAMILIES if f.load.num_modules > 1])
def test_modules_are_told_apart(name, references, tokens):
    """What goes wrong silently: what a module reads, and which module it is."""
    reference = references(name)
    k = reference.num_modules
    want = reference.drafts(tokens, k)

    def errors(other):
        got = other.drafts(tokens, k, follow=want.tokens).logits
        return [difference(got[:, m], want.logits[:, m]) for m in range(k)]

    fed_otherwise = copy.copy(reference)
    fed_otherwise.chained = not reference.chained
    first, *later = errors(fed_otherwise)
    assert first == 0
    assert min(later) > WRONG
    turned = copy.copy(reference)
    turned.modules = reference.modules[::-1]
    assert errors(turned)[0] > WRONG
    assert errors(turned)[-1] > WRONG
