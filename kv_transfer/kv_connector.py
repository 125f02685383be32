"""Public interface of KV connectors: KV caches outside the engine, from any package.

A package registers a factory under the entry point group `baton.kv_connectors`; a node loads it by
name (`--kv-connector`). The tiers in host memory and files are the built-in one. A complete example
is in docs/kv-connectors.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from baton.kv_transfer.external_kv import ExternalKv


@dataclass(frozen=True, slots=True)
class KvConnectorContext:
    """KV memory of a node, and how to work with it."""

    address: int  # of block 0; the others follow it without gaps
    num_blocks: int
    block_bytes: int
    device: str  # "cpu", or that of the memory at `address`
    # Equal on all nodes whose blocks of one name have the same bytes. Keep others apart.
    fingerprint: str
    wake: Callable[[], None]  # lets the engine poll soon; from any thread
    config: Mapping[str, object]  # the object in --kv-connector-config


class KvConnector(ExternalKv, AbstractContextManager["KvConnector", None], Protocol):
    """A KV cache outside the engine that a node uses within a `with` block.

    The block begins before the first order and ends after the last poll. A connector ends its
    threads then, so that nothing accesses the KV memory any more.
    """


# Raises errors.InvalidConfig if the connector cannot work, such as for unknown keys in `config`.
KvConnectorFactory = Callable[[KvConnectorContext], KvConnector]
