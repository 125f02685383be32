"""EAGLE-3 draft head in plain torch: training form and folder format.

A head is one decoder layer. At position i it reads the target's hidden states of token i and the
embedding of token i + 1, and predicts token i + 2. Further drafts read the layer's own output in
place of hidden states. All positions of a text are computed at once and without a KV cache, each
with its own chain of drafts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

ARCHITECTURE = "LlamaForCausalLMEagle3"
NUM_TAPS = 3
TAP_IDS = "eagle_aux_hidden_state_layer_ids"


class RopeTables(Protocol):
    """Cosines and sines of positions."""

    def __call__(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]: ...


def default_tap_ids(num_layers: int) -> tuple[int, ...]:
    """Return the target layers whose input a head reads, if its config names none.

    Targets with few layers, where these would be equal or not exist, have others.
    """
    ids = (2, num_layers // 2, num_layers - 3)
    if 2 < num_layers // 2 < num_layers - 3:
        return ids
    return tuple(range(max(0, num_layers - NUM_TAPS), num_layers))


def head_config(
    target: Any, *, draft_vocab_size: int | None = None, intermediate_size: int | None = None
) -> LlamaConfig:
    """Return the config of a head for a target: its layer has the shape of the target's layers."""
    num_heads = target.num_attention_heads
    return LlamaConfig(
        architectures=[ARCHITECTURE],
        hidden_size=target.hidden_size,
        intermediate_size=intermediate_size or target.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=num_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=getattr(target, "head_dim", None) or target.hidden_size // num_heads,
        hidden_act=target.hidden_act,
        rms_norm_eps=target.rms_norm_eps,
        rope_parameters=dict(target.rope_parameters),
        max_position_embeddings=target.max_position_embeddings,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size or target.vocab_size,
        tie_word_embeddings=False,
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
        pad_token_id=None,
        dtype="bfloat16",
        **{TAP_IDS: list(default_tap_ids(target.num_hidden_layers))},
    )


class DraftHead(nn.Module):
    """A head and its draft vocabulary. Tensors have the names of published folders."""

    d2t: Tensor  # what to add to a draft token's id to get the target's
    t2d: Tensor  # whether a token of the target is in the draft vocabulary

    def __init__(self, config: LlamaConfig, draft_token_ids: Tensor) -> None:
        super().__init__()
        self.config = config
        size, num_taps = config.hidden_size, len(getattr(config, TAP_IDS))
        self.fc = nn.Linear(num_taps * size, size, bias=False)
        self.midlayer = DraftLayer(config)
        self.norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, len(draft_token_ids), bias=False)
        is_drafted = torch.zeros(config.vocab_size, dtype=torch.bool)
        is_drafted[draft_token_ids] = True
        self.register_buffer("d2t", draft_token_ids - torch.arange(len(draft_token_ids)))
        self.register_buffer("t2d", is_drafted)
        # A list hides the tables from the parts of the module: they are not stored.
        self._rope: list[RopeTables] = [LlamaRotaryEmbedding(config)]

    @property
    def draft_token_ids(self) -> Tensor:
        return self.d2t + torch.arange(len(self.d2t))

    def unroll(self, taps: Tensor, embeddings: Tensor, num_steps: int) -> Iterator[Tensor]:
        """Yield the logits of each draft step for all positions, [texts, positions, draft vocab].

        `taps` are hidden states [texts, positions, taps x size], `embeddings` those of the same
        tokens. A step reads the tokens of the text, not its own drafts: what it predicts counts
        only where all drafts before it are right. At the end of the text, where tokens are
        missing, predictions have no meaning.
        """
        hidden, memory = self.fc(taps).float(), list[tuple[Tensor, Tensor]]()
        positions = torch.arange(taps.shape[1])[None]
        for step in range(num_steps):
            tokens = functional.pad(embeddings[:, step + 1 :].float(), (0, 0, 0, step + 1))
            tables = self._rope[0](hidden, positions + step)
            hidden = self.midlayer(tokens, hidden, tables, memory)
            yield self.lm_head(self.norm(hidden))


class DraftLayer(nn.Module):
    """A Llama decoder layer whose attention reads an embedding next to a hidden state."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.input_layernorm = nn.RMSNorm(size, config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(size, config.rms_norm_eps)
        self.mlp = GatedMlp(size, config.intermediate_size)

    def forward(
        self,
        tokens: Tensor,
        hidden: Tensor,
        tables: tuple[Tensor, Tensor],
        memory: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        joined = torch.cat([self.input_layernorm(tokens), self.hidden_norm(hidden)], dim=-1)
        hidden = hidden + self.self_attn(joined, tables, memory)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class DraftAttention(nn.Module):
    """Grouped-query attention of a draft step over the text and over its chain of drafts.

    A row reads keys of rows up to its own in the first step, which are those of the text, and of
    the same row in later steps, which are its own drafts.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, self.head_dim = config.hidden_size, config.head_dim
        query_size = config.num_attention_heads * self.head_dim
        kv_size = config.num_key_value_heads * self.head_dim
        self.num_kv_heads = config.num_key_value_heads
        self.q_proj = nn.Linear(2 * size, query_size, bias=False)
        self.k_proj = nn.Linear(2 * size, kv_size, bias=False)
        self.v_proj = nn.Linear(2 * size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, size, bias=False)

    def forward(
        self, joined: Tensor, tables: tuple[Tensor, Tensor], memory: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        query, key, value = (
            projection(joined).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *tables)
        # [texts, KV heads, query heads of one, positions, head_dim]
        query = query.unflatten(1, (self.num_kv_heads, -1)) * self.head_dim**-0.5
        memory.append((key[:, :, None], value[:, :, None]))
        (keys, values), *chain = memory
        num_positions = joined.shape[1]
        is_later = torch.ones(num_positions, num_positions, dtype=torch.bool).triu(1)
        text = (query @ keys.transpose(3, 4)).float().masked_fill(is_later, -torch.inf)
        own = [(query * each).sum(dim=-1, keepdim=True).float() for each, _ in chain]
        weights = torch.cat([text, *own], dim=-1).softmax(dim=-1).to(values.dtype)
        found = weights[..., :num_positions] @ values
        for place, (_, each) in enumerate(chain, num_positions):
            found = found + weights[..., place, None] * each
        output: Tensor = self.o_proj(found.flatten(1, 2).transpose(1, 2).flatten(2))
        return output


class GatedMlp(nn.Module):
    """Feed-forward network with SiLU."""

    def __init__(self, size: int, inner_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner_size, bias=False)
        self.up_proj = nn.Linear(size, inner_size, bias=False)
        self.down_proj = nn.Linear(inner_size, size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(
            functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden)
        )
        return output


def save_head(head: DraftHead, folder: Path) -> None:
    """Write the folder of a head, without the embeddings, which are the target's."""
    folder.mkdir(parents=True, exist_ok=True)
    head.config.save_pretrained(folder)
    tensors = {
        name: (tensor.bfloat16() if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in head.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def load_head(folder: Path) -> DraftHead:
    config = LlamaConfig.from_dict(json.loads((folder / "config.json").read_text("utf-8")))
    tensors = load_file(folder / "model.safetensors")
    offsets = tensors["d2t"]
    head = DraftHead(config, offsets + torch.arange(len(offsets)))
    head.load_state_dict(tensors)
    return head.eval()
