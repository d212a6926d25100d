"""Gemma 4 and its assistant: a drafter of its own that reads the target's keys.

Sources: transformers ``models/gemma4`` and ``models/gemma4_assistant``, whose modules
both are here, and its ``SinglePositionMultiTokenCandidateGenerator``. The assistant has
queries alone: every layer attends to what the target's last layer of its type with keys
of its own has kept. Draft 1 reads the embedding of the token that the target has not
read yet and the target's state before it; later drafts read the draft before and the
assistant's projected state. All of them stand at one position and see the same keys.

Where the engines differ: the position is that token's here, as in transformers and
mlx-vlm; vLLM takes the one before. A sliding layer sees the keys that the target would
from this position, as in mlx-vlm; transformers sees two more, vLLM one. Tokens outside
the chosen clusters have logits of minus infinity; transformers gives them one less than
the smallest, which lets sampling draw them.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from byte_tokenizer import END_OF_TEXT, EOS_IDS, VOCAB_SIZE, write_json
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    PreTrainedModel,
)

from .loading import read_raw
from .raw import HIDDEN, Draw, Weights, under, write_raw
from .reference import Drafts, HeadOut, Reference, Target, Tokens, batch

FULL, SLIDING = "full_attention", "sliding_attention"
ASSISTANT = "assistant"  # the directory beside the target's files
WIDTH, ASSISTANT_LAYERS = 32, [SLIDING, SLIDING, FULL]
CENTROIDS = 24
KV = dict[str, tuple[Tensor, Tensor]]


def common_text() -> dict[str, Any]:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": EOS_IDS,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 32,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "initializer_range": 0.02,
        "max_position_embeddings": 4096,
        "model_type": "gemma4_text",
        "num_attention_heads": 4,
        "pad_token_id": END_OF_TEXT,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            FULL: {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 8,
        "tie_word_embeddings": True,
        "vocab_size": VOCAB_SIZE,
    }


def config(*, large: bool) -> dict[str, Any]:
    """Of the small models' kind, with inputs per layer and shared keys, or of the large
    ones', with experts and values that are the keys."""
    kinds = [SLIDING, FULL, SLIDING, SLIDING, FULL]
    own = {
        "attention_k_eq_v": large,
        "enable_moe_block": large,
        "hidden_size_per_layer_input": 0 if large else 32,
        "layer_types": kinds[:3] + kinds[4:] if large else kinds,
        "num_hidden_layers": 4 if large else 5,
        "num_key_value_heads": 2 if large else 1,
        "num_kv_shared_layers": 0 if large else 2,
        "use_double_wide_mlp": not large,
        "vocab_size_per_layer_input": VOCAB_SIZE,
    }
    if large:
        own |= {
            "moe_intermediate_size": 64,
            "num_experts": 8,
            "num_global_key_value_heads": 1,
            "top_k_experts": 3,
        }
    text = common_text() | own | {"hidden_size": HIDDEN, "intermediate_size": 128}
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "eos_token_id": EOS_IDS,
        "model_type": "gemma4",
        "text_config": text,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "vocab_size": VOCAB_SIZE,
    }


def assistant_config(target: Mapping[str, Any], *, large: bool) -> dict[str, Any]:
    shared = ("attention_k_eq_v", "num_key_value_heads", "num_global_key_value_heads")
    text = common_text() | {k: target[k] for k in shared if k in target}
    layers = len(ASSISTANT_LAYERS)
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "backbone_hidden_size": HIDDEN,
        "centroid_intermediate_top_k": 4,
        "eos_token_id": EOS_IDS,
        "model_type": "gemma4_assistant",
        "num_centroids": CENTROIDS,
        "text_config": text
        | {
            "enable_moe_block": False,
            "hidden_size": WIDTH,
            "hidden_size_per_layer_input": 0,
            "intermediate_size": 64,
            "layer_types": ASSISTANT_LAYERS,
            "num_hidden_layers": layers,
            "num_kv_shared_layers": layers,
            "use_double_wide_mlp": False,
            "vocab_size_per_layer_input": 0,
        },
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_ordered_embeddings": not large,
    }


