"""Imports of a node, also those that it makes late: a fork that has them starts at once."""

from __future__ import annotations

import decode_node.__main__ as decode_node
import prefill_node.__main__ as prefill_node
from kv_transfer.transports.nixl import import_nixl

__all__ = ["decode_node", "prefill_node"]

import_nixl()
