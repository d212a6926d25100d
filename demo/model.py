"""The demo's target and MTP head in torch, and their losses."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from gated_delta_torch import FastGatedDeltaNet
from torch import nn
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

INIT_STD = 0.02
HEAD_LOSS_WEIGHT = 0.3  # of the head's next-token loss in the joint phase


def text_config(vocab_size: int) -> Qwen3_5TextConfig:
    """Three Gated DeltaNet layers and one attention layer, about 3.7 M parameters."""
    config = Qwen3_5TextConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        eos_token_id=0,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    )
    config._attn_implementation = "sdpa"
    return config


class MTPHead(nn.Module):
    """(embedding of x[t+1], hidden of x[t]) -> hidden that predicts x[t+2]."""

    def __init__(self, config: Qwen3_5TextConfig):
        super().__init__()
        size = config.hidden_size
        layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
        layer_config = Qwen3_5TextConfig(**{**config.to_dict(), **layer})
        layer_config._attn_implementation = "sdpa"
        self.pre_fc_norm_embedding = qwen.Qwen3_5RMSNorm(size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = qwen.Qwen3_5RMSNorm(size, config.rms_norm_eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([qwen.Qwen3_5DecoderLayer(layer_config, 0)])
        self.norm = qwen.Qwen3_5RMSNorm(size, config.rms_norm_eps)

    def forward(self, embedding, hidden, position_embeddings):
        e, h = self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)
        x = self.fc(torch.cat([e, h], -1))
        x = self.layers[0](
            x, position_embeddings=position_embeddings, attention_mask=None
        )
        return self.norm(x)


@dataclass
class Forward:
    """Logits of one batch: the target's [B, T, V]; the head's per depth."""

    target: torch.Tensor
    head: list[torch.Tensor]


class DemoModel(nn.Module):
    def __init__(self, vocab_size: int, length: int):
        super().__init__()
        self.config = text_config(vocab_size)
        self.target = qwen.Qwen3_5ForCausalLM(self.config)
        for layer in self.target.model.layers:
            if layer.block_type == "linear_attention":
                layer.linear_attn = FastGatedDeltaNet.share(layer.linear_attn)
        self.mtp = MTPHead(self.config)
        self.length = length
        positions = torch.arange(length)[None]
        zeros = torch.zeros(1, length, self.config.hidden_size)
        self.rope = self.target.model.rotary_emb(zeros, positions)
        self.initialize()

    def initialize(self) -> None:
        """Small matrices; smaller still where they write to the residual stream."""
        for p in self.mtp.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=INIT_STD)
        outputs = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
        for name, p in self.named_parameters():
            if name.endswith(outputs):
                p.data.mul_(1 / math.sqrt(2 * self.config.num_hidden_layers))

    def forward(self, ids: torch.Tensor, depth: int = 1) -> Forward:
        """ids [B, length + 1 + depth]: row t of head depth d predicts x[t + 1 + d].

        Depth 2 and on are fed the head's own output. Their attention sees the rows
        of their own depth, not the target's: near enough for training.
        """
        n, table = self.length, self.target.lm_head.weight
        hidden = self.target.model(input_ids=ids[:, :n]).last_hidden_state
        embed, head, h = self.target.model.embed_tokens, [], hidden
        for d in range(1, depth + 1):
            h = self.mtp(embed(ids[:, d : n + d]), h, self.rope)
            head.append((h @ table.T).float())
        return Forward((hidden @ table.T).float(), head)


def joint_loss(model: DemoModel, ids: torch.Tensor) -> torch.Tensor:
    """Next-token loss of target and head, learnt together as in DeepSeek-V3."""
    n, out = model.length, model(ids)
    main = F.cross_entropy(out.target.flatten(0, 1), ids[:, 1 : n + 1].flatten())
    head = F.cross_entropy(out.head[0].flatten(0, 1), ids[:, 2 : n + 2].flatten())
    return main + HEAD_LOSS_WEIGHT * head


def distillation_loss(model: DemoModel, ids: torch.Tensor, depth: int) -> torch.Tensor:
    """KL(target || head) at each depth, the target frozen."""
    out, loss = model(ids, depth), 0.0
    log_target = out.target.detach().log_softmax(-1)
    for d, logits in enumerate(out.head, 1):
        loss = loss + F.kl_div(
            logits[:, :-d].log_softmax(-1).flatten(0, 1),
            log_target[:, d:].flatten(0, 1),
            log_target=True,
            reduction="batchmean",
        )
    return loss / depth


@torch.no_grad()
def evaluate(model: DemoModel, batches: list[torch.Tensor], depth: int = 3) -> dict:
    """Held-out losses in nats a token, and how often the head's argmax is the target's
    given that it was at every smaller depth (conditional acceptance per position)."""
    main = head = 0.0
    accepted, drafted = [0.0] * depth, [0.0] * depth
    n = model.length
    for ids in batches:
        out = model(ids, depth)
        main += F.cross_entropy(
            out.target.flatten(0, 1), ids[:, 1 : n + 1].flatten()
        ).item()
        head += F.cross_entropy(
            out.head[0].flatten(0, 1), ids[:, 2 : n + 2].flatten()
        ).item()
        top, alive = (
            out.target.argmax(-1),
            torch.ones_like(ids[:, : n - depth], dtype=bool),
        )
        for d, logits in enumerate(out.head, 1):
            right = logits.argmax(-1)[:, : n - depth] == top[:, d : n - depth + d]
            drafted[d - 1] += alive.sum().item()
            alive &= right
            accepted[d - 1] += alive.sum().item()
    count = len(batches)
    return {
        "heldout_loss": round(main / count, 4),
        "heldout_head_loss": round(head / count, 4),
        "acceptance_per_position": [
            round(a / max(d, 1), 4) for a, d in zip(accepted, drafted, strict=True)
        ],
    }
