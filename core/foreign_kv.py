"""KV of a prompt that a vLLM server has computed and holds: vLLM's `kv_transfer_params`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from baton.core.errors import InvalidRequest

FIELD = "kv_transfer_params"
EXPIRY = "remote_blocks_expiry_time"
AGE = "age_s"  # not of vLLM: seconds since its answer, from proxies that may have been slow
MAX_PARAMS = 64
MAX_JSON_CHARACTERS = 1 << 20
MAX_NAME_CHARACTERS = 256
MAX_BLOCKS = 1 << 16
MAX_INT32 = (1 << 31) - 1
MAX_PORT = (1 << 16) - 1

Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True)
class ForeignKv:
    """Blocks on a vLLM server. Validated on construction; raises InvalidRequest."""

    host: str  # of its NIXL side channel
    port: int
    engine_id: str
    request_id: str  # under which the server holds the blocks
    block_ids: tuple[int, ...]  # in the order of the prompt
    num_tokens: int  # leading tokens of the prompt whose KV is in the blocks
    # Seconds since the server's lease began, as the router saw it. None: the router did not ask the
    # server itself, and the lease is older than the request.
    age_s: float | None = None
    expires_at_s: float | None = None  # by the server's clock; vLLM 0.32 gives none after a prefill
    relayed_age_s: float = 0.0  # seconds that a client held the parameters, as it says

    def __post_init__(self) -> None:
        for name, text in (
            ("remote_host", self.host),
            ("remote_engine_id", self.engine_id),
            ("remote_request_id", self.request_id),
        ):
            if not 0 < len(text) <= MAX_NAME_CHARACTERS or not text.isprintable():
                raise _invalid(name, f"needs 1 to {MAX_NAME_CHARACTERS} printable characters")
        # Notifications of a request and of heartbeats are texts on one channel.
        if "," in self.request_id or ":" in self.request_id:
            raise _invalid("remote_request_id", "must contain neither a comma nor a colon")
        if not 0 < self.port <= MAX_PORT:
            raise _invalid("remote_port", f"is {self.port}; it must be from 1 to {MAX_PORT}")
        if not 0 < len(self.block_ids) <= MAX_BLOCKS:
            raise _invalid("remote_block_ids", f"needs 1 to {MAX_BLOCKS} blocks of one KV group")
        if not all(0 <= block_id <= MAX_INT32 for block_id in self.block_ids):
            raise _invalid("remote_block_ids", f"must be from 0 to {MAX_INT32}")
        if len(set(self.block_ids)) != len(self.block_ids):
            raise _invalid("remote_block_ids", "names a block twice")
        if not 0 < self.num_tokens <= MAX_INT32:
            raise _invalid("remote_num_tokens", f"is {self.num_tokens}; it must be positive")
        if not self.relayed_age_s >= 0:
            raise _invalid(AGE, f"is {self.relayed_age_s}; it must be at least 0")

    @property
    def address(self) -> str:
        return f"{self.host.lower()}:{self.port}"


def foreign_kv_from(params: Mapping[str, object]) -> ForeignKv | None:
    """Read vLLM's parameters; None if they name no KV. Raises InvalidRequest.

    Unknown parameters are ignored: vLLM adds some with each version, and clients relay them all.
    """
    if len(params) > MAX_PARAMS:
        raise InvalidRequest(f"{FIELD} has {len(params)} entries; the limit is {MAX_PARAMS}", FIELD)
    if params.get("do_remote_decode"):
        raise _invalid("do_remote_decode", "is not supported: Baton holds no KV for vLLM servers")
    if not params.get("do_remote_prefill"):
        return None
    mode = params.get("transfer_mode")
    if mode not in (None, "pull"):
        raise _invalid("transfer_mode", f"is {mode!r}; only NixlConnector's pull is supported")
    for name in ("tp_size", "dcp_size", "pp_size"):
        if params.get(name) not in (None, 1):
            raise _invalid(
                name, "is not 1: servers that spread a model over GPUs are not supported"
            )
    expires_at_s = params.get(EXPIRY)
    return ForeignKv(
        host=_given(params, "remote_host", str),
        port=_given(params, "remote_port", int),
        engine_id=_given(params, "remote_engine_id", str),
        request_id=_given(params, "remote_request_id", str),
        block_ids=_block_ids(params),
        num_tokens=_given(params, "remote_num_tokens", int),
        expires_at_s=None if expires_at_s is None else _number(EXPIRY, expires_at_s),
        relayed_age_s=_number(AGE, params.get(AGE, 0.0)),
    )


def foreign_kv_from_json(written: str) -> ForeignKv | None:
    """Read vLLM's parameters from a JSON object. Raises InvalidRequest."""
    if len(written) > MAX_JSON_CHARACTERS:
        raise InvalidRequest(f"{FIELD} has more than {MAX_JSON_CHARACTERS} characters", FIELD)
    try:
        params = json.loads(written)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{FIELD} is not JSON: {error}", FIELD) from None
    if not isinstance(params, dict):
        raise InvalidRequest(f"{FIELD} must be a JSON object", FIELD)
    return foreign_kv_from(params)


def _given(params: Mapping[str, object], name: str, kind: type[Kind]) -> Kind:
    value = params.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _invalid(name, f"must be {'an integer' if kind is int else 'a text'}")
    return value


def _number(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _invalid(name, "must be a number")
    return float(value)


def _block_ids(params: Mapping[str, object]) -> tuple[int, ...]:
    groups = params.get("remote_block_ids")
    if not isinstance(groups, list) or len(groups) != 1 or not isinstance(groups[0], list):
        raise _invalid("remote_block_ids", "must be a list with the blocks of one KV group")
    if len(groups[0]) > MAX_BLOCKS or not all(type(each) is int for each in groups[0]):
        raise _invalid("remote_block_ids", f"must be at most {MAX_BLOCKS} integers")
    return tuple(groups[0])


def _invalid(name: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{FIELD}.{name} {problem}", f"{FIELD}.{name}")
