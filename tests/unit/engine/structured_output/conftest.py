"""Fixtures of tests of strict calls."""

from __future__ import annotations

import pytest

from baton.checkpoint.tokenizer import Tokenizer
from baton.engine.structured_output.llguidance_backend import GrammarLibrary
from tests.support.strict_tools import load, mark_tokens


@pytest.fixture(scope="session")
def marks_are_text(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, GrammarLibrary]:
    return load(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def marks_are_tokens(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, GrammarLibrary]:
    return load(tmp_path_factory.mktemp("tokens"), *mark_tokens())
