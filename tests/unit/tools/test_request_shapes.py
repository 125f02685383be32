"""Shapes of requests and outputs, counted on made-up modules and messages."""

from __future__ import annotations

import re
from pathlib import Path

from tools.product_code import parse_module
from tools.request_shapes import (
    NOT_SHAPES,
    PACKAGES,
    Shape,
    Shapes,
    class_shapes,
    message_shapes,
    read_protos,
)

SOURCE = """
class EngineRequest:
    prompt_token_ids: tuple[int, ...]

class Request:
    def __init__(self, spec: EngineRequest) -> None:
        self._spec = spec

class Row(NamedTuple):
    sampling: params.SamplingParams | None

class View(Protocol):
    @property
    def sampling(self) -> SamplingParams: ...

class Plan:
    rows: tuple[Row, ...]

class Result:
    token_ids: list[int]

class StepResult:
    run: Result | None

class Config:
    size: int
"""


def names_of(shapes: list[Shape]) -> list[str]:
    return [shape.name for shape in shapes]


def test_classes_that_carry_or_wrap_a_request_or_an_output_are_counted() -> None:
    requests, outputs = class_shapes([parse_module(Path("engine/values.py"), SOURCE)])

    assert names_of(requests.carriers) == ["EngineRequest", "Row", "View"]
    assert [str(shape) for shape in requests.wrappers] == [
        "engine/values.py:5 Request (wraps EngineRequest)"
    ]
    assert names_of(outputs.carriers) == ["Result"]
    assert names_of(outputs.wrappers) == ["StepResult"]


def test_parts_of_an_output_and_machines_that_make_one_are_not_counted() -> None:
    source = """
class TokenLogprobs:
    token_id: int

class Peaks(NamedTuple):
    token_ids: Tensor

class AnswerAssembler:
    @property
    def token_ids(self) -> tuple[int, ...]: ...
"""

    shapes = class_shapes([parse_module(Path("router/answer.py"), source)])

    assert shapes == (Shapes([], []), Shapes([], []))


def test_each_class_that_is_not_counted_exists() -> None:
    root = Path(__file__).parents[3]
    sources = [path for package in PACKAGES for path in (root / package).rglob("*.py")]
    texts = [path.read_text(encoding="utf-8") for path in sources] + list(
        read_protos(root).values()
    )
    defined = {name for text in texts for name in re.findall(r"(?:class|message) (\w+)", text)}

    assert defined >= {name for names in NOT_SHAPES.values() for name in names}


def test_classes_of_the_client_library_are_not_counted() -> None:
    requests, outputs = class_shapes([parse_module(Path("baton/client.py"), SOURCE)])

    assert (requests, outputs) == (Shapes([], []), Shapes([], []))


def test_messages_are_counted_by_their_fields() -> None:
    text = """
// A call. message Comment {
message Call {
  // The prompt.
  repeated uint32 prompt_token_ids = 1;
  SamplingParams sampling = 2;
}

message Order {
  Call call = 1;
}

message Answer {
  repeated uint32 token_ids = 2;
}

message Empty {}
"""

    requests, outputs = message_shapes({"node.proto": text})

    assert [str(shape) for shape in requests.carriers] == ["node.proto:3 Call"]
    assert names_of(requests.wrappers) == ["Order"]
    assert names_of(outputs.carriers) == ["Answer"]
