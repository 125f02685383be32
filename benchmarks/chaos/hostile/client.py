"""`python -m benchmarks.chaos.hostile.client`: runs attacks on a router and its nodes.

It is a process of its own, so that attacks do not slow down the measuring process. Each line of
JSON on standard input is an attack; its outcomes are a line on standard output. An attack is
limited by its number of requests and by a deadline.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from baton.rpc.channel import open_blocking_channel
from baton.rpc.listening import raise_descriptor_limit
from baton.rpc.process_end import end_with_parent
from baton.v1 import inference_pb2, inference_pb2_grpc, node_pb2, node_pb2_grpc, sampling_pb2
from benchmarks.chaos.hostile.adapters import OperatorAccess, attack_adapters
from benchmarks.chaos.hostile.histories import attack_histories
from benchmarks.chaos.hostile.kv_events import attack_kv_events
from benchmarks.chaos.hostile.requests import Attack, posts, spoilt
from benchmarks.chaos.hostile.sending import Outcomes, called, left_s, post_all

GENERATE = "/baton.v1.InferenceService/Generate"
NUM_IDLE, IDLE_S = 400, 3.0
NUM_DEAD_PEERS = 100
ALL_OF_LOOPBACK = "0.0.0.0"  # includes 127.0.0.1 to 127.0.0.100
NUM_SPOILT = 30
REPLAY_SUFFIX = "-replay"
LONG_ID_BYTES = 60_000_000
NICENESS = 5  # on a small machine, leaves the cores to the servers
HALVES = (
    b"",
    b"GET /hea",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{",
)


@dataclass(frozen=True, slots=True)
class AttackTarget:
    http: str
    grpc: str
    decodes: Sequence[str]
    prefills: Sequence[str] = ()
    kv_events: Sequence[str] = ()  # of nodes; replays at the same with `REPLAY_SUFFIX`
    operator_token: str = ""
    adapters: str = ""

    def model(self) -> str:
        """Return the name of the served model. Raises OSError if the router does not answer."""
        connection = http.client.HTTPConnection(self.http, timeout=5.0)
        try:
            connection.request("GET", "/v1/models")
            return str(json.loads(connection.getresponse().read())["data"][0]["id"])
        except (http.client.HTTPException, ValueError, LookupError) as error:
            raise OSError(f"the router lists no model: {error}") from error
        finally:
            connection.close()


def attack(kind: Attack, target: AttackTarget, model: str, seed: int, limit_s: float) -> Outcomes:
    """Run an attack and return the number of requests by outcome."""
    draw = random.Random(seed)
    end_s = time.monotonic() + limit_s
    match kind:
        case Attack.IDLE_CONNECTIONS:
            return _idle(target, end_s)
        case Attack.LONG_IDS:
            return _long_ids(target, end_s)
        case Attack.DEAD_PEERS:
            return _dead_peers(target, end_s)
        case Attack.KV_EVENTS:
            replays = [each + REPLAY_SUFFIX for each in target.kv_events]
            return attack_kv_events(target.kv_events, replays, end_s)
        case Attack.ADAPTERS:
            nodes = (*target.prefills, *target.decodes)
            access = OperatorAccess(target.http, nodes, target.operator_token, target.adapters)
            return attack_adapters(access, model, draw, end_s)
        case Attack.HISTORIES:
            return attack_histories(target.http, model, end_s)
    outcomes = post_all(target.http, posts(kind, model, draw), end_s)
    if kind is Attack.MUTATIONS:
        outcomes += _spoilt_calls(target, draw, end_s)
    return outcomes


def _idle(target: AttackTarget, end_s: float) -> Outcomes:
    """Open connections that stay silent or stop inside a request."""
    outcomes: Outcomes = Counter()
    with ExitStack() as connections:
        for number in range(NUM_IDLE):
            for address in (target.http, target.grpc):
                host, _, port = address.rpartition(":")
                try:
                    connection = socket.create_connection((host, int(port)), timeout=1.0)
                    connections.enter_context(connection)
                    if address == target.http:
                        connection.sendall(HALVES[number % len(HALVES)])
                    outcomes["opened"] += 1
                except OSError as error:
                    outcomes[type(error).__name__] += 1
        time.sleep(max(0.0, min(IDLE_S, end_s - time.monotonic())))
    return outcomes


def _long_ids(target: AttackTarget, end_s: float) -> Outcomes:
    long = "x" * LONG_ID_BYTES
    prompt = sampling_pb2.TokenIds(ids=[3, 4, 5])
    requests = [
        inference_pb2.GenerateRequest(token_ids=prompt, request_id=long),
        inference_pb2.GenerateRequest(token_ids=prompt, cache_salt=long),
        inference_pb2.GenerateRequest(token_ids=prompt, request_id="a\nb" * 80),
    ]
    with open_blocking_channel(target.grpc) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        return Counter(
            called(lambda one: list(stub.Generate(one, timeout=left_s(end_s))), each)
            for each in requests
        )


def _spoilt_calls(target: AttackTarget, draw: random.Random, end_s: float) -> Outcomes:
    valid = inference_pb2.GenerateRequest(
        token_ids=sampling_pb2.TokenIds(ids=[3, 4, 5]), request_id="hostile"
    )
    valid.sampling.max_tokens = 4
    whole = valid.SerializeToString()
    with open_blocking_channel(target.grpc) as channel:
        generate = channel.unary_stream(
            GENERATE, request_serializer=bytes, response_deserializer=bytes
        )
        return Counter(
            called(lambda one: list(generate(one, timeout=left_s(end_s))), spoilt(whole, draw))
            for _ in range(NUM_SPOILT)
        )


def _dead_peers(target: AttackTarget, end_s: float) -> Outcomes:
    """Have decode nodes connect to peers that refuse connections or never answer."""
    outcomes: Outcomes = Counter()
    with socket.create_server((ALL_OF_LOOPBACK, 0), backlog=NUM_DEAD_PEERS) as silent:
        port = silent.getsockname()[1]
        for decode in target.decodes:
            with open_blocking_channel(decode) as channel:
                stub = node_pb2_grpc.LegServiceStub(channel)
                calls = [
                    stub.Connect.future(_connect(number, port), timeout=left_s(end_s))
                    for number in range(NUM_DEAD_PEERS)
                ]
                outcomes += Counter(called(lambda call: call.result(), call) for call in calls)
    return outcomes


def _connect(number: int, silent_port: int) -> node_pb2.ConnectRequest:
    host, port = f"127.0.0.{number + 1}", silent_port if number % 2 else 1
    peer = node_pb2.Peer(node_id=f"p{number}", address=f"{host}:{port}")
    return node_pb2.ConnectRequest(prefill=peer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parent-pid", type=int, required=True)
    end_with_parent(parser.parse_args().parent_pid)
    raise_descriptor_limit()
    with suppress(OSError):
        os.nice(NICENESS)
    model = ""
    for line in sys.stdin:
        order = json.loads(line)
        target = AttackTarget(**order["target"])
        try:
            model = model or target.model()
            kind = Attack(order["attack"])
            outcomes = dict(attack(kind, target, model, order["seed"], order["limit_s"]))
        except OSError as error:
            outcomes = {f"{type(error).__name__}: {error}": 1}
        print(json.dumps(outcomes), flush=True)


if __name__ == "__main__":
    main()
