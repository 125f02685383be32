"""Imports without garbage collection."""

from __future__ import annotations

import gc

import pytest

from baton.imports import uncollected


def test_collections_go_on_after_the_block_and_after_its_failure() -> None:
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()

    with pytest.raises(ImportError), uncollected():
        raise ImportError
    assert gc.isenabled()
    gc.unfreeze()
