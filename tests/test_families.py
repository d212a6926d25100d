"""Every family: convert, load, parity with torch, and drafts that change nothing.

One body of tests over one list of families. The checkpoints and the references are
those of ``families``, which know nothing of mlx_mtp.
"""

import functools
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import families
import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
import torch
from byte_tokenizer import EOS_IDS
from checks import assert_same_stream, mtp_stream, plain_stream
from family_checks import (
    CHUNK,
    assert_same_caches,
    draft_logits,
    fresh_head_cache,
    fresh_states,
    planned_loop,
    rounds,
)
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

import mlx_mtp
from mlx_mtp.convert_cli import main as convert_main
from mlx_mtp.generate_cli import main as generate_main
from mlx_mtp.models import FAMILIES, UNSUPPORTED

# transformers says so of configs whose type it does not know.
pytestmark = pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated")

PROMPT = [ord(c) for c in "every family keeps its promise"]
COUNT = 12
RIGHT = 1e-4
# Beyond their window or their top k, mlx-lm's own models add in another order.
ORDER_DIFFERS = {
    *("deepseek_v32", "glm_moe_dsa", "exaone_moe", "exaone_moe_full_head"),
    *("mimo_v2_flash", "step3p5"),
}


# mlx-lm's ERNIE leaves the experts' bias out, so torch's target is another with it.
CASES = [
    f
    for f in families.FAMILIES
    if f.name != "ernie4_5_moe" and f.model_type not in UNSUPPORTED
]
# Of a family's variants one is enough for what the engine does.
ONE_EACH = list({f.model_type: f for f in reversed(CASES)}.values())


@dataclass
class Case:
    """A family's checkpoint, raw and converted; what is read of it is read once."""

    family: Any
    raw: Path
    path: Path

    @cached_property
    def model(self):
        return mlx_mtp.load(self.path)[0]

    @cached_property
    def reference(self):
        return self.family.load(self.raw)

    @cached_property
    def target(self):
        return FAMILIES[self.model.model_type].target(self.model)

    @cached_property
    def plain(self) -> list:
        """Tokens and log-probabilities without drafts."""
        return mtp_stream(self.model, PROMPT, COUNT, 0, prefill_step_size=CHUNK)

    @property
    def text(self) -> list[int]:
        return PROMPT + [token for token, *_ in self.plain]


@pytest.fixture(scope="module")
def make_case(tmp_path_factory):
    @functools.cache
    def make(name: str) -> Case:
        root, family = tmp_path_factory.mktemp(name), families.family(name)
        raw = family.write(root / "raw", seed=7)
        mlx_mtp.convert(raw, root / "mlx")
        return Case(family, raw, root / "mlx")

    return make


@pytest.fixture(scope="module", params=[f.name for f in CASES])
def case(request, make_case) -> Case:
    """Every variant of a family."""
    return make_case(request.param)


@pytest.fixture(scope="module", params=[f.name for f in ONE_EACH])
def family(request, make_case) -> Case:
    """One variant of each family."""
    return make_case(request.param)


def difference(got: mx.array, want: torch.Tensor) -> float:
    got, want = np.array(got), want.numpy()
    assert got.shape == want.shape
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def test_target_equals_torch(case):
    ids = mx.array([PROMPT])
    hidden = case.target.hidden(ids, case.target.make_cache())
    want = case.reference.target(PROMPT)
    stage = case.family.toggles.hidden
    assert difference(hidden, getattr(want, stage)) < RIGHT
    assert difference(case.target.logits(hidden), want.logits) < RIGHT


def test_head_equals_torch(case):
    """Fed with torch's states, so that only the head can differ."""
    stage = getattr(case.reference.target(PROMPT), case.family.toggles.hidden)
    outs = case.reference.teacher_forced(PROMPT)
    modules = getattr(case.model.mtp, "heads", [case.model.mtp])
    for m, (head, want) in enumerate(zip(modules, outs, strict=True)):
        chained = m and head.spec.modules == "chained"
        states = outs[m - 1].chain if chained else stage
        states = mx.array(states[:, : len(PROMPT) - m - 1].numpy())
        embedding = head.embed(case.target, mx.array([PROMPT[m + 1 :]]))
        for cache in (None, head.make_cache()):
            got = head(embedding, states, cache)
            assert difference(got, want.chain) < RIGHT
            assert difference(head.logits(case.target, got), want.logits) < RIGHT


