"""Attack on the calls that load adapters: bad folders, paths, names and tokens, thousands of
names, and loads, replacements and unloads of an adapter that requests use meanwhile.
"""

from __future__ import annotations

import json
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import grpc
from google.protobuf.message import Message

from baton.rpc.channel import open_blocking_channel
from baton.rpc.security.token import authorization
from baton.v1 import node_pb2, node_pb2_grpc
from benchmarks.chaos.hostile.requests import ACCEPTED, COMPLETIONS, EMBEDDINGS, TOKEN, HttpPost
from benchmarks.chaos.hostile.sending import (
    NUM_AT_ONCE,
    Outcomes,
    called,
    left_s,
    post,
    post_all,
    post_pipelined,
)

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
BAD = "bad"  # folder of `bad_adapters`, whose import of torch would take long here
GOOD = ("red", "blue")
NAME, FLOOD = "hostile", "flood-"
NUM_NAMES, NUM_IN_FLIGHT = 10_000, 100
NUM_AT_NODE = 3_000  # more than it takes
NUM_HASTY = 300  # loads whose clients disconnect at once
FLOODS_SHARE = 0.5
CLEANING_S, PAUSE_S = 20.0, 0.5
ESCAPES = (
    "..", "../adapters/red", "red/../../adapters/red", "/etc", "/", "~", ".", "./", "",
    "red/", "red\0", "red\n", "\ud7ff" * 400, "x" * 5000, "red/adapter_config.json",
    "/proc/self/root", "/proc/self/fd", "file:///etc", "%2e%2e/red", "..\\red",
)  # fmt: skip
HARMLESS = {"red/"}  # another way to write the path of a good one
NAMES = ("", "x" * 300, "a\nb", "a\0b", "é" * 257, None, 7, ["a"], {"a": 1})
BAD_TOKENS = ("", "wrong", "x" * 4000)
MIB = 1 << 20

ID = "0" * 32  # that no adapter has
Metadata = tuple[tuple[str, str], ...]
SetNames = node_pb2.SetAdapterNamesRequest


@dataclass(frozen=True, slots=True)
class OperatorAccess:
    """Addresses at which adapters are loaded, and a token to do so."""

    http: str
    nodes: Sequence[str]
    token: str
    root: str

    def load(self, name: Any, path: Any, **fields: Any) -> HttpPost:
        return self.post(LOAD, lora_name=name, lora_path=path, **fields)

    def unload(self, name: Any) -> HttpPost:
        return self.post(UNLOAD, lora_name=name)

    def post(self, path: str, **fields: Any) -> HttpPost:
        return HttpPost(path, json.dumps(fields).encode(), self.token)

    @property
    def metadata(self) -> Metadata:
        return (authorization(self.token),)


def attack_adapters(
    access: OperatorAccess, model: str, draw: random.Random, end_s: float
) -> Outcomes:
    """Send thousands of names, or else bad loads and races, until `end_s`.

    Then the names that have been loaded are unloaded again.
    """
    outcomes: Outcomes = Counter()
    try:
        if draw.random() < FLOODS_SHARE:
            _load_hastily(access)
            outcomes += _flood(access, draw.choice(access.nodes), end_s)
        else:
            outcomes += _bad_loads(access, model, end_s)
            outcomes += _without_right(access, end_s)
            outcomes += _races(access, draw, end_s)
    finally:
        outcomes += _clean(access, time.monotonic() + CLEANING_S)
    return outcomes


def _bad_loads(access: OperatorAccess, model: str, end_s: float) -> Outcomes:
    """Send loads that must be refused, to the router and to a node."""
    folders = [f"{BAD}/{each}" for each in sorted(os.listdir(Path(access.root, BAD)))]
    paths = [*folders, *ESCAPES, f"{access.root}/{GOOD[0]}"]
    bad = [access.load(NAME, path) for path in paths if path not in HARMLESS]
    bad += [access.load(NAME, path) for path in (None, 7, ["red"], "red" * MIB)]
    bad += [access.load(name, GOOD[0]) for name in (*NAMES, model)]
    bad += [access.load(NAME, GOOD[0], model=name) for name in ("x", "../x", "\0", 7)]
    outcomes = _accepted_as_wrong(post_all(access.http, bad, end_s), "200")
    reads = [node_pb2.ReadAdapterRequest(path=path) for path in paths if path not in HARMLESS]
    names = [_naming(name) for name in (*filter(_is_text, NAMES), model, "x" * MIB)]
    names += [
        _naming(NAME, adapter_id, path)
        for path in (GOOD[0], "", "../red", "x" * MIB)
        for adapter_id in ("", "x" * MIB, "\n")
    ]
    with _stub(access.nodes[0]) as stub:
        found = Counter(_call(stub.ReadAdapter, each, access.metadata, end_s) for each in reads)
        found += Counter(
            _call(stub.SetAdapterNames, each, access.metadata, end_s) for each in names
        )
    return outcomes + _accepted_as_wrong(found, "OK")


