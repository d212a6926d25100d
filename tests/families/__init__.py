"""Every family with a draft head: a tiny raw checkpoint and its reference in torch.

``FAMILIES`` lists them. The modules here are the independent side of the comparison:
they know the released files, transformers and the published math, not mlx_mtp.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from . import (
    bailing_hybrid,
    bailing_moe_v3,
    deepseek_v3,
    deepseek_v32,
    ernie4_5_moe,
    exaone_moe,
    gemma4,
    glm4_moe,
    glm4_moe_lite,
    glm_moe_dsa,
    longcat_flash,
    mimo,
    mimo_v2_flash,
    nemotron_h,
    qwen3_5_moe,
    qwen3_next,
    step3p5,
)
from .reference import Drafts, HeadOut, Reference, Target, Toggles, Tokens

__all__ = ["DRAFTERS", "FAMILIES", "Family", "Reference", "Toggles", "family"]


@dataclass(frozen=True)
class Family:
    """One family, or one released variant of it.

    Attributes:
        name: readable, unique: a test id.
        model_type: that of ``config.json``.
        write: ``write(path, seed)`` -> the raw directory.
        load: the reference of a raw directory; loads it once, unlike the functions
            below, which load it at every call.
    """

    name: str
    model_type: str
    write: Callable[..., Path]
    load: type[Reference]

    @property
    def toggles(self) -> Toggles:
        """The defaults."""
        return self.load.toggles

    def target(self, path: Path) -> Callable[[Tokens], Target]:
        return self.load(path).target

    def head(self, path: Path, **toggles: Any) -> Callable[..., HeadOut]:
        return partial(self.load(path).head, **toggles)

    def drafts(self, path: Path, tokens: Tokens, k: int, **toggles: Any) -> Drafts:
        return self.load(path).drafts(tokens, k, **toggles)


def _variant(
    module: ModuleType,
    load: type[Reference],
    name: str = "",
    model_type: str = "",
    **options: Any,
) -> Family:
    model_type = model_type or module.__name__.rpartition(".")[2]
    write = partial(module.write, **options) if options else module.write
    return Family(name or model_type, model_type, write, load)


FAMILIES = [
    _variant(bailing_hybrid, bailing_hybrid.BailingHybridReference),
    _variant(
        bailing_moe_v3,
        bailing_moe_v3.BailingMoeV3Reference,
        "bailing_moe_v3",
        model_type="bailing_hybrid",
    ),
    _variant(deepseek_v3, deepseek_v3.DeepseekV3Reference),
    _variant(deepseek_v32, deepseek_v32.DeepseekV32Reference),
    _variant(ernie4_5_moe, ernie4_5_moe.Ernie45MoeReference),
    _variant(
        ernie4_5_moe,
        ernie4_5_moe.Ernie45MoeReference,
        "ernie4_5_moe_no_bias",
        bias_std=0.0,
    ),
    _variant(exaone_moe, exaone_moe.ExaoneMoeReference),
    _variant(
        exaone_moe,
        exaone_moe.ExaoneMoeReference,
        "exaone_moe_full_head",
        head_type="full_attention",
    ),
    _variant(glm4_moe, glm4_moe.Glm4MoeReference),
    _variant(glm4_moe, glm4_moe.Glm4MoeReference, "glm4_moe_air", use_qk_norm=False),
    _variant(glm4_moe_lite, glm4_moe_lite.Glm4MoeLiteReference),
    _variant(glm_moe_dsa, glm_moe_dsa.GlmMoeDsaReference),
    _variant(longcat_flash, longcat_flash.LongcatFlashReference),
    _variant(mimo, mimo.MiMoReference),
    _variant(mimo_v2_flash, mimo_v2_flash.MiMoV2FlashReference),
    _variant(nemotron_h, nemotron_h.NemotronHReference),
    _variant(nemotron_h, nemotron_h.NemotronHReference, "nemotron_h_latent", latent=32),
    _variant(qwen3_5_moe, qwen3_5_moe.Qwen35MoeReference),
    _variant(
        qwen3_5_moe,
        qwen3_5_moe.Qwen35MoeReference,
        "qwen3_5_moe_single_experts",
        fused_head=False,
    ),
    _variant(qwen3_next, qwen3_next.Qwen3NextReference),
    _variant(step3p5, step3p5.Step3p5Reference),
]
# Drafters of their own, in a directory below the target's: see ``gemma4``.
DRAFTERS = [
    _variant(gemma4, gemma4.Gemma4Reference),
    _variant(gemma4, gemma4.Gemma4Reference, "gemma4_large", large=True),
]


def family(name: str) -> Family:
    return {f.name: f for f in FAMILIES + DRAFTERS}[name]
