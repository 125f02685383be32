"""HTTP requests and gRPC calls of a hostile client, and their outcomes as text."""

from __future__ import annotations

import http.client
import json
import re
import socket
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
NUM_CONNECTIONS = 64  # more than updates that the router lets wait, so that it refuses some
ANSWER_HEAD = re.compile(
    rb"HTTP/1.1 (\d+) .*?content-length: (\d+)\r.*?\r?\n\r\n", re.IGNORECASE | re.DOTALL
)

Outcomes = Counter[str]


def post_all(address: str, posts: Sequence[HttpPost], end_s: float) -> Outcomes:
    with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        return Counter(threads.map(lambda each: post(address, each, end_s), posts))


def post_pipelined(address: str, posts: Sequence[HttpPost], end_s: float) -> Outcomes:
    """Send all at once on many connections, without waiting for answers."""
    batches = [posts[number::NUM_CONNECTIONS] for number in range(NUM_CONNECTIONS)]
    with ThreadPoolExecutor(NUM_CONNECTIONS) as threads:
        return sum(threads.map(lambda each: _send_batch(address, each, end_s), batches), Counter())


def _send_batch(address: str, batch: Sequence[HttpPost], end_s: float) -> Outcomes:
    if time.monotonic() > end_s:
        return Counter({"not sent": len(batch)})
    host, _, port = address.rpartition(":")
    outcomes: Outcomes = Counter()
    answers, failure = b"", "no answer in time"
    try:
        with socket.create_connection((host, int(port)), left_s(end_s)) as connection:
            connection.sendall(b"".join(map(_as_bytes, batch)))
            while outcomes.total() < len(batch) and time.monotonic() < end_s:
                connection.settimeout(left_s(end_s))
                received = connection.recv(READ_BYTES)
                if not received:
                    failure = "connection closed"
                    break
                answers = _take_answers(answers + received, outcomes)
    except OSError as error:
        failure = failure if isinstance(error, TimeoutError) else type(error).__name__
    return outcomes + Counter({failure: len(batch) - outcomes.total()})


def _as_bytes(sent: HttpPost) -> bytes:
    key, value = authorization(sent.token)
    return (
        f"POST {sent.path} HTTP/1.1\r\nHost: a\r\n{key}: {value}\r\n"
        f"Content-Length: {len(sent.body)}\r\n\r\n"
    ).encode() + sent.body


def _take_answers(received: bytes, outcomes: Outcomes) -> bytes:
    """Count the complete answers, and return the bytes after them."""
    while found := ANSWER_HEAD.match(received):
        end = found.end() + int(found[2])
        if len(received) < end:
            break
        outcomes[f"{found[1].decode()} {_reason(received[found.end() : end])}".strip()] += 1
        received = received[end:]
    return received


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