def norms(draw: Draw, size: int, names: list[str]) -> Weights:
    return {f"{name}.weight": draw.norm(size) for name in names}


def mlp(draw: Draw, hidden: int, size: int) -> Weights:
    weights = {
        "gate_proj.weight": draw.linear(size, hidden),
        "up_proj.weight": draw.linear(size, hidden),
        "down_proj.weight": draw.linear(hidden, size, gain=2.0),
    }
    return under("mlp.", weights)


def queries(draw: Draw, c: Mapping[str, Any], kind: str) -> Weights:
    """What every layer has, with keys or without."""
    hidden = c["hidden_size"]
    size = c["global_head_dim"] if kind == FULL else c["head_dim"]
    inner = c["num_attention_heads"] * size
    weights = {
        "self_attn.q_proj.weight": draw.linear(inner, hidden, gain=1.5),
        "self_attn.o_proj.weight": draw.linear(hidden, inner, gain=1.5),
        "self_attn.q_norm.weight": draw.norm(size),
        "layer_scalar": draw.norm(1),
    }
    around = ["input_layernorm", "post_attention_layernorm"]
    around += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    return weights | norms(draw, hidden, around)


def layer(draw: Draw, c: Mapping[str, Any], index: int) -> Weights:
    kind = c["layer_types"][index]
    one_projection = c["attention_k_eq_v"] and kind == FULL
    kv_heads = c[
        "num_global_key_value_heads" if one_projection else "num_key_value_heads"
    ]
    size = c["global_head_dim"] if kind == FULL else c["head_dim"]
    weights = queries(draw, c, kind) | {
        # The release has them where keys are shared too; nothing reads those.
        "self_attn.k_proj.weight": draw.linear(kv_heads * size, HIDDEN, gain=1.5),
        "self_attn.k_norm.weight": draw.norm(size),
    }
    if not one_projection:
        rows = kv_heads * size
        weights["self_attn.v_proj.weight"] = draw.linear(rows, HIDDEN, gain=1.5)
    shared = index >= c["num_hidden_layers"] - c["num_kv_shared_layers"]
    wide = 2 if shared and c["use_double_wide_mlp"] else 1
    weights |= mlp(draw, HIDDEN, wide * c["intermediate_size"])
    if c["enable_moe_block"]:
        weights |= moe(draw, c)
    if small := c["hidden_size_per_layer_input"]:
        weights |= {
            "per_layer_input_gate.weight": draw.linear(small, HIDDEN),
            "per_layer_projection.weight": draw.linear(HIDDEN, small),
            "post_per_layer_input_norm.weight": draw.norm(HIDDEN),
        }
    return weights


def moe(draw: Draw, c: Mapping[str, Any]) -> Weights:
    count, size = c["num_experts"], c["moe_intermediate_size"]
    names = ["post_feedforward_layernorm_1", "post_feedforward_layernorm_2"]
    fused = draw.linear(count * 2 * size, HIDDEN).reshape(count, 2 * size, HIDDEN)
    down = draw.linear(count * HIDDEN, size, gain=2.0).reshape(count, HIDDEN, size)
    return norms(draw, HIDDEN, [*names, "pre_feedforward_layernorm_2"]) | {
        "router.proj.weight": draw.linear(count, HIDDEN, gain=2.0),
        "router.scale": draw.norm(HIDDEN),
        "router.per_expert_scale": draw.norm(count),
        "experts.gate_up_proj": fused,
        "experts.down_proj": down,
    }


