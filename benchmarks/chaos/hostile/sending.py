"""HTTP requests and gRPC calls of a hostile client, and their outcomes as text."""

from __future__ import annotations

import http.client
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc

from baton.rpc.security.token import authorization
from baton.rpc.status import remote_error
from benchmarks.chaos.hostile.requests import HttpPost

NUM_AT_ONCE = 8
READ_BYTES = 1 << 16

Outcomes = Counter[str]


def post_all(address: str, posts: Sequence[HttpPost], end_s: float) -> Outcomes:
    with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        return Counter(threads.map(lambda each: post(address, each, end_s), posts))


def post(address: str, sent: HttpPost, end_s: float) -> str:
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        return "not sent"
    headers = {"content-type": "application/json"}
    if sent.token:
        headers |= [authorization(sent.token)]
    connection = http.client.HTTPConnection(address, timeout=left_s)
    try:
        connection.request("POST", sent.path, sent.body, headers)
        response = connection.getresponse()
        beginning = response.read(READ_BYTES)
        while response.read(READ_BYTES):
            if time.monotonic() > end_s:
                return f"{response.status}, cut off at the time limit"
        return f"{response.status} {_reason(beginning)}".strip()
    except TimeoutError:
        return "no answer in time"
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    finally:
        connection.close()


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["reason"])
    except (ValueError, LookupError, TypeError):
        return ""


def called(call: Callable[..., object], argument: object) -> str:
    try:
        call(argument)
    except grpc.RpcError as error:
        remote = remote_error(error)
        return f"{remote.code.name} {remote.reason or ''}".strip()
    return "OK"


def left_s(end_s: float) -> float:
    return max(0.1, end_s - time.monotonic())
