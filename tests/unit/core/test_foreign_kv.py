"""vLLM's `kv_transfer_params`, as clients relay them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from baton.core.errors import InvalidRequest
from baton.core.foreign_kv import ForeignKv, foreign_kv_from, foreign_kv_from_json

# Of vLLM 0.32.0.
PARAMS: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "4afa880a-a26e-4bb7-976e-bab5dfa3eec4",
    "remote_request_id": "cmpl-962a344abf882e6a-0-9f14c0ca",
    "remote_host": "localhost",
    "remote_port": 5633,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 140,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 0,
}


def test_parameters_of_vllm_are_read() -> None:
    kv = ForeignKv(
        "localhost",
        5633,
        "4afa880a-a26e-4bb7-976e-bab5dfa3eec4",
        "cmpl-962a344abf882e6a-0-9f14c0ca",
        (1, 2),
        140,
    )
    assert foreign_kv_from(PARAMS) == kv
    assert foreign_kv_from_json(json.dumps(PARAMS)) == kv
    assert kv.address == "localhost:5633"
    assert foreign_kv_from(PARAMS | {"age_s": 3}) == replace(kv, relayed_age_s=3.0)


@pytest.mark.parametrize("params", [{}, {"do_remote_prefill": False}])
def test_parameters_without_kv_are_none(params: dict[str, Any]) -> None:
    assert foreign_kv_from(params) is None
    assert foreign_kv_from_json(json.dumps(params)) is None


INVALID = {
    "do_remote_decode": True,
    "transfer_mode": "push",
    "tp_size": 2,
    "pp_size": "1",
    "remote_host": "",
    "age_s": -1,
    "remote_port": 0,
    "remote_engine_id": None,
    "remote_num_tokens": True,
    "remote_blocks_expiry_time": "soon",
}


@pytest.mark.parametrize(("name", "value"), INVALID.items(), ids=INVALID)
def test_invalid_parameters_are_named(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as raised:
        foreign_kv_from(PARAMS | {name: value})
    assert raised.value.field == f"kv_transfer_params.{name}"


@pytest.mark.parametrize(
    "block_ids",
    [None, [], [[]], [[1], [2]], [1], [["1"]], [[-1]], [[True]], [[1, 1]], [[1 << 31]], [[1.0]]],
)
def test_invalid_blocks_are_named(block_ids: object) -> None:
    with pytest.raises(InvalidRequest, match="remote_block_ids"):
        foreign_kv_from(PARAMS | {"remote_block_ids": block_ids})


@pytest.mark.parametrize("request_id", ["HB:other", "a,b", "a\nb", "x" * 257])
def test_request_ids_cannot_forge_notifications(request_id: str) -> None:
    with pytest.raises(InvalidRequest, match="remote_request_id"):
        foreign_kv_from(PARAMS | {"remote_request_id": request_id})


@pytest.mark.parametrize("written", ["[1]", "{", "[" * 100_000, " " * (1 << 21)])
def test_texts_that_are_no_objects_are_refused(written: str) -> None:
    with pytest.raises(InvalidRequest, match="kv_transfer_params"):
        foreign_kv_from_json(written)


def test_too_many_parameters_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="limit is 64"):
        foreign_kv_from(PARAMS | {f"more{number}": 1 for number in range(64)})