def _accepted_as_wrong(outcomes: Outcomes, success: str) -> Outcomes:
    count = outcomes.pop(success, 0)
    return outcomes + Counter({ACCEPTED: count})


def _without_right(access: OperatorAccess, end_s: float) -> Outcomes:
    """Send loads and unloads with wrong tokens."""
    bodies = [
        HttpPost(path, json.dumps({"lora_name": name, "lora_path": GOOD[0]}).encode(), token)
        for path in (LOAD, UNLOAD)
        for name in (NAME, GOOD[0])
        for token in BAD_TOKENS
    ]
    outcomes = post_all(access.http, bodies, end_s)
    for address in access.nodes:
        with _stub(address) as stub:
            for token in BAD_TOKENS:
                metadata = (authorization(token),) if token else ()
                read = node_pb2.ReadAdapterRequest(path=GOOD[0])
                outcomes[_call(stub.ReadAdapter, read, metadata, end_s)] += 1
                outcomes[_call(stub.SetAdapterNames, _removal(GOOD[0]), metadata, end_s)] += 1
    return Counter({
        f"{ACCEPTED}, {outcome}" if outcome in ("200", "OK") else outcome: count
        for outcome, count in outcomes.items()
    })  # fmt: skip


def _races(access: OperatorAccess, draw: random.Random, end_s: float) -> Outcomes:
    """Load, replace and unload a name, at the router and at nodes, while requests use it."""
    acts = [
        *(_at_router(access, access.load(NAME, path, load_inplace=True)) for path in GOOD),
        *(_at_router(access, access.unload(NAME)) for _ in range(2)),
        *(_at_router(access, each) for each in _uses() for _ in range(3)),
        *(_at_node(access, address) for address in access.nodes),
    ]

    def act_until_the_end(seed: int) -> Outcomes:
        own = random.Random(seed)
        outcomes: Outcomes = Counter()
        while time.monotonic() < end_s:
            outcomes[own.choice(acts)(end_s)] += 1
        return outcomes

    with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        seeds = [draw.getrandbits(32) for _ in range(NUM_AT_ONCE)]
        return sum(threads.map(act_until_the_end, seeds), Counter())


def _uses() -> Iterator[HttpPost]:
    prompt = [TOKEN] * 50
    for fields in ({"max_tokens": 60, "stream": True}, {"max_tokens": 2, "n": 4}):
        body = {"model": NAME, "prompt": prompt, "ignore_eos": True, **fields}
        yield HttpPost(COMPLETIONS, json.dumps(body).encode())
    yield HttpPost(EMBEDDINGS, json.dumps({"model": NAME, "input": [prompt] * 8}).encode())


Act = Callable[[float], str]  # until this time; returns the outcome


def _at_router(access: OperatorAccess, sent: HttpPost) -> Act:
    return lambda end_s: post(access.http, sent, end_s)


def _at_node(access: OperatorAccess, address: str) -> Act:
    """Load, replace and unload the name on one node."""

    def act(end_s: float) -> str:
        with _stub(address) as stub:
            for path in GOOD:
                read = node_pb2.ReadAdapterRequest(name=NAME, path=path)
                with suppress(grpc.RpcError):
                    found = stub.ReadAdapter(read, timeout=left_s(end_s), metadata=access.metadata)
                    naming = SetNames(names=[_order(NAME, found.adapter)])
                    _call(stub.SetAdapterNames, naming, access.metadata, end_s)
            return _call(stub.SetAdapterNames, _removal(NAME), access.metadata, end_s)

    return act


