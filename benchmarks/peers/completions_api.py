"""Streamed completions from any engine with an OpenAI-compatible HTTP API.

All engines are measured with this one plain client.
"""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from baton.bench.load import random_tokens
from baton.core.errors import NamedError

Stop = Callable[[], bool]
Body: TypeAlias = Mapping[str, object]
END = "[DONE]"
VOCAB_SIZE = 2000  # a lower bound for all models


class EngineFailed(NamedError):
    """An engine returned an error or fewer tokens than requested."""


@dataclass(slots=True)
class StreamedCompletion:
    """One answer as seen by its client. Times are monotonic."""

    sent_s: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # time and number of tokens

    @property
    def first_token_s(self) -> float:
        return self.arrivals[0][0] - self.sent_s

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.arrivals)


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    max_len: int


@dataclass(frozen=True, slots=True)
class CompletionsApi:
    """HTTP endpoint of an engine, with its prefill endpoint if it has a separate one."""

    url: str
    prefill_url: str = ""  # for vLLM, whose clients arrange the hand-off themselves
    groups: tuple[int, ...] = ()  # process groups that are frozen between turns
    timeout_s: float = 600.0

    def model(self) -> ServedModel:
        with _request(self.url, "GET", "/v1/models", None, self.timeout_s) as answer:
            values = json.load(answer)["data"][0]
        return ServedModel(values["id"], values["max_model_len"])

    def stream(
        self, model: str, prompt: Sequence[int], max_tokens: int, stop: Stop = lambda: False
    ) -> StreamedCompletion:
        """Stream an answer until its end or until `stop` returns True. Raises EngineFailed."""
        streamed = StreamedCompletion(time.monotonic())
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            **self._handed_over(model, prompt),
        }
        with _request(self.url, "POST", "/v1/completions", body, self.timeout_s) as answer:
            for choice in _choices(answer):
                if choice.get("token_ids"):
                    streamed.arrivals.append((time.monotonic(), len(choice["token_ids"])))
                if stop():
                    return streamed
        if streamed.num_tokens != max_tokens:
            raise EngineFailed(f"{self.url} gave {streamed.num_tokens} of {max_tokens} tokens")
        return streamed

    def _handed_over(self, model: str, prompt: Sequence[int]) -> dict[str, object]:
        """Have vLLM's prefill server compute the prompt; return the KV parameters for decode."""
        if not self.prefill_url:
            return {}
        unknown = dict.fromkeys(
            ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
        )
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": 1,
            "temperature": 0,
            "kv_transfer_params": {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                **unknown,
            },
        }
        reply = _request(self.prefill_url, "POST", "/v1/completions", body, self.timeout_s)
        with reply as answer:
            found = json.load(answer).get("kv_transfer_params")
        if not found or not found.get("do_remote_prefill"):
            raise EngineFailed(f"{self.prefill_url} returned no KV transfer parameters")
        return {"kv_transfer_params": found}


def random_prompt(draw: random.Random, num_tokens: int) -> Sequence[int]:
    """Return random tokens that every model has."""
    return random_tokens(draw, VOCAB_SIZE, num_tokens)


@contextmanager
def detached_threads(num_threads: int) -> Iterator[ThreadPoolExecutor]:
    """Yield client threads that are not joined: after Ctrl-C, answers end with their engine."""
    threads = ThreadPoolExecutor(num_threads)
    try:
        yield threads
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _request(
    url: str, method: str, path: str, body: Body | None, timeout_s: float
) -> Iterator[http.client.HTTPResponse]:
    where = urlsplit(url)
    host, port = where.hostname or "127.0.0.1", where.port or 80
    with closing(http.client.HTTPConnection(host, port, timeout=timeout_s)) as connection:
        text = None if body is None else json.dumps(body)
        try:
            connection.request(method, path, text, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                reason = answer.read(1000).decode(errors="replace")
                raise EngineFailed(f"{url} answered {answer.status}: {reason}")
            yield answer
        except (OSError, http.client.HTTPException) as error:
            raise EngineFailed(f"{url} did not answer: {error!r}") from error


def _choices(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in answer:
        data = line.removeprefix(b"data:").strip().decode()
        if data in ("", END):
            continue
        message = json.loads(data)
        if "error" in message:
            raise EngineFailed(f"the stream failed: {message['error']}")
        yield from message["choices"]
