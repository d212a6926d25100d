"""The model families. A new family is one file here and one line in ``_ALL``."""

from typing import Any

from .bailing_hybrid import Bailing
from .deepseek_v3 import DeepseekV3
from .deepseek_v32 import DeepseekV32
from .ernie4_5_moe import Ernie45Moe
from .exaone_moe import ExaoneMoe
from .family import Family
from .gemma4 import Gemma4
from .glm4_moe import Glm4Moe
from .glm4_moe_lite import Glm4MoeLite
from .glm_moe_dsa import GlmMoeDsa
from .longcat_flash import LongcatFlash
from .mimo import MiMo
from .mimo_v2_flash import MiMoV2Flash
from .nemotron_h import NemotronH
from .qwen3_5 import Qwen35
from .qwen3_5_moe import Qwen35Moe
from .qwen3_next import Qwen3Next
from .step3p5 import Step35

_ALL: tuple[Family, ...] = (
    Qwen35(),
    Qwen35Moe(),
    Qwen3Next(),
    DeepseekV3(),
    DeepseekV32(),
    Glm4Moe(),
    Glm4MoeLite(),
    GlmMoeDsa(),
    MiMo(),
    MiMoV2Flash(),
    Ernie45Moe(),
    ExaoneMoe(),
    Step35(),
    LongcatFlash(),
    NemotronH(),
    Bailing(),
    Gemma4(),
)
FAMILIES: dict[str, Family] = {
    model_type: family for family in _ALL for model_type in family.spec.model_types
}
_NO_MODEL = "mlx-lm has no such model"
# Families with a draft head that is known, and what stands in the way.
UNSUPPORTED: dict[str, str] = {
    "deepseek_v4": f"its head works on several residual streams, and {_NO_MODEL}",
    "deepseek_v41": "it drafts with a DSpark head, which is no MTP head",
    "qwen4_exp": f"its head works on several residual streams, and {_NO_MODEL}",
    "qwen4_exp_text": f"its head works on several residual streams, and {_NO_MODEL}",
    "gemma4_assistant": "it drafts for a Gemma 4 model, as its draft_model",
    "gemma4_unified_assistant": "it is a drafter of another kind",
    "step3p7": _NO_MODEL,
    "longcat_flash_ngram": "its embedding layer keeps tokens that cannot be rewound",
    "kimi_k3": "its linear attention layers cannot be rewound",
    "hy_v3": _NO_MODEL,
    "hy_v4": _NO_MODEL,
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
    if isinstance(model_type, str) and model_type in UNSUPPORTED:
        raise ValueError(
            f"model_type {model_type!r} is not supported yet: {UNSUPPORTED[model_type]}"
        )
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(
            f"model_type {model_type!r} is not supported; "
            f"supported are: {', '.join(supported_families())}"
        )
    return FAMILIES[model_type]