def _load_hastily(access: OperatorAccess) -> None:
    """Send loads to the router, and disconnect before it answers."""
    host, _, port = access.http.rpartition(":")
    for number in range(NUM_HASTY):
        sent = access.load(f"{FLOOD}{number}", GOOD[0])
        head = f"POST {sent.path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {access.token}\r\n"
        head += f"Content-Length: {len(sent.body)}\r\n\r\n"
        with suppress(OSError), socket.create_connection((host, int(port)), 1.0) as connection:
            connection.sendall(head.encode() + sent.body)


def _flood(access: OperatorAccess, address: str, end_s: float) -> Outcomes:
    """Give thousands of names to one adapter: on one node, and at the router meanwhile."""
    names = [f"{FLOOD}{number}" for number in range(NUM_HASTY, NUM_NAMES)]
    with ThreadPoolExecutor(1) as thread:
        bodies = [access.load(name, GOOD[0]) for name in names[NUM_AT_NODE:]]
        routed = thread.submit(post_pipelined, access.http, bodies, end_s)
        namings = [_naming(name) for name in names[:NUM_AT_NODE]]
        with _stub(address) as stub:
            outcomes = _call_all(stub.SetAdapterNames, namings, access.metadata, end_s)
        return outcomes + routed.result()


def _clean(access: OperatorAccess, end_s: float) -> Outcomes:
    """Unload from all nodes what this attack has loaded, until none of them has any of it.

    Updates of the router, and orders for nodes that have joined, may still be in progress.
    """
    outcomes: Outcomes = Counter()
    num_empty_rounds = 0
    while num_empty_rounds < 2 and time.monotonic() < end_s:
        num_found = 0
        for address in access.nodes:
            with _stub(address) as stub, suppress(grpc.RpcError):
                names = [name for name in _names(stub, end_s) if name.startswith((NAME, FLOOD))]
                removals = map(_removal, names)
                outcomes += _call_all(stub.SetAdapterNames, [*removals], access.metadata, end_s)
                num_found += len(names)
        num_empty_rounds = 0 if num_found else num_empty_rounds + 1
        time.sleep(PAUSE_S)
    return Counter({f"cleaning: {outcome}": count for outcome, count in outcomes.items()})


def _names(stub: node_pb2_grpc.NodeServiceStub, end_s: float) -> list[str]:
    """Return the names of a node's adapters."""
    updates = stub.Watch(node_pb2.WatchRequest(), timeout=left_s(end_s))
    try:
        report = next(each.adapters for each in updates if each.HasField("adapters"))
        return [each.name for each in report.names if each.HasField("adapter")]
    finally:
        updates.cancel()


@contextmanager
def _stub(address: str) -> Iterator[node_pb2_grpc.NodeServiceStub]:
    with open_blocking_channel(address) as channel:
        yield node_pb2_grpc.NodeServiceStub(channel)


def _naming(name: str, adapter_id: str = ID, path: str = GOOD[0]) -> SetNames:
    """Return the order that gives a name to an adapter, of which no node checks the files yet."""
    adapter = node_pb2.Adapter(name=name, id=adapter_id, path=path)
    return SetNames(names=[_order(name, adapter)])


def _removal(name: str) -> SetNames:
    return SetNames(names=[_order(name)])


def _order(name: str, adapter: node_pb2.Adapter | None = None) -> node_pb2.NameOrder:
    return node_pb2.NameOrder(name=name, number=time.time_ns(), adapter=adapter)


def _is_text(name: object) -> TypeGuard[str]:
    return isinstance(name, str)


def _call(call: Any, message: Message, metadata: Metadata, end_s: float) -> str:
    return called(lambda sent: call(sent, timeout=left_s(end_s), metadata=metadata), message)


def _call_all(call: Any, messages: Sequence[Any], metadata: Metadata, end_s: float) -> Outcomes:
    """Send all messages, some at a time, while there is time."""
    outcomes: Outcomes = Counter()
    for start in range(0, len(messages), NUM_IN_FLIGHT):
        some = messages[start : start + NUM_IN_FLIGHT]
        if time.monotonic() > end_s:
            outcomes["not sent"] += len(some)
            continue
        futures = [call.future(each, timeout=left_s(end_s), metadata=metadata) for each in some]
        outcomes += Counter(called(lambda future: future.result(), each) for each in futures)
    return outcomes
