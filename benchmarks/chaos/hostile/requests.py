"""Requests of a hostile client: large, ambiguous and malformed ones, drawn from a seed. Pure."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from typing import Any

COMPLETIONS, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"
AMBIGUOUS = 'start: s\ns: s s | s s s | "a"'
TOKEN = 5  # a token id of any model
ADAPTERS = ("red", "green", "blue")  # one more than nodes have places for
NUM_ADAPTED = 40
ACCEPTED = "wrongly accepted"  # outcome of a bad order
MIB = 1 << 20
LIST_BYTES = 16 * MIB - 1000  # just below the body limit


class Attack(Enum):
    LARGE_ANSWERS = "large-answers"  # small bodies with many choices and logprobs
    TOKEN_LISTS = "token-lists"  # bodies of 16 MiB of token ids
    LARGE_SETTINGS = "large-settings"  # millions of allowed tokens, biases and stop strings
    IDLE_CONNECTIONS = "idle-connections"  # to HTTP and gRPC, silent or stopped inside a request
    LONG_IDS = "long-ids"  # 60 MB of request id and cache salt over gRPC
    AMBIGUOUS_GRAMMARS = "ambiguous-grammars"
    DEAD_PEERS = "dead-peers"  # Connect calls to decode nodes with unreachable peers
    KV_HINTS = "kv-hints"  # distinct sessions with retention, and prefetches of long prompts
    EMBEDDINGS = "embeddings"  # thousands of texts, a text of 1 MB, huge dimensions
    KV_EVENTS = "kv-events"  # floods of the KV event sockets of all nodes
    ADAPTERS = "adapters"  # bad folders, paths and names, loads and unloads of one that is in use
    MORE_ADAPTERS = "more-adapters"  # long answers of more adapters than a batch has places for
    HISTORIES = "histories"  # small requests that continue large stored conversations
    MUTATIONS = "mutations"  # of valid bodies, over HTTP and gRPC


@dataclass(frozen=True, slots=True)
class HttpPost:
    path: str
    body: bytes
    token: str = ""


def attacks(seed: int, chosen: Sequence[Attack] = tuple(Attack)) -> Iterator[Attack]:
    """Yield all attacks repeatedly, each time in a new random order."""
    draw = random.Random(seed)
    while True:
        yield from draw.sample(chosen, k=len(chosen))


def posts(attack: Attack, model: str, draw: random.Random) -> list[HttpPost]:
    """Return the HTTP requests of an attack; none if it does not consist of requests."""
    match attack:
        case Attack.LARGE_ANSWERS:
            return [
                _completion(model, prompt_logprobs=64, logprobs=5, max_tokens=2, n=128),
                _completion(model, prompt_logprobs=64, max_tokens=1, n=128, echo=True),
                _completion(model, [3], logprobs=64, max_tokens=500, n=64),
            ]
        case Attack.TOKEN_LISTS:
            ids = f'{{"model":"{model}","max_tokens":2,"prompt":['.encode()
            return [HttpPost(COMPLETIONS, ids + _listed(LIST_BYTES) + b"]}")] * 6
        case Attack.LARGE_SETTINGS:
            return list(_large_settings(model))
        case Attack.AMBIGUOUS_GRAMMARS:
            form = {"grammar": AMBIGUOUS}
            return [
                _completion(model, [3], structured_outputs=form, max_tokens=400, seed=number)
                for number in range(8)
            ]
        case Attack.KV_HINTS:
            return [*_sessions(model, draw), *_prefetches(model, draw)]
        case Attack.EMBEDDINGS:
            return list(_embeddings(model))
        case Attack.MORE_ADAPTERS:
            return [
                _completion(name, [TOKEN, number], max_tokens=600, ignore_eos=True)
                for number in range(NUM_ADAPTED)
                for name in ADAPTERS
            ]
        case Attack.MUTATIONS:
            return [mutated_post(draw, model) for _ in range(60)]
    return []


MAX_TEXTS, TOO_MANY_TEXTS = 2048, 10_000


def _embeddings(model: str) -> Iterator[HttpPost]:
    """Yield refused bodies, and the largest that are not refused."""
    inputs: list[Any] = [
        ["text"] * TOO_MANY_TEXTS,
        [[TOKEN]] * TOO_MANY_TEXTS,
        ["a" * MIB],
        [""] * MAX_TEXTS,
        ["one text of many " * 12] * MAX_TEXTS,
    ]
    bodies = [{"input": texts} for texts in inputs]
    bodies += [{"input": "a", "dimensions": size} for size in (1 << 40, -1, 1.5, float("nan"))]
    for body in bodies:
        for encoding in ("float", "base64"):
            whole = {"model": model, "encoding_format": encoding, **body}
            yield HttpPost(EMBEDDINGS, json.dumps(whole).encode())
    ranking = {"model": model, "query": "a" * MIB, "documents": ["text"] * MAX_TEXTS}
    yield HttpPost(RERANK, json.dumps(ranking).encode())


NUM_SESSIONS, SESSION_TOKENS = 150, 40
NUM_PREFETCHES, PREFETCH_TOKENS = 300, 1000
TOKENS = range(5, 200)  # ids of any model


def _sessions(model: str, draw: random.Random) -> Iterator[HttpPost]:
    for _ in range(NUM_SESSIONS):
        hints = {"session_id": f"{draw.getrandbits(128):032x}", "retain_s": 86_400}
        prompt = draw.choices(TOKENS, k=SESSION_TOKENS)
        yield _completion(model, prompt, kv_hints=hints, max_tokens=1)


def _prefetches(model: str, draw: random.Random) -> Iterator[HttpPost]:
    for _ in range(NUM_PREFETCHES):
        prompt = draw.choices(TOKENS, k=PREFETCH_TOKENS)
        yield _completion(model, prompt, kv_hints={"prefetch": True})


def mutated_post(draw: random.Random, model: str) -> HttpPost:
    """Return a valid body with a few mutations."""
    path, valid = draw.choice(_valid(model))
    body = deepcopy(valid)
    for _ in range(draw.randint(1, 3)):
        _mutate(body, draw)
    try:
        encoded = json.dumps(body).encode()
    except (ValueError, RecursionError):
        encoded = b"{"
    if draw.random() < SPOILT_SHARE:
        encoded = spoilt(encoded, draw)
    return HttpPost(path, encoded)


SPOILT_SHARE = 0.3


def spoilt(whole: bytes, draw: random.Random) -> bytes:
    """Return the bytes with some of them changed, or cut in half."""
    if not whole or draw.random() < 0.3:
        return whole[: len(whole) // 2]
    changed = bytearray(whole)
    for _ in range(draw.randint(1, 8)):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def _completion(model: str, prompt: list[int] | None = None, **fields: Any) -> HttpPost:
    prompt = [TOKEN] * 1000 if prompt is None else prompt
    return HttpPost(COMPLETIONS, json.dumps({"model": model, "prompt": prompt, **fields}).encode())


def _listed(num_bytes: int) -> bytes:
    one = b"%d," % TOKEN
    return one * (num_bytes // len(one) - 1) + one[:-1]


def _large_settings(model: str) -> Iterator[HttpPost]:
    head = f'{{"model":"{model}","prompt":[3],"max_tokens":2,'.encode()
    half = LIST_BYTES // 2
    yield HttpPost(COMPLETIONS, head + b'"allowed_token_ids":[' + _listed(LIST_BYTES) + b"]}")
    yield HttpPost(COMPLETIONS, head + b'"stop_token_ids":[' + _listed(half) + b"]}")
    biases = b",".join(b'"%d":1' % number for number in range(half // 12))
    yield HttpPost(COMPLETIONS, head + b'"logit_bias":{' + biases + b"}}")
    stops = b'"stop",' * (half // 8) + b'"stop"'
    yield HttpPost(COMPLETIONS, head + b'"stop":[' + stops + b"]}")
    yield HttpPost(COMPLETIONS, head + b'"bad_words":[' + stops + b"]}")
    yield HttpPost(COMPLETIONS, head + b'"user":"' + b"u" * half + b'"}')


def _valid(model: str) -> list[tuple[str, dict[str, Any]]]:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    message = {"role": "user", "content": "the quick brown fox"}
    return [
        (COMPLETIONS, {"model": model, "prompt": "the quick", "max_tokens": 8, "n": 2}),
        (COMPLETIONS, {"model": model, "prompt": [3, 4, 5], "logprobs": 2, "stop": ["a", "b"]}),
        (
            COMPLETIONS,
            {
                "model": model,
                "prompt": ["a", "b"],
                "logit_bias": {"5": 1.5},
                "stream": True,
                "stream_options": {"include_usage": True},
                "max_tokens": 8,
            },
        ),
        (CHAT, {"model": model, "messages": [message], "max_tokens": 8, "temperature": 0.5}),
        (
            CHAT,
            {
                "model": model,
                "messages": [message],
                "max_tokens": 8,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": schema},
                },
            },
        ),
        (TOKENIZE, {"model": model, "prompt": "the quick brown fox"}),
    ]


def _mutate(body: dict[str, Any], draw: random.Random) -> None:
    holder: Any = body
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            return
        key = draw.choice(keys)
        inner = holder[key]
        if isinstance(inner, dict | list) and inner and draw.random() < 0.6:
            holder = inner
            continue
        break
    if draw.random() < 0.15:
        del holder[key]
    else:
        holder[key] = _nasty(draw)


def _nasty(draw: random.Random) -> Any:
    deep: Any = []
    for _ in range(draw.choice((10, 500))):
        deep = [deep]
    return draw.choice((
        None, True, -1, 0, 1 << 40, -(1 << 70), 1e308, float("nan"), float("inf"), "",
        "\0", "\ud800", "é" * draw.choice((10, 200_000)), "x" * 300, "../../etc/passwd",
        [], {}, [None] * 100, list(range(draw.choice((10, 50_000)))), deep, {"a": deep},
        {"type": "object"}, [[3, 4], [5]], "start: start start", "(a|b)*" * 200,
    ))  # fmt: skip
