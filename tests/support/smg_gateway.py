"""SMG's gateway as a process, and clients that judge its answers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
from openai import AsyncOpenAI

from tests.support.ports import free_port

PATIENCE_S = 120
CONCURRENCY = 8
MODEL = "demo"
KINDS = ("whole", "streamed", "n=2", "n=2 streamed", "aborted")


@contextmanager
def smg_gateway(venv: Path, arguments: Sequence[str], log: Path) -> Iterator[str]:
    """Run `smg launch` until the block ends; yield its URL once its worker is healthy."""
    port, metrics_port = free_port(), free_port()
    command = [str(venv / "bin" / "smg"), "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(metrics_port), "--health-check-interval-secs", "2"]
    with log.open("w") as output:
        process = subprocess.Popen([*command, *arguments], stdout=output, stderr=output)
        try:
            url = f"http://127.0.0.1:{port}"
            _await_worker(url, process, log)
            yield url
        finally:
            process.kill()
            process.wait()


def _await_worker(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return when the worker is healthy, and the gateway has its tokenizer."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/workers", timeout=10) as reply:
                workers = json.load(reply)["workers"]
            if any(worker["is_healthy"] for worker in workers) and _has_tokenizer(url):
                return
        except OSError:
            pass  # it does not listen yet, or refuses the request
        time.sleep(0.1)
    raise AssertionError(f"the gateway has no healthy worker: {log.read_text()[-2000:]}")


def _has_tokenizer(url: str) -> bool:
    """Return True if the gateway answers. Raises OSError while it refuses."""
    body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 1}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=10) as reply:
        return bool(reply.read())


@dataclass
class Outcomes:
    """Results of the requests of a run."""

    right: Counter[str] = field(default_factory=Counter)  # by kind
    refused: list[tuple[int, str, str]] = field(default_factory=list)  # number, kind, reason
    wrong: list[tuple[int, str, str]] = field(default_factory=list)  # likewise, with the text


@dataclass(frozen=True)
class Load:
    """Requests with known answers."""

    url: str
    prompts: Sequence[str]
    wanted: Sequence[str]  # by prompt
    max_tokens: int = 16

    def run(self, on_request: Callable[[int], None]) -> Outcomes:
        """Send all requests. `on_request` is called with the number of each, on a thread."""
        return asyncio.run(self._run(on_request))

    async def _run(self, on_request: Callable[[int], None]) -> Outcomes:
        outcomes, slots = Outcomes(), asyncio.Semaphore(CONCURRENCY)
        client = AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE_S
        )

        async def one(number: int) -> None:
            async with slots:
                await asyncio.to_thread(on_request, number)
                await self._judge(client, number, outcomes)

        async with client:
            await asyncio.gather(*map(one, range(len(self.prompts))))
        return outcomes

    async def _judge(self, client: AsyncOpenAI, number: int, outcomes: Outcomes) -> None:
        kind, wanted = KINDS[number % len(KINDS)], self.wanted[number]
        try:
            texts = await self._ask(client, number, kind)
        except openai.APIError as refusal:
            outcomes.refused.append((number, kind, str(refusal)))
            return
        is_right = [
            bool(text) and wanted.startswith(text) if kind == "aborted" else text == wanted
            for text in texts
        ]
        if all(is_right):
            outcomes.right[kind] += 1
        else:
            outcomes.wrong.append((number, kind, repr(texts)))

    async def _ask(self, client: AsyncOpenAI, number: int, kind: str) -> list[str]:
        """Return the text of each answer."""
        num_answers = 2 if kind.startswith("n=2") else 1
        request: dict[str, Any] = {
            "model": MODEL,
            "prompt": self.prompts[number],
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "n": num_answers,
        }
        if kind in ("whole", "n=2"):
            whole = await client.completions.create(**request)
            return [choice.text for choice in sorted(whole.choices, key=lambda one: one.index)]
        texts = [""] * num_answers
        stream = await client.completions.create(**request, stream=True)
        async with stream:
            async for chunk in stream:
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
                if kind == "aborted" and texts[0]:
                    break  # leaving the block disconnects
        return texts
