"""EAGLE-3 drafts computed in the plainest way: float32, one text, the whole text for each draft.

It shares no code with the product or with `tools/draft_head.py`, has no KV cache, and reads the
configs of the trainers that people use. `Eagle3Reference.read(folder, embeddings)` loads a head,
and `draft(taps, token_ids, k)` returns what a server has to draft.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
)
Choose = Callable[[Tensor, int], int]  # (logits of the target's vocabulary, position) -> token


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """The parts of a config that drafts depend on."""

    llama: LlamaConfig  # the layer's shape
    draft_vocab_size: int
    target_hidden_size: int
    tap_ids: tuple[int, ...] | None  # target layers whose input is read; None: 2, n / 2, n - 3
    num_taps: int
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> Eagle3Config:
        """Read a config whose fields are at the top, in `eagle_config`, or in speculators' form."""
        if not set(config["architectures"]) & set(ARCHITECTURES):
            raise ValueError(f"not an EAGLE-3 head: architectures = {config['architectures']}")
        layer = dict(config.get("transformer_layer_config") or config)
        layer["model_type"] = "llama"
        fields = {**layer, **config, **(config.get("eagle_config") or {})}
        tap_ids = fields.get("eagle_aux_hidden_state_layer_ids") or None
        is_speculators = "speculators_model_type" in config
        return cls(
            llama=LlamaConfig.from_dict(layer),
            draft_vocab_size=fields.get("draft_vocab_size") or layer["vocab_size"],
            target_hidden_size=fields.get("target_hidden_size") or layer["hidden_size"],
            tap_ids=None if tap_ids is None else tuple(tap_ids),
            num_taps=fields.get("num_aux_hidden_states") or (len(tap_ids) if tap_ids else 3),
            norm_before_residual=fields.get("norm_before_residual", is_speculators),
            norm_before_fc=fields.get("norm_before_fc", False),
            fc_norm=fields.get("fc_norm", False),
            norm_output=fields.get("norm_output", False),
        )


class Eagle3Reference:
    """A draft head, with the target's embeddings if it has none of its own."""

    def __init__(
        self, config: Eagle3Config, tensors: Mapping[str, Tensor], embeddings: Tensor
    ) -> None:
        self.config = config
        self._tensors = {_plain_name(name): each for name, each in tensors.items()}
        self._embeddings = self._tensors.get("embed_tokens.weight", embeddings).float()
        self._rope = LlamaRotaryEmbedding(config.llama)

    @classmethod
    def read(cls, folder: Path, embeddings: Tensor) -> Eagle3Reference:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        return cls(Eagle3Config.parse(config), load_file(folder / "model.safetensors"), embeddings)

    def tap_ids(self, num_target_layers: int) -> tuple[int, ...]:
        """Return the target layers whose input `draft` wants: residual added, before their norm."""
        n = num_target_layers
        return self.config.tap_ids or (2, n // 2, n - 3)

    @torch.no_grad()
    def draft(
        self,
        taps: Sequence[Tensor],
        token_ids: Sequence[int],
        k: int,
        choose: Choose = lambda logits, position: int(logits.argmax()),
    ) -> list[int]:
        """Return `k` drafts that follow a text.

        `taps` are the target's hidden states of all tokens but the last, [tokens - 1, target size]
        each; the last token is the one that the target has just sampled. `choose` gets the index
        in the text of the token that it chooses.
        """
        tokens = [*token_ids]
        hidden = self._join(taps)
        if len(hidden) != len(tokens) - 1:
            raise ValueError(
                f"{len(hidden)} hidden states for {len(tokens)} tokens: give those of all tokens "
                "but the last"
            )
        for _ in range(k):
            output = self._layer(self._embeddings[tokens[1:]], hidden)
            normed = self._norm("norm", output)
            logits = self._to_target(functional.linear(normed[-1], self._weight("lm_head.weight")))
            tokens.append(choose(logits, len(tokens)))
            last = normed[-1:] if self.config.norm_output else output[-1:]
            hidden = torch.cat([hidden, last])
        return tokens[len(token_ids) :]

    def _join(self, taps: Sequence[Tensor]) -> Tensor:
        """Return the hidden states that the layer reads, [tokens, size]."""
        config = self.config
        if len(taps) != config.num_taps:
            raise ValueError(
                f"{len(taps)} hidden states per token: the head reads {config.num_taps}"
            )
        states = [tap.float() for tap in taps]
        if config.fc_norm:
            states = [self._norm(f"fc_norm.{place}", each) for place, each in enumerate(states)]
        joined = torch.cat(states, dim=-1)
        if config.norm_before_fc:
            joined = self._norm("input_norm", joined)
        return self._linear("fc", joined)

    def _layer(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        normed = self._norm("midlayer.hidden_norm", hidden)
        residual = normed if self.config.norm_before_residual else hidden
        tokens = self._norm("midlayer.input_layernorm", embeddings)
        residual = residual + self._attend(torch.cat([tokens, normed], dim=-1))
        normed = self._norm("midlayer.post_attention_layernorm", residual)
        gate = functional.silu(self._linear("midlayer.mlp.gate_proj", normed))
        inner = gate * self._linear("midlayer.mlp.up_proj", normed)
        return residual + self._linear("midlayer.mlp.down_proj", inner)

    def _attend(self, rows: Tensor) -> Tensor:
        """Return causal attention of each row, by one loop over query heads."""
        llama = self.config.llama
        cosines, sines = (table[0] for table in self._rope(rows, torch.arange(len(rows))[None]))
        queries, keys, values = (
            self._linear(f"midlayer.self_attn.{name}_proj", rows).split(llama.head_dim, dim=-1)
            for name in "qkv"
        )
        is_later = torch.ones(len(rows), len(rows), dtype=torch.bool).triu(1)
        found = []
        for head, query in enumerate(queries):
            group = head * len(keys) // len(queries)
            rotated = [each * cosines + _turn(each) * sines for each in (query, keys[group])]
            scores = rotated[0] @ rotated[1].T / llama.head_dim**0.5
            found.append(scores.masked_fill(is_later, -torch.inf).softmax(dim=-1) @ values[group])
        return self._linear("midlayer.self_attn.o_proj", torch.cat(found, dim=-1))

    def _to_target(self, logits: Tensor) -> Tensor:
        """Return logits by the target's token ids, without probability for tokens not drafted."""
        offsets = self._tensors.get("d2t")
        if offsets is None:
            return logits
        every = torch.full((self.config.llama.vocab_size,), -torch.inf)
        every[torch.arange(len(logits)) + offsets] = logits
        return every

    def _norm(self, name: str, states: Tensor) -> Tensor:
        scale = (states.pow(2).mean(dim=-1, keepdim=True) + self.config.llama.rms_norm_eps).rsqrt()
        normed: Tensor = states * scale * self._weight(f"{name}.weight")
        return normed

    def _linear(self, name: str, states: Tensor) -> Tensor:
        bias = self._tensors.get(f"{name}.bias")
        return functional.linear(
            states, self._weight(f"{name}.weight"), None if bias is None else bias.float()
        )

    def _weight(self, name: str) -> Tensor:
        return self._tensors[name].float()


def _plain_name(name: str) -> str:
    return name.removeprefix("model.").replace("layers.0.", "midlayer.")


def _turn(states: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