def test_drafts_equal_torch(case):
    """Through prefill and rounds: caches, chain, positions, the pair's alignment."""
    k = 4 if hasattr(case.model.mtp, "heads") else 3
    for tokens, got in draft_logits(case.model, PROMPT, case.text, k, 4):
        want = case.reference.drafts(tokens, k, got.argmax(-1).tolist())
        assert difference(got[None], want.logits) < RIGHT


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_drafts_change_nothing(family, k):
    """Accepted and rejected drafts: tokens and log-probabilities bit for bit."""
    _, loop = planned_loop(family.model, [PROMPT], [family.text], k)
    got, accepted = [], set()
    for (tokens,), logprobs in rounds(loop, COUNT):
        got += [(t, logprobs[0, i]) for i, t in enumerate(tokens)]
        accepted.add(len(tokens))
        if len(got) >= COUNT:
            break
    assert_same_stream(got[:COUNT], [step[:2] for step in family.plain])
    assert len(accepted) > 1


def test_plain_equals_stock(family):
    want = plain_stream(family.path, PROMPT, 8)
    got = mtp_stream(family.model, PROMPT, 8, 2)
    if family.family.name in ORDER_DIFFERS:
        assert [t for t, *_ in got] == [t for t, _ in want]
        for (_, ours, _), (_, theirs) in zip(got, want):
            assert mx.allclose(ours, theirs, atol=1e-4)
    else:
        assert_same_stream(got, want)


def test_states(family):
    """After rounds of different lengths, and a stop inside one, caches are exact."""
    for count in (2, 4):
        engine, loop = planned_loop(family.model, [PROMPT], [family.text], 3)
        tokens = [t for (row,), _ in rounds(loop, count) for t in row]
        last = loop.last.tokens[0]
        loop.stop([1])
        text = PROMPT + tokens[: len(tokens) - len(last) + 1]
        assert_same_caches(engine.cache, fresh_states(family.model, text[:-1])[0])
        head = engine.drafter.cache
        fresh = fresh_head_cache(family.model, text, head.offset[0].item())
        assert_same_caches([head], [fresh])


def test_rows(family):
    """Rows of different length draft and are judged each on its own."""
    prompts = [PROMPT, PROMPT[4:9], PROMPT[7:20]]
    alone = [
        [t for t, *_ in mtp_stream(family.model, p, 9, 0, prefill_step_size=CHUNK)]
        for p in prompts
    ]
    texts = [p + a for p, a in zip(prompts, alone)]
    engine, loop = planned_loop(family.model, prompts, texts, 2)
    rows = [[] for _ in prompts]
    for tokens, _ in rounds(loop, 4):
        for row, new in zip(rows, tokens):
            row += new
    for row, want in zip(rows, alone):
        assert row[:9] == want[: len(row)]
    loop.stop([1] * len(prompts))
    kept = [len(r) - len(t) + 1 for r, t in zip(rows, loop.last.tokens)]
    for b, (prompt, row, size) in enumerate(zip(prompts, rows, kept)):
        text = prompt + row[: size - 1]
        assert_same_caches(engine.cache, fresh_states(family.model, text)[0], b)


def test_batch(family):
    """Rows that leave and join; each gives what it gives alone."""
    prompts, limits = [PROMPT[:14], PROMPT[4:15], PROMPT[9:]], [2, 7, 5]
    tokenizer = mlx_mtp.load(family.path)[1]
    options = {"num_draft_tokens": 2, "return_token_ids": True}
    options |= {"prefill_step_size": CHUNK, "max_tokens": limits}
    got = mlx_mtp.batch_generate(
        family.model, tokenizer, prompts, completion_batch_size=2, **options
    )
    for tokens, prompt, limit in zip(got.token_ids, prompts, limits):
        alone = mtp_stream(family.model, prompt, limit, 0, prefill_step_size=CHUNK)
        assert tokens == [t for t, *_ in alone][: len(tokens)]
        assert len(tokens) == limit or alone[len(tokens)][0] in EOS_IDS


