"""Imports of the processes of `multiprocessing`, including the main module of the tests."""

from __future__ import annotations

import gc

import pytest

from tests.support import kv_nodes, preloaded_nodes, transport_endpoints

__all__ = ["kv_nodes", "preloaded_nodes", "pytest", "transport_endpoints"]

gc.freeze()  # a collection would copy each page that a process shares with the server
