"""The model families. A new family is one file here and one line in ``_ALL``."""

from typing import Any

from .deepseek_v3 import DeepseekV3
from .deepseek_v32 import DeepseekV32
from .ernie4_5_moe import Ernie45Moe
from .exaone_moe import ExaoneMoe
from .family import Family
from .glm4_moe import Glm4Moe
from .glm4_moe_lite import Glm4MoeLite
from .mimo import MiMo
from .qwen3_5 import Qwen35
from .qwen3_5_moe import Qwen35Moe
from .qwen3_next import Qwen3Next

_ALL: tuple[Family, ...] = (
    Qwen35(),
    Qwen35Moe(),
    Qwen3Next(),
    DeepseekV3(),
    DeepseekV32(),
    Glm4Moe(),
    Glm4MoeLite(),
    MiMo(),
    Ernie45Moe(),
    ExaoneMoe(),
)
FAMILIES: dict[str, Family] = {
    model_type: family for family in _ALL for model_type in family.spec.model_types
}


def supported_families() -> list[str]:
    """The ``model_type``s that mlx_mtp converts and runs, in alphabetical order."""
    return sorted(FAMILIES)


def family_of(config: dict[str, Any]) -> Family:
    """The family of a checkpoint's config.

    Raises:
        ValueError: for a ``model_type`` that is not supported.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(
            f"model_type {model_type!r} is not supported; "
            f"supported are: {', '.join(supported_families())}"
        )
    return FAMILIES[model_type]
