"""Pydantic models of request bodies. Unknown fields and wrong types are refused. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from baton.core.errors import InvalidRequest
from baton.router.input_processing.limits import check_count

MAX_INT32 = (1 << 31) - 1  # integers of the node protocol have 32 bits
Count = Annotated[int, Field(ge=0, le=MAX_INT32)]
Texts = Annotated[list[str], Field(max_length=1 << 10, fail_fast=True)]
MAX_FIELDS = 1 << 14  # of the body, and of each object directly in it


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


B = TypeVar("B", bound=Body)


def body_from(fields: Mapping[str, Any], kind: type[B]) -> B:
    """Raises InvalidRequest, which names the field."""
    check_field_counts(fields)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _invalid_request(error) from error


def check_field_counts(fields: Mapping[str, Any]) -> None:
    """Raises InvalidRequest."""
    check_count("body", len(fields), MAX_FIELDS)
    for name, value in fields.items():
        if isinstance(value, dict):
            check_count(name, len(value), MAX_FIELDS)


def _invalid_request(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return InvalidRequest(f"{field} is not a known field: leave it out", field)
    if first["type"] == "missing":
        return InvalidRequest(f"{field} is missing", field)
    return InvalidRequest(f"{field}: {first['msg']}", field)
