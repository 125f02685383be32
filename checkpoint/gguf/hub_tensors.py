"""GGUF tensors under their names of the Hugging Face hub, as the loader looks them up. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate

from baton.checkpoint.gguf.gguf_file import GgufFile
from baton.checkpoint.gguf.header import TensorEntry
from baton.core.errors import ModelError

IN_LAYER = re.compile(r"blk\.(\d{1,9})\.(.+)")
# Read as a part of the configuration, or only used by llama.cpp.
IGNORED = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
MAX_PARTS = 1 << 14  # experts or heads of a layer

Shape = tuple[int, ...]
Order = Callable[[int], list[int]]  # of so many rows or columns
Rows = Mapping[str, int]  # number of rows of each tensor, by its name


def flat(shape: Shape) -> Shape:
    return (math.prod(shape),)


def as_row(shape: Shape) -> Shape:
    """Return the shape of a matrix of one row, which the hub has for a list of numbers."""
    return 1, shape[-1]


def with_channel(shape: Shape) -> Shape:
    """Return the shape of a convolution in which each row has a channel of its own."""
    return math.prod(shape[:-1]), 1, shape[-1]


def as_third_of_four(shape: Shape) -> Shape:
    """Return the shape (1, 1, n, 1), which the hub has for a list of n numbers."""
    return 1, 1, math.prod(shape), 1


@dataclass(frozen=True, slots=True)
class Change:
    """Difference between llama.cpp's form of a tensor and that of the hub."""

    rows: Order | None = None  # for each row of the hub, the one of llama.cpp
    columns: Order | None = None
    shape: Callable[[Shape], Shape] | None = None  # that of the hub, from that of llama.cpp
    offset: float = 0.0  # added by llama.cpp
    is_rate: bool = False  # llama.cpp has -exp() of the hub's numbers
    is_by_head: bool = False  # the hub has the rows of all tensors of a head one after another
    is_transposed: bool = False  # by head
    swaps_dimensions: bool = False  # the first two, of three

    @property
    def is_of_numbers(self) -> bool:
        """Return whether rows of quantized numbers cannot be taken as they are."""
        return self.shape is not None or self.is_rate or bool(self.offset)


UNCHANGED = Change()
# Names without `.weight` and `.bias`, or whole; those of a layer are relative to it.
GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.embedding_norm",  # of the last layer's output, in LFM2
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
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
# Of layers that predict several tokens at once, besides the names of all layers.
PREDICTOR_NAMES = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
}


@dataclass(frozen=True, slots=True)
class NameRules:
    """Names and forms of an architecture's tensors, where they differ from those of the hub."""

    layer_names: Mapping[str, str] = field(default_factory=lambda: LAYER_NAMES)
    global_names: Mapping[str, str] = field(default_factory=lambda: GLOBAL_NAMES)
    changes: Mapping[str, Change] = field(default_factory=dict)  # by the same names
    joined: Mapping[str, Rows] = field(default_factory=dict)  # tensors that hold several of them
    norm_offset: float = 0.0  # that llama.cpp has added to the weights of norms
    predictors: range = range(0)  # layers that predict several tokens at once

    def change_of(self, stem: str, kind: str) -> Change:
        for name in (f"{stem}.{kind}", stem):
            if name in self.changes:
                return self.changes[name]
        is_norm = stem.endswith("norm") and kind == "weight"
        return Change(offset=self.norm_offset) if is_norm else UNCHANGED


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of a file, or one part of it: that of an expert or of a head, or a range of rows."""

    entry: TensorEntry
    part: int | None = None
    is_transposed: bool = False
    rows: range | None = None

    @property
    def shape(self) -> Shape:
        shape = self.entry.shape if self.part is None else self.entry.shape[1:]
        if self.rows is not None:
            shape = (len(self.rows), *shape[1:])
        return shape[::-1] if self.is_transposed else shape


@dataclass(frozen=True, slots=True)
class HubTensor:
    """A tensor under its name of the hub: rows of one source after those of the other."""

    sources: tuple[Source, ...]
    change: Change = UNCHANGED

    @property
    def stored_shape(self) -> Shape:
        """Shape of all sources: their rows are joined, the last but one dimension of a matrix."""
        shapes = [source.shape for source in self.sources]
        if len(shapes[0]) == 1:
            return (sum(shape[0] for shape in shapes),)
        return *shapes[0][:-2], sum(shape[-2] for shape in shapes), shapes[0][-1]

    @property
    def shape(self) -> Shape:
        stored = self.stored_shape
        return stored if self.change.shape is None else self.change.shape(stored)

    def element(self, index: int) -> HubTensor:
        """Return one element of the first dimension, if the sources are stacks of experts."""
        return replace(self, sources=tuple(Source(each.entry, index) for each in self.sources))

    def row_order(self) -> list[int] | None:
        rows, shape = self.change.rows, self.stored_shape
        return None if rows is None else rows(shape[0])

    def column_order(self) -> list[int] | None:
        columns, shape = self.change.columns, self.stored_shape
        return None if columns is None else columns(shape[-1])


def halves_from_pairs(num_heads: int) -> Order:
    """Heads whose rows llama.cpp stores in pairs, where the hub has two halves."""

    def order(num_rows: int) -> list[int]:
        size = num_rows // num_heads
        heads = range(0, num_rows, size)
        return [head + at for head in heads for half in (0, 1) for at in range(half, size, 2)]

    return order


def groups_from_parts(num_groups: int, *sizes: int) -> Order:
    """Groups of parts, of which llama.cpp stores all first ones, then all second ones, and so on.

    The sizes are those of the parts of all groups.
    """

    def order(_: int) -> list[int]:
        firsts = [sum(sizes[:index]) for index in range(len(sizes))]
        return [
            first + row
            for group in range(num_groups)
            for first, size in zip(firsts, sizes, strict=True)
            for row in range(group * size // num_groups, (group + 1) * size // num_groups)
        ]

    return order


def groups_from_rounds(num_groups: int, num_heads: int, first: int = 0) -> Order:
    """Heads of all groups, of which llama.cpp stores one of each group, then the next ones.

    The rows before `first` are those of others.
    """

    def order(num_rows: int) -> list[int]:
        size, rounds = (num_rows - first) // num_heads, num_heads // num_groups
        starts = (
            first + (each * num_groups + group) * size
            for group in range(num_groups)
            for each in range(rounds)
        )
        return [*range(first), *(start + row for start in starts for row in range(size))]

    return order


def hub_tensors(file: GgufFile, rules: NameRules) -> dict[str, HubTensor]:
    """Return the model's tensors by their names of the hub. Raises ModelError for unknown ones."""
    places = {name: place for place, name in enumerate(rules.layer_names)}
    found: dict[str, list[tuple[int, int, HubTensor]]] = {}
    for entry in file.tensors.values():
        layer, stem, kind = _split_name(entry.name)
        names = {stem, f"{stem}.{kind}"}
        is_known = not names.isdisjoint(rules.layer_names) or stem in rules.joined
        if entry.name in IGNORED or (layer in rules.predictors and not is_known):
            continue
        for each, rows in _separated(file, entry, rules.joined.get(stem, {}), stem):
            hub_name = _hub_name(file, entry, rules, (layer, each, kind))
            change = rules.change_of(each, kind)
            place = places.get(each, places.get(f"{each}.{kind}", 0))
            for name, source in _parts(file, entry, hub_name, change, rows):
                part = source.part or 0
                found.setdefault(name, []).append((part, place, HubTensor((source,), change)))
    return {
        name: join_rows(file, [tensor for _, _, tensor in sorted(each, key=lambda part: part[:2])])
        for name, each in found.items()
    }


