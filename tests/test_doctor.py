"""The self-test: it runs, its verdicts follow the figures, a wrong kernel is seen."""

import json

import mlx.core as mx
import pytest

import mlx_mtp
from mlx_mtp import doctor, doctor_kernels
from mlx_mtp.doctor_kernels import cases, check, check_kernels


def test_command(noisy_dir, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "TOKENS", 8)
    doctor.main(["--model", str(noisy_dir)])
    *lines, last = capsys.readouterr().out.splitlines()
    document = json.loads(last)
    assert document["verdicts"] == lines[1:]
    assert document["kernels"] == []
    assert all(entry["exact"] for entry in document["exact"])
    assert set(document["build_seconds"]) == {"0", "1", "3"}
    assert any("K = 3: tokens and log-probabilities are plain" in x for x in lines)


def test_a_model_without_head(noisy_dir, capsys):
    model, _ = mlx_mtp.load(noisy_dir, mtp=False)
    document = doctor.examine(model, [[1, 2]])
    assert doctor.verdicts(document)[-1].startswith("[FAIL] the model has no MTP head")


def test_operations_pass_as_kernels():
    """The cases fit; on this machine only the operations themselves can run."""
    for case in cases():
        assert check(case._replace(kernel=case.operations))["ok"], case.name


def test_kernels_are_used_on_metal_only(monkeypatch):
    assert check_kernels() == []
    monkeypatch.setattr(doctor_kernels, "on_metal", lambda: True)
    entries = check_kernels()  # here they cannot run, and that is said
    assert len(entries) == 5
    assert not any(entry["ok"] for entry in entries)
    assert all(entry["error"] for entry in entries)


def faults(right):
    def nan(*arguments):
        first, *rest = doctor_kernels._arrays(right(*arguments))
        return [first * mx.array(float("nan")), *rest]

    def off(*arguments):
        first, *rest = doctor_kernels._arrays(right(*arguments))
        return [first + 1, *rest]

    def shape(*arguments):
        first, *rest = doctor_kernels._arrays(right(*arguments))
        return [first[None], *rest]

    return [nan, off, shape]


def test_wrong_kernels_are_seen():
    for case in cases():
        for wrong in faults(case.operations):
            if case.name.startswith("greedy") and wrong.__name__ == "nan":
                continue  # tokens are whole numbers
            assert not check(case._replace(kernel=wrong))["ok"], case.name


@pytest.mark.parametrize(
    ("change", "begin"),
    [
        ({"exact": True}, "[ok  ]"),
        ({"exact": False, "diverged_at": None}, "[ok  ]"),
        ({"exact": False, "diverged_at": 3, "top2_gap": 0.01}, "[note]"),
        ({"exact": False, "diverged_at": 3, "top2_gap": 2.0}, "[FAIL]"),
    ],
)
def test_verdicts_of_exactness(change, begin):
    entry = {"num_draft_tokens": 1, "max_difference": 0.1, "top2_gap": None}
    assert doctor._exact_line(entry | change).startswith(begin)


def test_verdicts_of_speed():
    def line(name, ratio):
        (text,) = doctor._speed_lines({name: {"ratio": (0, ratio, 0)}})
        return text

    assert line("auto", 1.5).startswith("[ok  ]")
    assert line("auto", 0.8).startswith("[FAIL]")
    assert line("mtp off", 0.8).startswith("[FAIL]")
    assert line("3", 0.8).startswith("[note]")
