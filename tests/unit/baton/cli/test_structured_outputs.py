"""Options of structured outputs on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.cli.options.sampling import sampling
from baton.client.generation import Generation
from baton.client.messages import request_from
from baton.core.errors import InvalidRequest
from baton.core.structured_outputs import StructuredOutputs
from baton.rpc.messages.conversion import sampling_from


def written(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "file"
    path.write_bytes(content)
    return path


def form_of(**given: Any) -> StructuredOutputs | None:
    """Return the constraint as the router parses it."""
    chosen = sampling(**given)
    return sampling_from(request_from("a", Generation(chosen)).sampling).structured_outputs


def test_commands_without_constraint_options_have_no_structured_output() -> None:
    assert "structured_outputs" not in sampling()
    assert form_of() is None


def test_schemas_and_grammars_are_read_from_files(tmp_path: Path) -> None:
    path = written(tmp_path, '{"const": "é"}'.encode())

    assert form_of(json_schema=path) == StructuredOutputs(json='{"const": "é"}')
    assert form_of(grammar=path) == StructuredOutputs(grammar='{"const": "é"}')


def test_other_constraints_are_given_inline() -> None:
    assert form_of(json_object=True) == StructuredOutputs(json_object=True)
    assert form_of(regex="a+") == StructuredOutputs(regex="a+")
    assert form_of(choices=["a", "b"]) == StructuredOutputs(choice=("a", "b"))


def test_a_binary_schema_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="file is not valid UTF-8"):
        sampling(json_schema=written(tmp_path, b"\xff"))


@pytest.mark.parametrize("text", [b"", b"{", b"[" * 100_000])
def test_a_schema_file_that_is_not_json_is_refused_by_name(text: bytes, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="file is not JSON: "):
        sampling(json_schema=written(tmp_path, text))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"regex": "a", "json_object": True}, "json_object and regex"),
        ({"regex": "a", "ignore_eos": True}, "exclude each other"),
    ],
)
def test_mutually_exclusive_options_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        sampling(**given)
