"""Write the trained demo in the layout of a released Qwen3.5 checkpoint."""

import json
import shutil
from pathlib import Path

import torch
from model import DemoModel
from safetensors.torch import save_file

FLOAT32_NAMES = ("A_log", "linear_attn.norm.weight")  # as in released files
TARGET_PREFIX = "model.language_model."


def hf_tensors(model: DemoModel) -> dict[str, torch.Tensor]:
    """Raw names and values: zero-centred norms, conv1d [C, 1, K], tied output layer."""
    tensors = {
        TARGET_PREFIX + name: value
        for name, value in model.target.model.state_dict().items()
    }
    tensors |= {f"mtp.{name}": value for name, value in model.mtp.state_dict().items()}
    return {
        name: (value if name.endswith(FLOAT32_NAMES) else value.bfloat16()).contiguous()
        for name, value in tensors.items()
    }


def save_hf_layout(out: Path, model: DemoModel, tokenizer: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    save_file(hf_tensors(model), out / "model.safetensors", metadata={"format": "pt"})
    text = model.config.to_dict()
    text |= {"full_attention_interval": 4, "dtype": "bfloat16"}
    text |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "model_max_length": text["max_position_embeddings"],
    }
    for name, value in (
        ("config.json", config),
        ("generation_config.json", {"eos_token_id": 0}),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (out / name).write_text(json.dumps(value, indent=1, default=str) + "\n")
    shutil.copyfile(tokenizer, out / "tokenizer.json")
