"""K chosen by the controller or by chance: the output is plain decoding's all the same.

The head's cache must stay in step over rounds without drafts, however they alternate
with others; a wrong row would only cost acceptance, so it is compared itself.
"""

import json
import random
from itertools import islice

import pytest
from checks import (
    assert_head_state,
    assert_same_stream,
    assert_target_state,
    engine_of,
    loop_of,
    mtp_stream,
    plain_stream,
    stock_state,
    stop_after,
)

import mlx_mtp
from mlx_mtp import draft_memory, generate_cli
from mlx_mtp.draft_memory import AUTO, DraftMemory, costs_file, memory_of
from mlx_mtp.speculative.controller import Controller
from mlx_mtp.speculative.costs import CostTable, Place
from mlx_mtp.speculative.draft import MOST_WAITING, Drafter

PROMPT = [ord(c) for c in "any number"]


class Scripted(Controller):
    """K from a list, and what has been observed."""

    def __init__(self, ks):
        super().__init__(CostTable(8))
        self.ks, self.chosen, self.observed = iter(ks), [], []

    def choose(self, place, most):
        self.chosen.append(max(0, min(next(self.ks), most)))
        return self.chosen[-1]

    def observe(self, k, accepted, place, seconds):
        self.observed.append((k, accepted, place.length, seconds))


def mixed(seed, count=400):
    """Stretches of plain rounds, longer than what may wait for the head, and others."""
    rng = random.Random(seed)
    ks = []
    while len(ks) < count:
        plain = rng.choice([1, 2, MOST_WAITING - 1, MOST_WAITING, MOST_WAITING + 3])
        ks += [0] * plain + [rng.randint(1, 8) for _ in range(rng.randint(1, 5))]
    return ks


@pytest.fixture(scope="module")
def model(noisy_dir):
    return mlx_mtp.load(noisy_dir)[0]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kind", ["noisy_dir", "random_dir"])
def test_output_does_not_depend_on_k(request, kind, depth):
    """Tokens and log-probabilities equal stock mlx-lm's, bit for bit."""
    path, count = request.getfixturevalue(kind), 80
    script = Scripted(mixed(depth))
    loop = loop_of(engine_of(mlx_mtp.load(path)[0]), [PROMPT], script, count)
    loop.depth = depth
    got = []
    for result in loop:
        (tokens,) = result.tokens
        got += [(t, result.logprobs[0, i]) for i, t in enumerate(tokens)]
    assert_same_stream(got[:count], plain_stream(path, PROMPT, count))
    assert {0} < set(script.chosen)


# The head is shown 16 positions, then one together with a block, then a block alone.
STRETCHES = [0] * (MOST_WAITING + 1) + [3, 0, 0, 8] * 40


def check_states(path, rounds):
    """Stopped somewhere, both caches are those of a fresh run over the tokens."""
    model, _ = mlx_mtp.load(path)
    engine = engine_of(model)
    loop = loop_of(engine, [PROMPT], Scripted(STRETCHES), 400, prefill_step_size=5)
    (tokens,) = stop_after(loop, rounds)
    loop.stop([len(loop.last.tokens[0])])
    assert_target_state(engine, stock_state(path, PROMPT + tokens[:-1]))
    # The head lacks the newest positions: those of the last block, no others.
    assert engine.drafter.cache.offset[0].item() >= len(PROMPT + tokens) - 10
    assert_head_state(engine, PROMPT + tokens)


@pytest.mark.parametrize("rounds", [2, 15, 16, 17, 18, 19, 20, 21, 40])
def test_caches_in_step(random_dir, rounds):
    check_states(random_dir, rounds)


def lost_rows(monkeypatch):
    """What waits is forgotten when drafting resumes."""
    right = Drafter._with_waiting

    def wrong(self, *last):
        self.waiting = self.waiting[1:]
        return right(self, *last)

    monkeypatch.setattr(Drafter, "_with_waiting", wrong)


def rows_not_put_back(monkeypatch):
    """Rows that have been shown in a discarded round are not waiting any more."""
    monkeypatch.setattr(
        Drafter, "restore", lambda self, snapshot: self.cache.restore(snapshot.cache)
    )


def kept_not_moved(monkeypatch):
    """The kept count does not know of the rows put before the block."""
    right = Drafter.draft

    def wrong(self, tokens, hidden, kept, k, choose, **options):
        kept = kept - (len(self.waiting) if k else 0)
        return right(self, tokens, hidden, kept, k, choose, **options)

    monkeypatch.setattr(Drafter, "draft", wrong)


@pytest.mark.parametrize("plant", [lost_rows, rows_not_put_back, kept_not_moved])
def test_planted_faults(random_dir, monkeypatch, plant):
    plant(monkeypatch)
    seen = 0
    for rounds in (16, 17, 20):
        try:
            check_states(random_dir, rounds)
        except AssertionError:
            seen += 1
    assert seen


def test_a_long_plain_run_leaves_no_graph_behind(model):
    """Rows shown to the head are evaluated with the round that shows them."""
    engine = engine_of(model)
    for _ in islice(loop_of(engine, [PROMPT], Scripted([0] * 99), 80), 60):
        assert len(engine.drafter.waiting) < MOST_WAITING
    seen = len(PROMPT) - 1 + 60 - engine.drafter.cache.offset[0].item()
    assert 0 <= seen <= MOST_WAITING
    assert not engine.drafter.due


