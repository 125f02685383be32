"""Reachable nodes, their groups, and the models and adapters that they serve. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from baton.core.errors import InvalidRequest
from baton.core.ids import ANY_MODEL, ModelVariant
from baton.core.legs import GENERATING, LegKind
from baton.core.output import RAW_LOGPROBS
from baton.core.request import GENERATE, Task
from baton.core.sampling import NO_SAMPLING_DEFAULTS, SamplingDefaults
from baton.kv_transfer.protocol.messages import Fingerprint
from baton.rpc.errors import NoNodes
from baton.rpc.node_info import NodeCard

KvKind = tuple[Fingerprint, int, str]  # fingerprint, bytes of a block, KV transport
NodeKind = tuple[KvKind, str]  # and the logprobs mode


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Limits and defaults of a model, from the nodes that serve it."""

    sampling_defaults: SamplingDefaults = NO_SAMPLING_DEFAULTS  # of the first node
    max_model_len: int | None = None  # largest context length of decode nodes; None without any
    max_sequence_len: int | None = None  # that fits on every decode node; None without any
    generates: bool = True
    vector_size: int = 0  # of a pooled prompt; 0: the model does not pool
    has_labels: bool = False  # the vector has scores of labels
    pools_tokens: bool = False  # only tokens have vectors
    # Now or before. A decoder that only embeds has prefill nodes alone.
    has_decode_nodes: bool = False
    has_prefill_nodes: bool = False  # now
    follows_predictions: bool = False  # on some decode node
    prompt_embeds_size: int = 0  # of embeddings in place of tokens; 0: no node takes them

    def can(self, task: Task) -> bool:
        """Return whether the model embeds, or generates text."""
        return self.vector_size > 0 if task.is_pooling else self.generates

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks, as vLLM has them."""
        generating = ("generate",) if self.generates and self.has_decode_nodes else ()
        if not self.vector_size:
            return generating
        if self.has_labels:
            return (*generating, "classify")
        embedding = ("token_embed",) if self.pools_tokens else ("embed", "token_embed")
        return (*generating, *embedding)


MAX_LISTED = 20  # names
UNSERVED = ServedModel()
NO_VARIANTS: Mapping[str, ModelVariant] = {}


class ServedModels:
    """Models of all known nodes, and their adapters."""

    def __init__(
        self,
        cards: Sequence[NodeCard] = (),
        with_decode_nodes: Collection[str] = (),
        adapters: Mapping[str, ModelVariant] = NO_VARIANTS,
        expected: Collection[str] = (),
    ) -> None:
        """`with_decode_nodes` names the models that have had decode nodes.

        `expected` names models that may have no nodes at the moment, but will have some.
        """
        self.bases: Mapping[str, ModelVariant] = {
            card.model: ModelVariant(card.model) for card in cards
        }  # by name
        self._missing = [ModelVariant(name) for name in sorted({*expected} - self.bases.keys())]
        self._with_decode_nodes = with_decode_nodes
        # An adapter cannot take the name of a model.
        self.variants: Mapping[str, ModelVariant] = {
            **{name: each for name, each in adapters.items() if each.base in self.bases},
            **self.bases,
        }
        self._served = {
            model.base: _served_model(
                [card for card in cards if model.base in ("", card.model)],
                has_decode_nodes=model.base in with_decode_nodes,
            )
            for model in (ANY_MODEL, *self.bases.values())
        }

    @property
    def names(self) -> list[str]:
        """Names of base models, then those of adapters, each in order."""
        return sorted(self.variants, key=lambda name: (name not in self.bases, name))

    def listed(self) -> str:
        """Return the names for an error message, without most of a large number of adapters."""
        num_shown = max(MAX_LISTED, len(self.bases))
        num_others = len(self.variants) - num_shown
        others = [f"and {num_others} adapters more"] if num_others > 0 else []
        return ", ".join([*self.names[:num_shown], *others])

    def of(self, model: ModelVariant) -> ServedModel:
        """Return the limits and defaults of a model, which its adapters share, or of all models."""
        return self._served.get(model.base, UNSERVED)

    def find(self, name: str, task: Task = GENERATE) -> ModelVariant:
        """Return the model of a name, which need not be served.

        Without a name, return the only base model that can do the task, or ANY_MODEL if none is
        served and no more than one is expected.
        Raises InvalidRequest if there are several, and NoNodes if it depends on nodes that have
        not joined.
        """
        if name:
            return self.variants.get(name) or ModelVariant(name)
        able = self._able(task)
        possible = [model for model in self.bases.values() if self.of(model).can(task)]
        if not able and self._missing:
            return self._only_one_of([*possible, *self._missing], task)
        found = able or possible or list(self.bases.values())
        if len(found) > 1:
            which = "several models" if able or possible else "no model"
            raise InvalidRequest(
                f"{which} can {_verb(task)} here; set model to one of: {_names(found)}", "model"
            )
        return found[0] if found else ANY_MODEL

    def _able(self, task: Task) -> Sequence[ModelVariant]:
        """Return the base models that are known to do a task, though they may have no nodes now."""
        if task.is_pooling:
            return [model for model in self.bases.values() if self.of(model).can(task)]
        models = (*self.bases.values(), *self._missing)
        return [model for model in models if model.name in self._with_decode_nodes]

    def _only_one_of(self, models: Sequence[ModelVariant], task: Task) -> ModelVariant:
        """Return the only model, of those that nodes may turn out to serve. Raises NoNodes."""
        if len(models) > 1:
            raise NoNodes(
                f"too few nodes have joined this router to know which model can {_verb(task)}; "
                f"send the request again, or set model to one of: {_names(models)}"
            )
        return models[0]


def _verb(task: Task) -> str:
    return "embed" if task.is_pooling else "generate text"


def _names(models: Sequence[ModelVariant]) -> str:
    return ", ".join(sorted(model.name for model in models))


def _served_model(cards: Sequence[NodeCard], *, has_decode_nodes: bool) -> ServedModel:
    # A model that only embeds needs no decode nodes.
    limiting = [card for card in cards if LegKind.DECODE in card.legs or not card.generates]
    limiting = limiting or [card for card in cards if card.vector_size]
    return ServedModel(
        cards[0].sampling_defaults if cards else NO_SAMPLING_DEFAULTS,
        max((card.max_model_len for card in limiting), default=None),
        min((card.max_sequence_length for card in limiting), default=None),
        generates=not cards or any(card.generates for card in cards),
        vector_size=max((card.vector_size for card in cards), default=0),
        has_labels=any(card.has_labels for card in cards),
        pools_tokens=any(card.pools_tokens for card in cards),
        has_decode_nodes=has_decode_nodes,
        has_prefill_nodes=any(LegKind.PREFILL in card.legs for card in cards),
        follows_predictions=any(card.follows_predictions for card in limiting),
        prompt_embeds_size=max((card.prompt_embeds_size for card in cards), default=0),
    )


class Revision(NamedTuple):
    """Version of a model. Nodes of the same revision generate the same tokens for a request."""

    fingerprint: str  # of the configuration, the weights and the logits processors
    dtype: str
    logprobs_mode: str = RAW_LOGPROBS

    def __str__(self) -> str:
        mode = "" if self.logprobs_mode == RAW_LOGPROBS else f", {self.logprobs_mode}"
        return f"{self.fingerprint[:12]} ({self.dtype}{mode})"


@dataclass(frozen=True, slots=True)
class Node:
    """A reachable node."""

    address: str
    card: NodeCard
    revision: Revision = field(init=False, compare=False)

    def __post_init__(self) -> None:
        model, layout = self.card.fingerprint.model, self.card.fingerprint.layout
        revision = Revision(model, layout.cache_dtype, self.card.logprobs_mode)
        object.__setattr__(self, "revision", revision)

    @property
    def kv_kind(self) -> KvKind:
        """KV layout and transport. Nodes exchange KV as it is if theirs are equal."""
        return self.card.fingerprint, self.card.block_bytes, self.card.kv_transport

    @property
    def kind(self) -> NodeKind:
        """Return what must be equal on two nodes of a request, unless decode converts the KV."""
        return self.kv_kind, self.card.logprobs_mode

    def offers(self, kind: LegKind) -> bool:
        return kind in self.card.legs

    def takes_kv_of(self, prefill: Node) -> bool:
        """Return whether this node can decode from the KV of `prefill`."""
        return self.kind == prefill.kind or self.converts_kv_of(prefill)

    def converts_kv_of(self, prefill: Node) -> bool:
        """Return whether this node converts the KV of `prefill`, whose blocks differ."""
        ours, theirs = self.card, prefill.card
        has_room = theirs.block_bytes <= ours.kv_staging_bytes
        is_one_path = ours.kv_transport == theirs.kv_transport
        are_alike = is_one_path and ours.logprobs_mode == theirs.logprobs_mode
        return has_room and are_alike and theirs.fingerprint.is_convertible_into(ours.fingerprint)


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Open nodes of one model that fit each other, in a stable order."""

    prefills: tuple[Node, ...]
    decodes: tuple[Node, ...]

    @property
    def model(self) -> str:
        return (self.decodes or self.prefills)[0].card.model


