"""Errors of the client library: importable from `baton`, and none of them the engine's."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import baton
from baton.client.generation import new_answers
from baton.engine.errors import EngineError


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: baton.Client("http://127.0.0.1:1"), baton.InvalidConfig),
        (lambda: baton.Client("127.0.0.1:1", token="two words"), baton.InvalidConfig),
        (lambda: baton.TlsConfig(server_name="x"), baton.InvalidConfig),
        (lambda: baton.Retries(max_attempts=0), baton.InvalidConfig),
        (lambda: new_answers(baton.Generation(n=0)), baton.InvalidRequest),
        (lambda: baton.SamplingParams(top_p=2.0), baton.InvalidRequest),
    ],
)
def test_invalid_arguments_raise_exported_errors(
    call: Callable[[], object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        call()

    assert not issubclass(error, EngineError)
