"""Kernel tests need a C++ compiler; without one the whole folder says so and skips."""

from pathlib import Path

import pytest

from . import NO_COMPILER, compiler

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if compiler():
        return
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.skip(reason=NO_COMPILER))