def test_prompt_cache(family, tmp_path):
    """Two turns, the second from a file, equal one run over the whole text."""
    cache = mlx_mtp.make_prompt_cache(family.model)
    options = {"prefill_step_size": CHUNK}
    first = mtp_stream(family.model, PROMPT, 5, 2, prompt_cache=cache, **options)
    mlx_mtp.save_prompt_cache(tmp_path / "turn.safetensors", cache)
    cache = mlx_mtp.load_prompt_cache(tmp_path / "turn.safetensors")
    turn = PROMPT[:3]
    got = mtp_stream(family.model, turn, 5, 2, prompt_cache=cache, **options)
    text = PROMPT + [t for t, *_ in first] + turn
    want = mtp_stream(family.model, text, 5, 0, **options)
    assert_same_stream(got, [step[:2] for step in want])


def test_stock_caches(family):
    """mlx-lm's own list: filled by it, used here, used by it again."""
    model, more = family.model, PROMPT[:5]
    cache = make_prompt_cache(mlx_lm.load(str(family.path))[0])
    if any(type(entry) is RotatingKVCache for entry in cache):
        with pytest.raises(ValueError, match="RotatingKVCache cannot be rewound"):
            mtp_stream(model, more, 1, 1, prompt_cache=cache)
        return

    def stock(ids, count, **options):
        steps = generate_step(mx.array(ids), model, max_tokens=count, **options)
        return [token for token, _ in steps]

    text = PROMPT + stock(PROMPT, 3, prompt_cache=cache) + more
    text += [t for t, *_ in mtp_stream(model, more, 4, 2, prompt_cache=cache)]
    got = stock(more, 3, prompt_cache=cache)
    assert got == stock(text + more, 3)


def test_quantized(family, tmp_path):
    options = {"quantize": True, "q_bits": 4, "q_group_size": 32}
    mlx_mtp.convert(family.raw, tmp_path / "q", **options)
    model, _ = mlx_mtp.load(tmp_path / "q")
    got = mtp_stream(model, PROMPT, 8, 3)
    want = mtp_stream(model, PROMPT, 8, 0)
    assert_same_stream(got, [step[:2] for step in want])
    names = {name for name, _ in tree_flatten(model.mtp.parameters())}
    assert any(name.endswith("fc.scales") for name in names)
    assert not [n for n in names if "norm" in n and "scales" in n]
    assert all(router_bits(m) in (None, 8) for m in (model, model.mtp))
    stock, _ = mlx_lm.load(str(tmp_path / "q"))
    ids = mx.array([PROMPT])
    assert mx.array_equal(stock(ids), model(ids))


def router_bits(module) -> int | None:
    """The bits of the routers; None where they are not quantised."""
    bits = {
        getattr(child, "bits", None)
        for name, child in module.named_modules()
        if name.endswith(("mlp.gate", "shared_expert_gate"))
    }
    assert len(bits) < 2
    return bits.pop() if bits else None


def test_stock_mlx_lm(family):
    stock, _ = mlx_lm.load(str(family.path))
    ids = mx.array([PROMPT])
    assert mx.array_equal(stock(ids), family.model(ids))


def test_config_and_tensors_disagree(family, tmp_path):
    spec = FAMILIES[family.model.model_type].spec
    config = json.loads((family.raw / "config.json").read_text())
    raw = tmp_path / "raw"
    raw.mkdir()
    for file in family.raw.iterdir():
        if file.name != "config.json":
            (raw / file.name).symlink_to(file)
    config[spec.count_keys[0]], count = 4, family.reference.num_modules
    (raw / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"{spec.count_keys[0]} 4.*{count} MTP module"):
        mlx_mtp.convert(raw, tmp_path / "out")


def test_commands(family, tmp_path, capsys):
    """What a user types: convert, then generate with and without drafts."""
    out = str(tmp_path / "made")
    convert_main(["--hf-path", str(family.raw), "--mlx-path", out])
    texts = []
    for options in ([], ["--mtp", "--num-draft-tokens", "3"]):
        capsys.readouterr()
        command = ["--model", out, "--prompt", "Hi", "--max-tokens", "5", "--json"]
        generate_main(command + options)
        document = json.loads(capsys.readouterr().out)
        texts.append((document["tokens"], document["text"]))
    assert texts[0] == texts[1]
    assert document["num_draft_tokens"] > 0
