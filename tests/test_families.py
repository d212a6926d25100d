"""Every family: convert, load, parity with torch, and drafts that change nothing.

One body of tests over one list of families. The checkpoints and the references are
those of ``families``, which know nothing of mlx_mtp.
"""

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
from drafting import draft_logits
from family_checks import (
    CHUNK,
    assert_same_caches,
    fresh_head_cache,
    fresh_states,
    planned_loop,
    rounds,
)
from mlx.utils import tree_flatten

import mlx_mtp
from mlx_mtp.convert import main as convert_main
from mlx_mtp.generate_cli import main as generate_main
from mlx_mtp.models import FAMILIES

# transformers says so of configs whose type it does not know.
pytestmark = pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated")

PROMPT = [ord(c) for c in "every family keeps its promise"]
COUNT = 14
RIGHT = 1e-4
# Beyond their window or their top k, mlx-lm's own models add in another order.
ORDER_DIFFERS = {"deepseek_v32", "glm_moe_dsa", "exaone_moe", "exaone_moe_full_head"}


# mlx-lm's ERNIE leaves the experts' bias out, so torch's target is another with it.
CASES = [f for f in families.FAMILIES if f.name != "ernie4_5_moe"]


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


@pytest.fixture(scope="module", params=CASES, ids=lambda f: f.name)
def case(request, tmp_path_factory) -> Case:
    root = tmp_path_factory.mktemp(request.param.name)
    raw = request.param.write(root / "raw", seed=7)
    mlx_mtp.convert(raw, root / "mlx")
    return Case(request.param, raw, root / "mlx")


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
    states = getattr(case.reference.target(PROMPT[:-1]), case.family.toggles.hidden)
    want = case.reference.head(states, PROMPT[1:])
    head, target = case.model.mtp, case.target
    embedding = head.embed(target, mx.array([PROMPT[1:]]))
    for cache in (None, head.make_cache()):
        got = head(embedding, mx.array(states.numpy()), cache)
        assert difference(got, want.chain) < RIGHT
        assert difference(head.logits(target, got), want.logits) < RIGHT


def test_drafts_equal_torch(case):
    """Through prefill and rounds: caches, chain, positions, the pair's alignment."""
    k = 3
    for tokens, got in draft_logits(case.model, PROMPT, k, 2, step_size=7):
        want = case.reference.drafts(tokens, k, got.argmax(-1).tolist())
        assert difference(got[None], want.logits) < RIGHT


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_drafts_change_nothing(case, k):
    """Accepted and rejected drafts: tokens and log-probabilities bit for bit."""
    _, loop = planned_loop(case.model, [PROMPT], [case.text], k)
    got, accepted = [], set()
    for (tokens,), logprobs in rounds(loop, COUNT):
        got += [(t, logprobs[0, i]) for i, t in enumerate(tokens)]
        accepted.add(len(tokens))
        if len(got) >= COUNT:
            break
    assert_same_stream(got[:COUNT], [step[:2] for step in case.plain])
    assert len(accepted) > 1


def test_plain_equals_stock(case):
    want = plain_stream(case.path, PROMPT, COUNT)
    got = mtp_stream(case.model, PROMPT, COUNT, 2)
    if case.family.name in ORDER_DIFFERS:
        assert [t for t, *_ in got] == [t for t, _ in want]
        for (_, ours, _), (_, theirs) in zip(got, want):
            assert mx.allclose(ours, theirs, atol=1e-4)
    else:
        assert_same_stream(got, want)


def test_states(case):
    """After rounds of different lengths, and a stop inside one, caches are exact."""
    for count in (2, 3, 5):
        engine, loop = planned_loop(case.model, [PROMPT], [case.text], 3)
        tokens = [t for (row,), _ in rounds(loop, count) for t in row]
        last = loop.last.tokens[0]
        loop.stop([1])
        text = PROMPT + tokens[: len(tokens) - len(last) + 1]
        assert_same_caches(engine.cache, fresh_states(case.model, text[:-1])[0])
        head = engine.drafter.cache
        fresh = fresh_head_cache(case.model, text, head.offset[0].item())
        assert_same_caches([head], [fresh])


