"""The benchmark: what it measures, and that a wrong model does not pass as exact."""

import json
import sys

import pytest
from checks import plain_stream
from conftest import QUESTION

import mlx_mtp
from mlx_mtp import benchmark, benchmark_costs, benchmark_exact, benchmark_methods
from mlx_mtp.benchmark_costs import Costs, measure_costs
from mlx_mtp.benchmark_report import plot, quartiles, rounded
from mlx_mtp.speculative.round import Engine
from mlx_mtp.speculative.stats import SpeculationStats

PROMPT = [ord(c) for c in "measure"]


@pytest.fixture(scope="module")
def model(noisy_dir):
    return mlx_mtp.load(noisy_dir)[0]


@pytest.mark.parametrize("prompt", [PROMPT, [QUESTION]], ids=["text", "oracle"])
def test_all_methods_give_the_same_text(model, noisy_dir, random_dir, prompt):
    for path in (noisy_dir, random_dir):
        loaded = mlx_mtp.load(path)[0]
        want = [token for token, _ in plain_stream(path, prompt, 20)]
        for name, method in benchmark.methods_of(loaded, ["auto", 2], True).items():
            assert list(method(prompt, 20, [])) == want, name


def test_the_simple_scheme_counts(model):
    counters = []
    list(benchmark_methods.simple(model)([QUESTION], 8, counters))
    (stats,) = counters
    assert stats.num_accepted_tokens == stats.num_draft_tokens == 4


def test_document(model, tmp_path):
    document = benchmark.benchmark(
        model, [PROMPT, [QUESTION, 97]], ks=["auto", 2], count=8, repeats=1
    )
    assert set(document["methods"]) == {
        "mlx-lm",
        "mtp off",
        "auto",
        "2",
        "simple scheme",
    }
    two = document["methods"]["2"]
    assert two["k"] == 2
    assert two["expected_speed_up"] > 0
    assert len(two["ratio"]) == 3
    assert 0 < two["ratio_minimum"] <= two["ratio"][1]
    assert two["peak_memory_gb"] > 0
    assert document["methods"]["mlx-lm"]["ratio"] == (1, 1, 1)
    assert len(document["costs"]["verify_relative"]) == 9
    assert json.loads(json.dumps(rounded(document)))


def test_costs_are_of_the_right_parts(model, monkeypatch):
    """Nine widths, the head with and without the output layer, once a repetition."""
    widths = []
    right = benchmark_costs._verify
    monkeypatch.setattr(
        benchmark_costs,
        "_verify",
        lambda engine, rows: widths.append(rows.shape[1]) or right(engine, rows),
    )
    costs = measure_costs(model, PROMPT, repeats=2)
    assert sorted(widths) == sorted([*range(1, 10)] * 3)
    assert costs.relative[0] == 1
    assert costs.draft > 0
    assert costs.head_layer > 0


def test_expected_speed_up():
    costs = Costs((1.0, 1.1, 1.2, *[2.0] * 6), 0.2, 0.3, 0.1, 10)
    assert costs.expected_speed_up(0, []) == 1
    assert costs.expected_speed_up(1, [0.5]) == pytest.approx(1.5 / 1.3)
    assert costs.expected_speed_up(2, [0.5, 0.4]) == pytest.approx(1.7 / 1.6)
    assert costs.bandwidth == 10


def test_conditional_acceptance():
    """Per position: accepted / judged, not / drafted."""
    stats = SpeculationStats(10, 30, 11, (8, 2, 1), (10, 10, 10))
    got = benchmark.conditional_acceptance([stats, stats])
    assert got == pytest.approx([0.8, 0.25, 0.5])
    varied = SpeculationStats(10, 14, 10, (8, 2), (10, 4))
    assert benchmark.conditional_acceptance([varied])[1] == pytest.approx(2 / 3.2)
    assert benchmark.conditional_acceptance([]) == []


def test_exact(model, noisy_dir):
    for comparison in benchmark_exact.compare(model, PROMPT, [1, 3], 20):
        assert comparison.exact
        assert comparison.tokens == 20


def test_a_broken_rollback_is_not_exact(random_dir, monkeypatch):
    """The check can fail: first the log-probabilities part, then the text."""
    model = mlx_mtp.load(random_dir)[0]
    monkeypatch.setattr(Engine, "rollback", lambda self, block: None)
    (got,) = benchmark_exact.compare(model, PROMPT, [3], 30)
    assert not got.exact
    assert got.max_difference > 0 or got.diverged_at is not None


def test_a_divergence_has_its_gap(model, monkeypatch):
    right = benchmark_exact.generate_step

    def wrong(*args, **kwargs):
        for i, (token, logprobs) in enumerate(right(*args, **kwargs)):
            yield (token + (i == 4)), logprobs

    monkeypatch.setattr(benchmark_exact, "generate_step", wrong)
    (got,) = benchmark_exact.compare(model, PROMPT, [2], 9)
    assert got.diverged_at == got.tokens == 4
    assert got.top2_gap > 0
    assert not got.exact


def test_quartiles():
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert quartiles([1.0, 2.0, 3.0]) == (1.5, 2.0, 2.5)
    assert rounded({"a": [0.123456, "x", 3]}) == {"a": [0.1235, "x", 3]}


def test_prompts(noisy_dir, tmp_path):
    tokenizer = mlx_mtp.load(noisy_dir)[1]
    file = tmp_path / "prompts"
    file.write_text("[1, 2]\n\nab\n")
    ids = benchmark.prompts_of(noisy_dir, file, tokenizer)
    assert ids[0] == [1, 2]
    assert len(ids) == 2
    assert len(benchmark.prompts_of(noisy_dir, None, tokenizer)) == 4
    file.write_text("\n")
    with pytest.raises(ValueError, match="no prompt"):
        benchmark.prompts_of(noisy_dir, file, tokenizer)


def test_command(noisy_dir, capsys):
    """A table, then one line of JSON."""
    command = ["--model", str(noisy_dir), "-m", "6", "--repeats", "1", "--check-exact"]
    benchmark.main([*command, "--num-draft-tokens", "2"])
    *text, last = capsys.readouterr().out.splitlines()
    document = json.loads(last)
    assert all(entry["exact"] for entry in document["exact"])
    assert document["machine"]["device"]
    assert any(line.startswith("| mlx-lm |") for line in text)


def test_wrong_arguments(capsys):
    for arguments in (["-m", "1"], ["--num-draft-tokens", "1,9"]):
        with pytest.raises(SystemExit, match="2"):
            benchmark.parse(arguments)
    assert "0 to 8, or auto, not 9" in capsys.readouterr().err


def test_plot_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"mlx-mtp\[bench\]"):
        plot({}, "x.png")