def write(path: str | Path, seed: int = 0, *, large: bool = False) -> Path:
    """The target in ``path``, the assistant in ``path / ASSISTANT``."""
    whole, draw = config(large=large), Draw(seed)
    c = whole["text_config"]
    target = {
        "embed_tokens.weight": draw.output(),
        "norm.weight": draw.norm(HIDDEN),
    }
    for i in range(c["num_hidden_layers"]):
        target |= under(f"layers.{i}.", layer(draw, c, i))
    if small := c["hidden_size_per_layer_input"]:
        rows = c["num_hidden_layers"] * small
        target |= {
            "embed_tokens_per_layer.weight": draw.linear(VOCAB_SIZE, rows),
            "per_layer_model_projection.weight": draw.linear(rows, HIDDEN),
            "per_layer_projection_norm.weight": draw.norm(small),
        }
    path = write_raw(path, whole, under("model.language_model.", target), {})
    write_assistant(path / ASSISTANT, assistant_config(c, large=large), draw)
    return path


def write_assistant(path: Path, c: Mapping[str, Any], draw: Draw) -> None:
    text = c["text_config"]
    weights = {
        "pre_projection.weight": draw.linear(WIDTH, 2 * HIDDEN, gain=1.5),
        "post_projection.weight": draw.linear(HIDDEN, WIDTH, gain=2.0),
        "model.embed_tokens.weight": draw.linear(VOCAB_SIZE, WIDTH, gain=2.0),
        "model.norm.weight": draw.norm(WIDTH),
    }
    for i, kind in enumerate(ASSISTANT_LAYERS):
        inner = queries(draw, text, kind) | mlp(draw, WIDTH, text["intermediate_size"])
        weights |= under(f"model.layers.{i}.", inner)
    if c["use_ordered_embeddings"]:
        weights |= {
            "masked_embedding.centroids.weight": draw.linear(CENTROIDS, WIDTH),
            "masked_embedding.token_ordering": draw.rng.permutation(VOCAB_SIZE),
        }
    path.mkdir(parents=True, exist_ok=True)
    tensors = {k: torch.from_numpy(v).contiguous() for k, v in weights.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    write_json(path / "config.json", dict(c))


class Gemma4Reference(Reference):
    """``raw_head`` holds the assistant's tensors. ``head`` needs the target's keys and
    values besides: see ``kv``."""

    def load_target(self) -> PreTrainedModel:
        read = json.loads((self.path / "config.json").read_text())["text_config"]
        settings = Gemma4TextConfig(**read)
        settings._attn_implementation = "eager"
        model = Gemma4ForCausalLM(settings).to(torch.float32)
        raw = read_raw(self.path).items()
        state = {k.replace("language_model.", ""): v for k, v in raw}
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
        wanted = model.state_dict().keys()
        unread = {k for k in state if k not in wanted}
        assert all(".self_attn.k_" in k or ".self_attn.v_" in k for k in unread)
        model.load_state_dict({k: v for k, v in state.items() if k in wanted})
        return model.eval()

    def is_head(self, key: str) -> bool:
        return False

    def build(self, head: dict[str, Tensor]) -> None:
        """The assistant's raw tensors; without any, those of its file."""
        path = self.path / ASSISTANT
        self.raw_head = head or read_raw(path)
        read = json.loads((path / "config.json").read_text())
        self.assistant_config = Gemma4AssistantConfig(**read)
        self.assistant_config._attn_implementation = "eager"
        self.assistant = Gemma4AssistantForCausalLM(self.assistant_config)
        embedding = self.raw_head["model.embed_tokens.weight"]
        self.assistant.load_state_dict(self.raw_head | {"lm_head.weight": embedding})
        self.assistant.eval()

    def target(self, tokens: Tokens) -> Target:
        found, cap = super().target(tokens), self.config.final_logit_softcapping
        return found._replace(logits=torch.tanh(found.logits / cap) * cap)

    @torch.no_grad()
    def kv(self, tokens: Tokens) -> KV:
        """By type of layer, keys and values [B, heads, T, D] that the assistant reads:
        rotated and normed, those of the last layer that has its own."""
        out = self.decoder(batch(tokens), use_cache=False, return_shared_kv_states=True)
        return dict(out.shared_kv_states)

    @torch.no_grad()
    def head(
        self, states: Tensor, tokens: Tokens, kv: KV, positions: Tensor, **toggles: Any
    ) -> HeadOut:
        """Rows of their own, which do not see each other.

        Args:
            states: [B, T, H] of the target, or what the assistant gave.
            tokens: [B, T].
            kv: from ``kv``.
            positions: [T]; a row sees the keys before its own.
        """
        replace(self.toggles, **toggles)
        embedded = self.decoder.embed_tokens(batch(tokens))  # scaled
        x = torch.cat([embedded, torch.as_tensor(states)], dim=-1)
        hidden = self.assistant.model(
            inputs_embeds=self.assistant.pre_projection(x),
            attention_mask=self.masks(kv, positions),
            position_ids=positions[None],
            shared_kv_states=kv,
            use_cache=False,
            output_hidden_states=True,  # or it cuts inputs per layer that are not there
        ).last_hidden_state
        return HeadOut(self.assistant.post_projection(hidden), self.logits(hidden))

    def masks(self, kv: KV, positions: Tensor) -> dict[str, Tensor]:
        window = self.config.sliding_window
        masks = {}
        for kind, (keys, _) in kv.items():
            at = torch.arange(keys.shape[2])[None, :]
            seen = at < positions[:, None]
            if kind == SLIDING:
                seen &= at > positions[:, None] - window
            masks[kind] = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
        return {kind: mask[None, None] for kind, mask in masks.items()}

    def logits(self, hidden: Tensor) -> Tensor:
        logits = F.linear(hidden, self.raw_head["model.embed_tokens.weight"])
        if not self.assistant_config.use_ordered_embeddings:
            return logits
        centroids = self.raw_head["masked_embedding.centroids.weight"]
        clusters = self.raw_head["masked_embedding.token_ordering"].view(CENTROIDS, -1)
        count = self.assistant_config.centroid_intermediate_top_k
        chosen = F.linear(hidden, centroids).topk(count).indices
        allowed = clusters[chosen].flatten(-2)
        masked = torch.full_like(logits, float("-inf"))
        return masked.scatter(-1, allowed, logits.gather(-1, allowed))

    def teacher_forced(
        self, tokens: Tokens, states: Tensor | None = None, **toggles: Any
    ) -> list[HeadOut]:
        tokens = batch(tokens)
        if states is None:
            stage = replace(self.toggles, **toggles).hidden
            states = getattr(self.target(tokens), stage)
        positions = torch.arange(1, tokens.shape[1])
        kv = self.kv(tokens[:, :-1])
        return [self.head(states[:, :-1], tokens[:, 1:], kv, positions)]

    def drafts(
        self,
        tokens: Tokens,
        num_draft_tokens: int,
        follow: Tokens | None = None,
        **toggles: Any,
    ) -> Drafts:
        """Drafts after ``tokens`` [T] or [B, T]; the target has not read the last one,
        at whose position T - 1 every draft is made.

        Args:
            follow: the drafts to go on with; default: the most likely ones.
        """
        tokens, stage = batch(tokens), replace(self.toggles, **toggles).hidden
        given = None if follow is None else batch(follow)
        kv = self.kv(tokens[:, :-1])
        states = getattr(self.target(tokens[:, :-1]), stage)[:, -1:]
        position = torch.tensor([tokens.shape[1] - 1])
        token = tokens[:, -1:]
        logits: list[Tensor] = []
        drafted: list[Tensor] = []
        for step in range(num_draft_tokens):
            out = self.head(states, token, kv, position)
            states = out.chain
            logits.append(out.logits)
            token = (
                out.logits.argmax(-1) if given is None else given[:, step : step + 1]
            )
            drafted.append(token)
        return Drafts(torch.cat(logits, 1), torch.cat(drafted, 1))
