"""GGUF tensors under their names of the Hugging Face hub, as the loader looks them up. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from baton.checkpoint.gguf.gguf_file import GgufFile
from baton.checkpoint.gguf.header import TensorEntry
from baton.core.errors import ModelError

IN_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
# Read as a part of the configuration, or only used by llama.cpp.
IGNORED = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
# Names without `.weight` and `.bias`; those of a layer are relative to it.
GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
SANDWICH_NAMES = {
    **LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True)
class NameRules:
    """How an architecture's tensors differ from those of the hub."""

    layer_names: Mapping[str, str] = field(default_factory=lambda: LAYER_NAMES)
    # Rows of a head that llama.cpp stores in pairs, where the hub has two halves: (stem, count).
    paired_heads: Mapping[str, int] = field(default_factory=dict)
    norm_offset: float = 0.0  # that llama.cpp has added to the weights of norms


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of a file, or one expert's part of it."""

    entry: TensorEntry
    expert: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape if self.expert is None else self.entry.shape[1:]


@dataclass(frozen=True, slots=True)
class HubTensor:
    """A tensor under its name of the hub: rows of one source after those of the other."""

    sources: tuple[Source, ...]
    num_paired_heads: int = 0  # 0: the rows are in order
    offset: float = 0.0  # to subtract
    is_row: bool = False  # a list of numbers that the hub has as a matrix of one row

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of all sources: their rows are joined, the last but one dimension of a matrix."""
        shapes = [source.shape for source in self.sources]
        if self.is_row:
            return 1, *shapes[0]
        *outer, columns = shapes[0]
        if not outer:
            return (sum(shape[0] for shape in shapes),)
        return *outer[:-1], sum(shape[-2] for shape in shapes), columns

    def element(self, index: int) -> HubTensor:
        """Return one element of the first dimension, if the sources are stacks of experts."""
        return replace(self, sources=tuple(Source(each.entry, index) for each in self.sources))

    def row_order(self) -> list[int] | None:
        """Return the order in which rows of pairs become those of two halves, by head."""
        if not self.num_paired_heads:
            return None
        num_rows = self.shape[0]
        size = num_rows // self.num_paired_heads
        heads = range(0, num_rows, size)
        return [head + at for head in heads for half in (0, 1) for at in range(half, size, 2)]


def hub_tensors(file: GgufFile, rules: NameRules) -> dict[str, HubTensor]:
    """Return the model's tensors by their names of the hub. Raises ModelError for unknown ones."""
    found: dict[str, HubTensor] = {}
    for name, entry in file.tensors.items():
        if name in IGNORED:
            continue
        for hub_name, tensor in _translate(file, entry, rules):
            before = found[hub_name].sources if hub_name in found else ()
            found[hub_name] = replace(tensor, sources=(*before, *tensor.sources))
    return found


def _translate(
    file: GgufFile, entry: TensorEntry, rules: NameRules
) -> Iterator[tuple[str, HubTensor]]:
    stem, _, kind = entry.name.rpartition(".")
    match = IN_LAYER.fullmatch(stem)
    names: Mapping[str, str] = GLOBAL_NAMES
    prefix = ""
    if match is not None:
        names, prefix, stem = rules.layer_names, f"model.layers.{match[1]}.", match[2]
    if stem not in names or kind not in ("weight", "bias"):
        raise ModelError(
            f"{file.path_of[entry.name]} has the tensor {entry.name!r}, which Baton does not know "
            f"in the architecture {file.architecture!r}"
        )
    hub_name = f"{prefix}{names[stem]}.{kind}".replace("sinks.weight", "sinks")
    is_norm = stem.endswith("norm") and kind == "weight"
    tensor = HubTensor(
        (Source(entry),),
        rules.paired_heads.get(stem, 0),
        rules.norm_offset if is_norm else 0.0,
        is_row=stem == "ffn_gate_inp_shexp",
    )
    if "{expert}" not in hub_name:
        yield hub_name, tensor
        return
    for expert in range(entry.shape[0]):
        yield hub_name.format(expert=expert), replace(tensor, sources=(Source(entry, expert),))
