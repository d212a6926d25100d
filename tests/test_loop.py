"""The loop's order: built before read, one host read a round, nothing else read."""

from itertools import islice

import mlx.core as mx
import pytest
from checks import engine_of, loop_of

import mlx_mtp
from mlx_mtp.speculative import loop as loop_module
from mlx_mtp.speculative.round import Block, Engine

PROMPT = [ord(c) for c in "read once"]


@pytest.fixture(scope="module")
def model(random_dir):
    return mlx_mtp.load(random_dir)[0]


@pytest.fixture
def events(monkeypatch):
    """What the loop does, in order: build, enqueue, read."""
    log = []

    def spy(owner, name, label):
        original = getattr(owner, name)

        def wrapper(*args, **kwargs):
            log.append(label)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapper)

    spy(Engine, "round", "build")
    spy(loop_module.Loop, "_enqueue", "enqueue")
    spy(loop_module, "read", "read")
    return log


@pytest.mark.parametrize("k", [0, 3])
def test_order_at_depth_0(model, events, k):
    """Built while the round before runs, handed over once that one has been read."""
    rounds = loop_of(engine_of(model, head=k > 0), [PROMPT], k, 100, depth=0)
    list(islice(rounds, 4))
    assert events == ["enqueue", *["build", "read", "enqueue"] * 4]
    assert events.count("read") == 4


@pytest.mark.parametrize("k", [0, 3])
def test_order_at_depth_1(model, events, k):
    """Built and handed over before the round before is read."""
    rounds = loop_of(engine_of(model, head=k > 0), [PROMPT], k, 100, depth=1)
    list(islice(rounds, 4))
    assert events == ["enqueue", *["build", "enqueue", "read"] * 4]
    assert events.count("read") == 4


@pytest.mark.parametrize("rows", [1, 3])
def test_one_read_per_round(model, events, rows):
    prompts = [PROMPT, PROMPT[:2], PROMPT[3:]][:rows]
    loop = loop_of(engine_of(model, batch_size=rows), prompts, 2, 30)
    count = sum(1 for _ in loop)
    assert events.count("read") == count
    assert events.count("build") == count - 1  # the first block comes from the prefill


@pytest.mark.parametrize("k", [1, 2, 8])
def test_a_round_reads_nothing(model, k):
    """mx.compile raises on any evaluation while it traces, so it proves the absence."""
    engine = engine_of(model)
    first = next(iter(loop_of(engine, [PROMPT], k, 1)))
    assert first.num_draft_tokens == 0
    block = Block(
        tokens=mx.array(first.tokens),
        kept=mx.array([1]),
        logprobs=first.logprobs,
        hidden=mx.zeros((1, 1, engine.target.model.args.hidden_size)),
        position=mx.array([len(PROMPT)]),
    )
    traced = mx.compile(lambda *arrays: engine.round(Block(*arrays), k))
    (tokens, *_) = traced(*block)
    assert tokens.shape == (1, k + 1)


def test_a_read_in_a_round_would_be_seen(model):
    """The proof above can fail."""
    engine = engine_of(model)

    def reading(tokens):
        tokens.tolist()
        return tokens

    with pytest.raises(Exception, match="eval"):
        mx.compile(reading)(mx.array([[1]]))
    assert engine.batch_size == 1


@pytest.mark.parametrize("count", range(1, 10))
def test_no_round_is_built_in_vain(model, events, count):
    """A round that could only emit tokens past the limit is not started."""
    engine = engine_of(model)
    emitted = [len(r.tokens[0]) for r in loop_of(engine, [PROMPT], 3, count)]
    assert sum(emitted) >= count
    assert events.count("build") <= count - 1


def test_rows_that_are_done_do_not_end_the_others(model):
    rows = [0, 0]
    for result in loop_of(engine_of(model, batch_size=2), [PROMPT, [1]], 2, 25):
        for b, tokens in enumerate(result.tokens):
            rows[b] += len(tokens)
    assert min(rows) >= 25


def test_depth_follows_the_size_of_the_kv_cache(model, monkeypatch):
    loop = loop_of(engine_of(model), [PROMPT], 2, 10)
    assert loop._runs_ahead()
    monkeypatch.setattr(loop_module, "PIPELINE_KV_BYTES", -1)
    assert not loop._runs_ahead()


def test_progress_counts_the_prompt(model):
    seen = []
    loop = loop_of(
        engine_of(model),
        [PROMPT],
        1,
        2,
        prefill_step_size=3,
        progress=lambda done, total: seen.append((done, total)),
    )
    list(loop)
    assert seen == [(0, 9), (3, 9), (6, 9), (8, 9), (9, 9)]
