"""GLM-5: DeepSeek-V3.2's form with another rotation in the indexer.

Source: vLLM ``deepseek_mtp.py``. Where the config has
``index_share_for_mtp_iteration``, vLLM's later drafts read the positions that the first
one has picked; here every draft picks its own. Models whose layers share an indexer
(GLM-5.2) are not mlx-lm's.
"""

from mlx_lm.models import glm_moe_dsa

from . import nextn
from .deepseek_v32 import DeepseekV32
from .spec import MTPSpec


class GlmMoeDsa(DeepseekV32):
    spec = MTPSpec(
        family="glm_moe_dsa",
        model_types=("glm_moe_dsa",),
        prefixes=nextn.PREFIXES,
        names=nextn.NAMES,
    )
    base = glm_moe_dsa
