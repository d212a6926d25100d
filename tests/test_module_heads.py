"""Heads of several modules: what only they can get wrong."""

import io
from itertools import islice

import families
import mlx.core as mx
import numpy as np
import pytest
from checks import loop_of
from family_checks import CHUNK, assert_same_caches, fresh_head_cache, planned_loop

import mlx_mtp
from mlx_mtp.models import FAMILIES
from mlx_mtp.speculative.cache import RewindableKVCache
from mlx_mtp.speculative.round import Engine

PROMPT = [ord(c) for c in "module by module, row by row"]


@pytest.fixture(scope="module", params=["mimo_v2_flash", "step3p5"])
def case(request, tmp_path_factory):
    root, family = (
        tmp_path_factory.mktemp(request.param),
        families.family(request.param),
    )
    raw = family.write(root / "raw", seed=3)
    mlx_mtp.convert(raw, root / "mlx")
    return mlx_mtp.load(root / "mlx")[0], family.load(raw)


@pytest.fixture
def model(case):
    return case[0]


def test_caches_equal_a_run_of_each_module_alone(case):
    """After rounds of every length: values as from torch's inputs, all at once."""
    model, reference = case
    engine, loop = planned_loop(model, [PROMPT[:14]], [PROMPT], 3)
    text = PROMPT[:14] + [t for r in islice(loop, 4) for t in r.tokens[0]]
    cache, target = engine.drafter.cache, engine.target
    size = len(text) - len(loop.last.tokens[0])
    loop.stop([1])
    states = getattr(reference.target(text[:size]), reference.toggles.hidden)
    outs = reference.teacher_forced(text[: size + 1])
    for m, module in enumerate(model.mtp.heads):
        fed = outs[m - 1].chain if m and reference.chained else states
        fed = mx.array(fed[:, : size - m].numpy())
        alone = RewindableKVCache()
        module(module.embed(target, mx.array([text[m + 1 : size + 1]])), fed, alone)
        got = np.array(cache[m].values[0, :, m:size])
        want = np.array(alone.values[0, :, : size - m])
        assert got.shape == want.shape
        assert np.abs(got - want).max() < 1e-4


@pytest.mark.parametrize("done", [8, 24])
def test_interrupted_prefill(model, done):
    """The caches hold whole chunks, and a run that goes on fills up the rest."""
    cache = mlx_mtp.make_prompt_cache(model)
    options = {"prompt_cache": cache, "prefill_step_size": CHUNK, "num_draft_tokens": 3}

    def stop(now, total):
        if now >= done:
            raise InterruptedError

    run = mlx_mtp.mtp_generate_step(
        PROMPT, model, prompt_progress_callback=stop, **options
    )
    with pytest.raises(InterruptedError):
        next(run)
    assert cache.tokens == PROMPT[:done]
    list(mlx_mtp.mtp_generate_step(PROMPT[done:], model, max_tokens=4, **options))
    size = cache.head.offset[0].item()
    fresh = fresh_head_cache(model, [*cache.tokens, 0], size)
    assert_same_caches([cache.head], [fresh])


def graph_left_behind(model) -> int:
    """Size of what is still to be computed of the caches, after rounds with K = 1."""
    engine = Engine(FAMILIES[model.model_type].target(model), model.mtp)
    for _ in islice(loop_of(engine, [PROMPT], 1, 100, depth=0), 12):
        pass
    text = io.StringIO()
    mx.export_to_dot(text, *(c.keys for c in engine.drafter.cache.caches))
    return len(text.getvalue())


def test_modules_that_do_not_draft_leave_no_graph_behind(model, monkeypatch):
    assert graph_left_behind(model) < 1000
    monkeypatch.setattr(Engine, "due", lambda self: [])
    assert graph_left_behind(model) > 10_000  # so the check can fail