def test_what_is_observed(model):
    """Each round with its own K, its accepted drafts and, but the first, a time."""
    script = Scripted([0, 3, 1, 0, 2, 8, 0, 0, 4])
    loop = loop_of(engine_of(model), [PROMPT], script, 100)
    results = list(islice(loop, 9))
    assert [k for k, *_ in script.observed] == [0, 3, 1, 0, 2, 8, 0, 0]
    for result, (k, accepted, length, seconds) in zip(results[1:], script.observed):
        assert result.num_draft_tokens == k
        assert accepted == [len(result.tokens[0]) - 1]
        assert seconds > 0
        assert length >= len(PROMPT)
    assert (
        script.observed[-1][2]
        == len(PROMPT) + sum(len(r.tokens[0]) for r in results[:-1]) - 1
    )


def test_a_slow_caller_is_not_the_device(model, monkeypatch):
    from mlx_mtp.speculative import loop as loop_module

    now = iter(range(0, 10**6, 10))
    monkeypatch.setattr(loop_module.time, "perf_counter", lambda: float(next(now)))
    clock = loop_module.Clock()
    assert clock.tick() is None
    with clock.held(False):
        pass
    assert clock.tick() == 30  # ticks at 0 and 30, held from 10 to 20
    with clock.held(False):
        next(now), next(now), next(now), next(now)
    assert clock.tick() is None  # most of that time it was the caller's
    with clock.held(True):  # nothing ran meanwhile
        next(now), next(now)
    assert clock.tick() == 20


def test_no_drafts_past_the_limit(model):
    """Nothing is drafted that the limit would cut."""
    for count in range(2, 12):
        script = Scripted([8] * 20)
        loop = loop_of(engine_of(model), [PROMPT], script, count)
        assert sum(len(r.tokens[0]) for r in loop) >= count
        assert max(script.chosen) <= count - 2  # one is in flight, one the target's


def test_auto_is_the_default_and_learns(noisy_dir):
    model, _ = mlx_mtp.load(noisy_dir)
    costs_file(model).unlink(missing_ok=True)
    got = [
        (t, logprobs)
        for t, logprobs, _ in mlx_mtp.mtp_generate_step(PROMPT, model, max_tokens=80)
    ]
    assert_same_stream(got, plain_stream(noisy_dir, PROMPT, 80))
    memory = memory_of(model)
    assert memory_of(model) is memory
    assert memory.costs.at(Place(1, 50)).plain_rounds > 0
    assert costs_file(model).exists()
    again = DraftMemory(costs_file(mlx_mtp.load(noisy_dir)[0]))
    assert again.costs.at(Place(1, 50)).samples == memory.costs.at(Place(1, 50)).samples


def test_a_batch_has_one_k(noisy_dir):
    model, tokenizer = mlx_mtp.load(noisy_dir)
    prompts = [PROMPT, PROMPT[:3], PROMPT[4:]]
    options = {"max_tokens": [40, 9, 25], "return_token_ids": True}
    got = mlx_mtp.batch_generate(model, tokenizer, prompts, **options)
    want = mlx_mtp.batch_generate(model, tokenizer, prompts, mtp=False, **options)
    assert got.token_ids == want.token_ids
    assert any(rows > 1 for rows, *_ in memory_of(model).costs.by_place)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"1 0 1": 3}', '{"x": {}}', "null"])
def test_a_useless_file_is_passed_over(tmp_path, text):
    file = tmp_path / "costs.json"
    file.write_text(text)
    memory = DraftMemory(file)
    assert memory.costs.by_place == {}
    memory.costs.at(Place(1, 5)).add(0, 0.1)
    memory.end(memory.begin())
    assert list(json.loads(file.read_text())) == ["1 0 1"]
    assert [p.name for p in tmp_path.iterdir()] == ["costs.json"]


def test_a_folder_that_cannot_be_written(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    memory = DraftMemory(file / "costs.json")
    memory.end(memory.begin())


def test_another_model_or_machine_has_another_file(noisy_dir, random_dir, monkeypatch):
    one, same = (mlx_mtp.load(noisy_dir)[0] for _ in range(2))
    costs_file_here = costs_file(one)
    assert costs_file(same) == costs_file_here
    assert costs_file(one) != costs_file(mlx_mtp.load(random_dir)[0])
    monkeypatch.setattr(draft_memory.os, "cpu_count", lambda: 99)
    assert costs_file(one) != costs_file_here


def test_auto_needs_no_more_reads(model, monkeypatch):
    """One host read per round, as with a fixed K."""
    from mlx_mtp.speculative import loop as loop_module

    reads = []
    original = loop_module.read
    monkeypatch.setattr(
        loop_module, "read", lambda packed: reads.append(1) or original(packed)
    )
    loop = loop_of(engine_of(model), [PROMPT], Controller(CostTable(8)), 60)
    assert sum(1 for _ in loop) == len(reads)


def test_command_line(capsys):
    parse = generate_cli.parse
    assert parse(["-p", "x"]).num_draft_tokens == AUTO
    assert parse(["-p", "x", "--num-draft-tokens", "auto"]).num_draft_tokens == AUTO
    with pytest.raises(SystemExit, match="2"):
        parse(["-p", "x", "--num-draft-tokens", "many"])
    assert "0 to 8, or auto, not many" in capsys.readouterr().err


def test_a_fixed_k_learns_nothing(noisy_dir):
    model, _ = mlx_mtp.load(noisy_dir)
    mtp_stream(model, PROMPT, 5, 2)
    assert getattr(model, "draft_memory", None) is None
