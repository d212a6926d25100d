"""Kernel tests need a C++ compiler; without one the whole folder says so and skips."""

from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from mlx_mtp.kernels import (
    dispatch,
    gated_delta_prologue,
    gated_delta_verify,
    gated_rms_norm,
    greedy_head,
)

from . import NO_COMPILER, compiler, run_kernel

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if compiler():
        return
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.skip(reason=NO_COMPILER))


@pytest.fixture
def on_harness(monkeypatch):
    """Have a kernel module of the project launch its kernel on the harness."""

    def change(module, text=None, **options):
        kernel = module.kernel()
        if text is not None:  # a fault planted in the source
            kernel = with_text(module, *text)
        call = partial(run_kernel, kernel, **options)
        monkeypatch.setattr(module, "kernel", lambda: call)

    return change


def with_text(module, old, new):
    """The module's kernel with a part of its text replaced."""
    texts = [module.SOURCE, getattr(module, "HEADER", "")]
    assert sum(text.count(old) for text in texts) >= 1, f"{old!r} is not in the source"
    source, header = (text.replace(old, new) for text in texts)
    with mock.patch.multiple(module, SOURCE=source, HEADER=header, create=True):
        return module.kernel.__wrapped__()


@pytest.fixture
def as_on_metal(on_harness, monkeypatch):
    """Have the model take the path of a Metal GPU, its kernels on the harness."""
    for module in (gated_delta_prologue, gated_delta_verify, gated_rms_norm):
        on_harness(module)
    make, reduce = greedy_head.kernel, greedy_head.reduce_kernel()
    monkeypatch.setattr(greedy_head, "kernel", lambda q: partial(run_kernel, make(q)))
    monkeypatch.setattr(
        greedy_head, "reduce_kernel", lambda: partial(run_kernel, reduce)
    )
    monkeypatch.setattr(dispatch, "on_metal", lambda: True)
    monkeypatch.setattr(dispatch, "native_scan", lambda *sizes: False)
    yield
    dispatch._probe.cache_clear()
    dispatch._runs.cache_clear()
    dispatch._greedy_runs.cache_clear()
