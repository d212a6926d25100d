"""The model families. A new family is one file here and one line in ``FAMILIES``.

Each family module offers ``SPEC`` (data), ``MTPHead``, ``Target``, ``build_model``,
``head_args`` and ``make_rewindable``; ``qwen3_5`` is the pattern to follow.
"""

from types import ModuleType

from . import qwen3_5

FAMILIES: dict[str, ModuleType] = {
    "qwen3_5": qwen3_5,
    "qwen3_5_text": qwen3_5,
}


def family_of(config: dict) -> ModuleType:
    """The family module for a checkpoint's config.

    Raises:
        ValueError: for a ``model_type`` that is not supported.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(
            f"model_type {model_type!r} is not supported; "
            f"supported are: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]
