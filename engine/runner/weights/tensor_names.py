"""Names of a model's tensors in a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property

from baton.checkpoint.checkpoint import Shape
from baton.engine.runner.families.family import NEXT_BLOCK, ExpertNames, TensorNames
from baton.engine.runner.families.table import FAMILIES
from baton.engine.runner.model.config import ModelConfig, MoeConfig, RowScale
from baton.engine.runner.weights.loader import expert_stacks, shape_of
from baton.engine.runner.weights.packed import ATTENTION_SCALES, UNUSED


class TensorMap:
    """Names of a model's tensors, as a folder spells them that has the tensors `found`."""

    def __init__(
        self,
        config: ModelConfig,
        found: Mapping[str, Shape] | None = None,
        layer_prefixes: Mapping[int, str] = {},
    ) -> None:
        """`layer_prefixes` are those of layers that have their own."""
        self.config = config
        self._layer_prefixes = layer_prefixes
        self._found = found = found or {}
        self.names: TensorNames = _choose_experts(config, found)
        names = zip(self.names.models, self.names.heads, strict=True)
        prefixes = [(f"{model}.", head) for model, head in names]
        prefixes.append(("", "lm_head"))  # saved without the class that has the head
        name = f"{self.names.embedding}.weight"
        present = [pair for pair in prefixes if f"{pair[0]}{name}" in found]
        self.prefix, self.head = (present or prefixes)[0]

    def of_shard(self, config: ModelConfig) -> TensorMap:
        """Return the tensors of a part of the model, which have the same names."""
        shard = copy(self)
        shard.config = config
        return shard

    @property
    def embedding(self) -> str:
        return f"{self.prefix}{self.names.embedding}"

    def in_layer(self, index: int, name: str) -> str:
        own = self._layer_prefixes.get(index)
        if own:
            return f"{own}{name}"
        block = self.config.layers[index].block
        if block is None:
            layer, stem = f"{self.prefix}layers.{index}.", name.removesuffix(".weight")
            other = self.names.spellings.get(stem, stem)
            chosen = other if f"{layer}{other}.weight" in self._found else stem
            return f"{layer}{chosen}{name.removeprefix(stem)}"
        relative = name.removeprefix(NEXT_BLOCK)
        return f"{self.prefix}layers.{block + (relative != name)}.{relative}"

    def qkv(self, index: int) -> Sequence[str]:
        """Return the names of the projections of queries, keys and values that a layer has."""
        layer, names = self.config.layers[index], self.names.qkv
        if layer.kv_layer is not None:
            return names[:1]
        return names if layer.has_value_projection else names[:2]

    def row_scales(self) -> Mapping[str, Sequence[RowScale]]:
        """Return the scales of the rows of matrices that have any, by the names of these."""
        scales = self.config.row_scales
        scaled = {each.matrix for each in scales if each.scale != 1.0}
        return {
            self.in_layer(index, name): [each for each in scales if each.matrix == name]
            for index in range(self.config.num_layers)
            for name in scaled
        }

    def is_ignored(self, name: str) -> bool:
        """Return whether text needs no such tensor: tied heads, rotary buffers, images, MTP."""
        if name == f"{self.head}.weight" or name.endswith("rotary_emb.inv_freq"):
            return True
        if name.endswith(ATTENTION_SCALES):
            return True
        if self.config.quantization is not None and name.endswith(UNUSED):
            return True
        # Layers after the last one predict several tokens at once.
        block = self.config.layers[-1].block
        after_last = self.config.num_layers if block is None else block + 2
        predictor = f"{self.prefix}layers.{after_last}."
        return name.startswith((predictor, *self._unread, *self.names.ignored))

    @cached_property
    def _unread(self) -> tuple[str, ...]:
        """Tensors of keys and values that layers do not compute, although a folder has them."""
        config, names = self.config, self.names
        return tuple(
            f"{self.in_layer(index, name)}."
            for index, layer in enumerate(config.layers)
            if layer.kv_layer is not None
            for name in (*names.qkv[1:], names.k_norm)
        )


def _choose_experts(config: ModelConfig, found: Mapping[str, Shape]) -> TensorNames:
    """Return the family's names, with the form in which the folder stores its experts."""
    names = FAMILIES[config.architecture].names
    if config.moe is None or names.experts is None:
        return names
    for form in (names.experts, *names.experts.others):
        if _is_found(form, config.moe, config.hidden_size, found):
            return replace(names, experts=form)
    return names


def _is_found(
    form: ExpertNames, moe: MoeConfig, hidden_size: int, found: Mapping[str, Shape]
) -> bool:
    """Return whether the tensors of a folder include experts of this form."""
    if "{expert}" in form.down:  # each can consist of the parts of a quantized matrix
        part = form.down.format(expert=0)
        return any(f".{part}." in name for name in found)
    return all(
        any(name.endswith(f".{tensor}") and found[name] == shape_of(axes) for name in found)
        for stack in expert_stacks(moe, form, hidden_size, expert=0)
        for tensor, axes in stack.stored()
    )
