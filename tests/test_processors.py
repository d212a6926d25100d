"""Logits processors: the histories, the calls and the output of plain decoding."""

import mlx.core as mx
import pytest
from checks import assert_same_stream, engine_of, loop_of
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors

import mlx_mtp
from mlx_mtp.sampling import ACCEPTANCE, SamplingParams
from mlx_mtp.speculative.processors import Processors, Stateless

PROMPT = [ord(c) for c in "penalties"]
COUNT = 16


class Spy:
    """Logs every history it is shown; bans the token seen last."""

    def __init__(self):
        self.seen = []

    def __call__(self, tokens, logits):
        self.seen.append(tokens.tolist())
        return logits.at[:, tokens[-1]].add(-100.0)


class Counter:
    """A state of its own: bans token n after n calls. It cannot be put back."""

    def __init__(self):
        self.calls = 0

    def __call__(self, tokens, logits):
        self.calls += 1
        return logits.at[:, self.calls % logits.shape[-1]].add(50.0 / self.calls)


class Restorable(Counter):
    """The same with the protocol that lets it shape drafts."""

    def snapshot(self):
        return self.calls

    def restore(self, state):
        self.calls = state


def run(model, processors, k, count=COUNT, rule=None):
    engine = engine_of(model, head=k > 0)
    engine.processors = [Processors(processors, PROMPT)]
    if rule is not None:
        engine.rule = rule
    stream = []
    for result in loop_of(engine, [PROMPT], k, count):
        (tokens,) = result.tokens
        stream += [(t, result.logprobs[0, i]) for i, t in enumerate(tokens)]
    return stream[:count]


def plain(path, processors, count=COUNT):
    model, _ = mlx_mtp.load(path)
    steps = generate_step(
        mx.array(PROMPT), model, max_tokens=count, logits_processors=processors
    )
    return list(steps)


@pytest.fixture(scope="module", params=["random", "noisy"])
def path(request, random_dir, noisy_dir):
    return {"random": random_dir, "noisy": noisy_dir}[request.param]


PENALTIES = {
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 5.0, "presence_context_size": 6},
    "frequency": {"frequency_penalty": 2.0},
    "bias": {"logit_bias": {66: 20.0, 101: -100.0}},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.5,
        "logit_bias": {70: 3.0},
    },
}


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("shaped", [False, True])
def test_mlx_lms_processors(path, name, k, shaped):
    model, _ = mlx_mtp.load(path)
    make = make_logits_processors(**PENALTIES[name])
    processors = [Stateless(p) for p in make] if shaped else make
    want = plain(path, make_logits_processors(**PENALTIES[name]))
    assert_same_stream(run(model, processors, k), want)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_histories_are_those_of_plain_decoding(path, k):
    model, _ = mlx_mtp.load(path)
    ours, stock = Spy(), Spy()
    want = plain(path, [stock])
    stream = run(model, [ours], k)
    assert_same_stream(stream, want)
    tokens = [token for token, _ in want]
    # Plain decoding works one step ahead, MTP to the end of its last round.
    expected = [PROMPT + tokens[:n] for n in range(COUNT)]
    assert ours.seen[:COUNT] == stock.seen[:COUNT] == expected
    assert len(ours.seen) <= COUNT + k


@pytest.mark.parametrize("processor", [Counter, Restorable])
@pytest.mark.parametrize("k", [1, 3])
def test_processors_with_a_state(path, processor, k):
    model, _ = mlx_mtp.load(path)
    want = plain(path, [Counter()])
    assert_same_stream(run(model, [processor()], k), want)


def test_shaped_drafts_are_accepted_more(noisy_dir):
    """A ban the head does not know of costs acceptance, unless drafts are shaped."""
    model, _ = mlx_mtp.load(noisy_dir)
    accepted = {}
    for name, wrap in (("plain", lambda p: p), ("shaped", Stateless)):
        (bias,) = make_logits_processors(logit_bias={66: 30.0})
        engine = engine_of(model)
        engine.processors = [Processors([wrap(bias)], PROMPT)]
        results = list(loop_of(engine, [PROMPT], 3, COUNT))
        accepted[name] = sum(len(r.tokens[0]) - 1 for r in results) / len(results)
    assert accepted["shaped"] > accepted["plain"]


@pytest.mark.parametrize("wrap", [lambda p: p, Stateless])
def test_nothing_is_called_behind_an_end_token(noisy_dir, wrap):
    """Neither for the output nor for the drafts."""
    model, _ = mlx_mtp.load(noisy_dir)
    tokens = [t for t, _ in run(model, [Stateless(lambda _, x: x)], 3)]
    end = tokens[5]
    spy, engine = Spy(), engine_of(model)
    look = wrap(lambda t, x: (spy(t, x + 0), x)[1])
    engine.processors = [Processors([look], PROMPT, {end})]
    emitted = []
    for result in loop_of(engine, [PROMPT], 3, COUNT):
        emitted += result.tokens[0]
        if end in emitted:
            break
    assert emitted == tokens[: tokens.index(end) + 1]
    assert not any(end in history[len(PROMPT) :] for history in spy.seen)


@pytest.mark.parametrize("acceptance", ACCEPTANCE)
def test_judged_one_by_one_as_together(random_dir, acceptance):
    """A processor that changes nothing changes nothing (block judges one by one)."""
    together = "rejection" if acceptance == "block" else acceptance
    model, _ = mlx_mtp.load(random_dir)

    def rule(name):
        return SamplingParams(temp=1.0, seed=5, acceptance=name).rule()

    engine = engine_of(model)
    engine.rule = rule(together)
    want = [t for r in loop_of(engine, [PROMPT], 3, COUNT) for t in r.tokens[0]][:COUNT]
    nothing = Stateless(lambda tokens, logits: logits)
    got = run(model, [nothing], 3, rule=rule(acceptance))
    assert [token for token, _ in got] == want


def test_the_limit_is_met(random_dir):
    """The loop waits for each round here, and builds no more than it needs."""
    model, _ = mlx_mtp.load(random_dir)
    for count in range(1, 6):
        engine = engine_of(model)
        engine.processors = [Processors([Spy()], PROMPT)]
        emitted = [len(r.tokens[0]) for r in loop_of(engine, [PROMPT], 2, count)]
        assert sum(emitted) >= count > sum(emitted[:-1])