def group_by_kind(nodes: list[Node]) -> tuple[NodeGroup, ...]:
    """Group the nodes that take part in the generation of text."""
    nodes = [node for node in nodes if any(map(node.offers, GENERATING))]
    by_kind = sorted(nodes, key=_kind)  # stable within a kind
    groups = [_group(tuple(members)) for _, members in groupby(by_kind, _kind)]
    return tuple(_with_converted(group, nodes) for group in groups)


def _with_converted(group: NodeGroup, nodes: list[Node]) -> NodeGroup:
    """Add prefill nodes whose KV all decode nodes of the group convert, if it has no others."""
    if group.prefills or not group.decodes:
        return group
    prefills = [
        node for node in nodes if node.offers(LegKind.PREFILL) and node.card.model == group.model
    ]
    fitting = (
        node for node in prefills if all(each.converts_kv_of(node) for each in group.decodes)
    )
    return NodeGroup(tuple(fitting), group.decodes)


def _group(nodes: tuple[Node, ...]) -> NodeGroup:
    return NodeGroup(
        prefills=tuple(node for node in nodes if node.offers(LegKind.PREFILL)),
        decodes=tuple(node for node in nodes if node.offers(LegKind.DECODE)),
    )


def _kind(node: Node) -> tuple[str, str]:
    return node.card.model, repr(node.kind)
