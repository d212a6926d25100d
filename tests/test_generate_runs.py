"""Runs beside and behind each other on one model, and what a long run holds."""

import threading
from itertools import islice, zip_longest

import mlx.core as mx
import pytest

import mlx_mtp

PROMPTS = ["first prompt", "another, longer prompt"]


@pytest.fixture(scope="module")
def random(random_dir):
    return mlx_mtp.load(random_dir)


def run(loaded, prompt: str, **options):
    options = {"max_tokens": 40, "num_draft_tokens": 3} | options
    return mlx_mtp.stream_generate(*loaded, prompt, **options)


def assert_same(got, want) -> None:
    got, want = list(got), list(want)
    assert [r.token for r in got] == [r.token for r in want]
    for ours, solo in zip(got, want):
        assert ours.text == solo.text
        assert mx.array_equal(ours.logprobs, solo.logprobs)


@pytest.mark.parametrize(
    "other", [{}, {"num_draft_tokens": 1}, {"mtp": False}], ids=str
)
@pytest.mark.parametrize("directory", ["random_dir", "noisy_dir"])
def test_interleaved(request, directory, other):
    loaded = mlx_mtp.load(request.getfixturevalue(directory))
    options = ({}, other)
    solo = [list(run(loaded, p, **o)) for p, o in zip(PROMPTS, options)]
    turns = zip_longest(*(run(loaded, p, **o) for p, o in zip(PROMPTS, options)))
    for got, want in zip(zip(*turns), solo):
        assert_same([response for response in got if response], want)


def test_three_in_turns(random):
    """Each is paused in the middle of a round while the others go on."""
    runs = [run(random, prompt) for prompt in [*PROMPTS, PROMPTS[0]]]
    got = [list(islice(r, 7 + i)) for i, r in enumerate(runs)]
    got = [[*begun, *r] for begun, r in zip(got, runs)]
    for responses, prompt in zip(got, [*PROMPTS, PROMPTS[0]]):
        assert_same(responses, run(random, prompt))


def test_closed_early(random):
    want = list(run(random, PROMPTS[1]))
    for count in (1, 3, 6):
        begun = run(random, PROMPTS[0])
        list(islice(begun, count))
        begun.close()
        assert_same(run(random, PROMPTS[1]), want)
    assert_same(run(random, PROMPTS[1], mtp=False), want)


def test_never_started(random):
    before = mx.get_active_memory()
    run(random, PROMPTS[0])
    assert mx.get_active_memory() == before


def in_thread(work):
    results, errors = [], []

    def target():
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join(timeout=60)
    assert errors == []
    return results[0]


@pytest.mark.parametrize("mtp", [True, False])
def test_second_thread(random, mtp):
    """MLX's streams belong to the thread that made them."""
    want = list(run(random, PROMPTS[0], mtp=mtp))
    got = in_thread(lambda: list(run(random, PROMPTS[0], mtp=mtp)))
    assert_same(got, want)
    assert_same(run(random, PROMPTS[0], mtp=mtp), want)


def test_loaded_in_a_second_thread(random_dir, random):
    loaded = in_thread(lambda: mlx_mtp.load(random_dir))
    assert_same(run(loaded, PROMPTS[0]), run(random, PROMPTS[0]))


def test_memory_does_not_grow(random):
    """Beyond the KV rows: keys and values of one layer and the head, 2 x 16 float32."""
    model, _ = random
    start, end = 500, 3000
    held = {}
    steps = mlx_mtp.mtp_generate_step(
        [1, 2, 3], model, num_draft_tokens=3, max_tokens=end
    )
    for count, _ in enumerate(steps, 1):
        if count in (start, end):
            mx.synchronize()
            held[count] = mx.get_active_memory()
    kv_bytes = 2 * 2 * (2 * 16) * 4 * (end - start)
    assert held[end] - held[start] <= kv_bytes + (1 << 20)


def test_nothing_stays_behind(random):
    list(run(random, PROMPTS[0]))
    mx.synchronize()
    before = mx.get_active_memory()
    for _ in range(3):
        list(run(random, PROMPTS[0]))
        list(islice(run(random, PROMPTS[1]), 5))
    mx.synchronize()
    assert mx.get_active_memory() <= before