def test_rows(case):
    """Rows of different length draft and are judged each on its own."""
    prompts = [PROMPT, PROMPT[4:9], PROMPT[7:20]]
    alone = [
        [t for t, *_ in mtp_stream(case.model, p, 9, 0, prefill_step_size=CHUNK)]
        for p in prompts
    ]
    texts = [p + a for p, a in zip(prompts, alone)]
    engine, loop = planned_loop(case.model, prompts, texts, 2)
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
        assert_same_caches(engine.cache, fresh_states(case.model, text)[0], b)


def test_batch(case):
    """Rows that leave and join; each gives what it gives alone."""
    prompts, limits = [PROMPT[:14], PROMPT[4:15], PROMPT[9:]], [2, 7, 5]
    tokenizer = mlx_mtp.load(case.path)[1]
    options = {"num_draft_tokens": 2, "return_token_ids": True}
    options |= {"prefill_step_size": CHUNK, "max_tokens": limits}
    got = mlx_mtp.batch_generate(
        case.model, tokenizer, prompts, completion_batch_size=2, **options
    )
    for tokens, prompt, limit in zip(got.token_ids, prompts, limits):
        alone = mtp_stream(case.model, prompt, limit, 0, prefill_step_size=CHUNK)
        assert tokens == [t for t, *_ in alone][: len(tokens)]
        assert len(tokens) == limit or alone[len(tokens)][0] in EOS_IDS


def test_prompt_cache(case, tmp_path):
    """Two turns, the second from a file, equal one run over the whole text."""
    cache = mlx_mtp.make_prompt_cache(case.model)
    options = {"prefill_step_size": CHUNK}
    first = mtp_stream(case.model, PROMPT, 5, 2, prompt_cache=cache, **options)
    mlx_mtp.save_prompt_cache(tmp_path / "turn.safetensors", cache)
    cache = mlx_mtp.load_prompt_cache(tmp_path / "turn.safetensors")
    turn = PROMPT[:3]
    got = mtp_stream(case.model, turn, 5, 2, prompt_cache=cache, **options)
    text = PROMPT + [t for t, *_ in first] + turn
    want = mtp_stream(case.model, text, 5, 0, **options)
    assert_same_stream(got, [step[:2] for step in want])


def test_quantized(case, tmp_path):
    options = {"quantize": True, "q_bits": 4, "q_group_size": 32}
    mlx_mtp.convert(case.raw, tmp_path / "q", **options)
    model, _ = mlx_mtp.load(tmp_path / "q")
    got = mtp_stream(model, PROMPT, 8, 3)
    want = mtp_stream(model, PROMPT, 8, 0)
    assert_same_stream(got, [step[:2] for step in want])
    names = {name for name, _ in tree_flatten(model.mtp.parameters())}
    assert "fc.scales" in names
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


def test_stock_mlx_lm(case):
    stock, _ = mlx_lm.load(str(case.path))
    ids = mx.array([PROMPT])
    assert mx.array_equal(stock(ids), case.model(ids))


def test_config_and_tensors_disagree(case, tmp_path):
    spec = FAMILIES[case.model.model_type].spec
    config = json.loads((case.raw / "config.json").read_text())
    raw = tmp_path / "raw"
    raw.mkdir()
    for file in case.raw.iterdir():
        if file.name != "config.json":
            (raw / file.name).symlink_to(file)
    config[spec.count_keys[0]] = 4
    (raw / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"{spec.count_keys[0]} 4.*1 MTP module"):
        mlx_mtp.convert(raw, tmp_path / "out")


def test_commands(case, tmp_path, capsys):
    """What a user types: convert, then generate with and without drafts."""
    out = str(tmp_path / "made")
    convert_main(["--hf-path", str(case.raw), "--mlx-path", out])
    texts = []
    for options in ([], ["--mtp", "--num-draft-tokens", "3"]):
        capsys.readouterr()
        command = ["--model", out, "--prompt", "Hi", "--max-tokens", "5", "--json"]
        generate_main(command + options)
        document = json.loads(capsys.readouterr().out)
        texts.append((document["tokens"], document["text"]))
    assert texts[0] == texts[1]
    assert document["num_draft_tokens"] > 0