def _split_name(name: str) -> tuple[int | None, str, str]:
    """Return a tensor's layer, its name within it, and whether it is a weight or a bias."""
    match = IN_LAYER.fullmatch(name)
    layer, name = (None, name) if match is None else (int(match[1]), match[2])
    stem, _, kind = name.rpartition(".")
    return (layer, stem, kind) if stem else (layer, name, "")


def _separated(
    file: GgufFile, entry: TensorEntry, parts: Rows, stem: str
) -> list[tuple[str, range | None]]:
    """Return the tensors that this one joins, each with its rows; or this one, with all."""
    if not parts:
        return [(stem, None)]
    sizes = list(parts.values())
    if min(sizes) < 1 or sum(sizes) != entry.shape[0]:
        raise ModelError(
            f"{file.path_of[entry.name]}: {entry.name!r} has {entry.shape[0]} rows; the metadata "
            f"requires {' + '.join(map(str, sizes))}"
        )
    ends = accumulate(sizes)
    return [
        (name, range(end - size, end))
        for (name, size), end in zip(parts.items(), ends, strict=True)
    ]


def _hub_name(
    file: GgufFile, entry: TensorEntry, rules: NameRules, place: tuple[int | None, str, str]
) -> str:
    layer, stem, kind = place
    names = rules.global_names if layer is None else rules.layer_names
    prefix = "" if layer is None else f"model.layers.{layer}."
    whole = f"{stem}.{kind}" if kind else stem
    if whole in names:
        return prefix + names[whole]
    if stem in names and kind in ("weight", "bias"):
        return f"{prefix}{names[stem]}.{kind}"
    raise ModelError(
        f"{file.path_of[entry.name]} has the tensor {entry.name!r}, which Baton does not know "
        f"in the architecture {file.architecture!r}"
    )


def _parts(
    file: GgufFile, entry: TensorEntry, hub_name: str, change: Change, rows: range | None
) -> Iterator[tuple[str, Source]]:
    """Yield a tensor, or its parts: those of experts under names of their own."""
    has_parts = "{expert}" in hub_name or change.is_by_head
    if not has_parts:
        yield hub_name, Source(entry, rows=rows)
        return
    if len(entry.shape) < 2 or entry.shape[0] > MAX_PARTS:
        raise ModelError(
            f"{file.path_of[entry.name]}: {entry.name!r} has the shape {entry.shape}; it must have "
            f"a first dimension of experts or heads, at most {MAX_PARTS}"
        )
    for part in range(entry.shape[0]):
        yield hub_name.format(expert=part), Source(entry, part, change.is_transposed)


def join_rows(file: GgufFile, parts: list[HubTensor]) -> HubTensor:
    """Join the rows of tensors, which may differ only in their number of rows."""
    first, sources = parts[0].sources[0], [source for part in parts for source in part.sources]
    for source in sources:
        if _without_rows(source.shape) != _without_rows(first.shape):
            raise ModelError(
                f"{file.path_of[source.entry.name]}: {source.entry.name!r} has the shape "
                f"{source.entry.shape}, which does not fit {first.entry.name!r}: "
                f"{first.entry.shape}"
            )
    return replace(parts[0], sources=tuple(sources))


def _without_rows(shape: Shape) -> Shape:
    return (*shape[:-2], 0, *shape[-1:]) if len(shape) > 1 else ()
