"""Every family with a draft head: a tiny raw checkpoint and its reference in torch.

``FAMILIES`` lists them. The modules here are the independent side of the comparison:
they know the released files, transformers and the published math, not mlx_mtp.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from . import deepseek_v3, glm4_moe, mimo
from .reference import Drafts, HeadOut, Reference, Target, Toggles, Tokens

__all__ = ["FAMILIES", "Family", "Reference", "Toggles", "family"]


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


FAMILIES = [
    Family(
        "deepseek_v3",
        "deepseek_v3",
        deepseek_v3.write,
        deepseek_v3.DeepseekV3Reference,
    ),
    Family("glm4_moe", "glm4_moe", glm4_moe.write, glm4_moe.Glm4MoeReference),
    Family(
        "glm4_moe_air",
        "glm4_moe",
        partial(glm4_moe.write, use_qk_norm=False),
        glm4_moe.Glm4MoeReference,
    ),
    Family("mimo", "mimo", mimo.write, mimo.MiMoReference),
]


def family(name: str) -> Family:
    return {f.name: f for f in FAMILIES}[name]
