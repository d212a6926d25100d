"""DeepSeek-V3.2: V3 with an indexer that picks positions, in the head one of its own.

Sources: vLLM ``deepseek_mtp.py``, SGLang ``deepseek_nextn.py``.
"""

from typing import Any

import mlx.nn as nn
from mlx_lm.models import deepseek_v32

from ..speculative.cache import RewindableKVCache
from ..speculative.cache_list import RewindableCacheList
from . import nextn
from .deepseek_v3 import DeepseekV3
from .family import Config
from .spec import MTPSpec


class DeepseekV32(DeepseekV3):
    spec = MTPSpec(
        family="deepseek_v32",
        model_types=("deepseek_v32",),
        prefixes=nextn.PREFIXES,
        names=nextn.NAMES,
    )
    base = deepseek_v32

    def head_layer(self, args: Any, config: Config) -> nn.Module:
        return deepseek_v32.DeepseekV32DecoderLayer(args, args.num_hidden_layers)

    def head_options(self, args: Any, config: Config) -> dict[str, Any]:
        def make_cache(batch_size: int) -> Any:
            pair = (RewindableKVCache(batch_size) for _ in range(2))
            return RewindableCacheList(*pair)

        return {"array_mask": True, "make_cache": make_cache}
