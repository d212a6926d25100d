"""The tokenizer of the tiny checkpoints: one token per byte, and a chat template."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

# The token id of a byte is the byte; special tokens follow.
NUM_BYTES = 256
END_OF_TEXT = 256  # <|endoftext|>, also the padding
START = 257  # <|im_start|>
END = 258  # <|im_end|>, ends an answer
THINK, END_THINK = 259, 260
VOCAB_SIZE = 288
EOS_IDS = [END, END_OF_TEXT]
SPECIAL_TOKENS = {
    "<|endoftext|>": END_OF_TEXT,
    "<|im_start|>": START,
    "<|im_end|>": END,
    "<think>": THINK,
    "</think>": END_THINK,
} | {f"<|reserved_{i}|>": i for i in range(END_THINK + 1, VOCAB_SIZE)}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_tokenizer(path: Path) -> None:
    """Byte-level BPE without merges: one token per byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(NUM_BYTES) if b not in printable]
    # The byte alphabet of GPT-2: unprintable bytes stand at U+0100 and after.
    vocab = {chr(b): b for b in printable}
    vocab |= {chr(NUM_BYTES + i): b for i, b in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab | SPECIAL_TOKENS, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in SPECIAL_TOKENS]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(path / "tokenizer_config.json", config)
