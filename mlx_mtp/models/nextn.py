"""Heads in DeepSeek-V3's form: a layer past the last one, with its own ends.

``model.layers.{N}.`` holds ``enorm``, ``hnorm``, ``eh_proj``, the layer itself,
``shared_head.norm`` and, mostly as copies of the target's, ``embed_tokens`` and
``shared_head.head``. Source: vLLM ``deepseek_mtp.py``.
"""

PREFIXES = ("model.layers.{layer}.",)
NAMES = (
    ("enorm.", "pre_fc_norm_embedding."),
    ("hnorm.", "pre_fc_norm_hidden."),
    ("eh_proj.", "fc."),
    ("shared_head.norm.", "norm."),
    ("shared_head.head.", "lm_head."),
    ("embed_tokens.", "embed_tokens."),
    ("", "layers.0."),
)
