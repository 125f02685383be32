"""vLLM server whose prompts Baton's runner computes: the HTTP API of a FakeVllm."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from baton.engine.runner.model_runner import TorchRunner
from tests.support.fake_vllm import HOST, FakeVllm
from tests.support.vllm_blocks import prefill

NOT_READY, REFUSED = 503, 400


class FakeVllmServer:
    """Serves within a `with` block, and is not healthy before a test says so."""

    def __init__(self, peer: FakeVllm, runner: TorchRunner, model: str) -> None:
        self.is_healthy = False
        self.logprobs_apart = 0.0  # as of other weights
        self.refused_lengths = range(0)  # of prompts
        self.num_prompts = 0
        self.headers: list[dict[str, str]] = []  # of prompts
        self._peer = peer
        self._runner = runner
        self._model = model
        self._one_prompt = threading.Lock()
        self._http = ThreadingHTTPServer((HOST, 0), self._handler())
        self.address = f"vllm://{HOST}:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,))

    def __enter__(self) -> FakeVllmServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if not outer.is_healthy:
                    self._reply(NOT_READY, b"")
                elif self.path in ("/health", "/metrics"):
                    self._reply(200, b"vllm:num_requests_running 0.0\n")
                else:
                    models = [{"id": "served", "root": outer._model}]
                    page = {"data": models, "version": "0.32.0"}
                    self._reply(200, json.dumps(page).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.headers.append({name.lower(): value for name, value in self.headers.items()})
                if len(body["prompt"]) in outer.refused_lengths:
                    self._reply(REFUSED, b'{"error": {"message": "the prompt is refused"}}')
                    return
                self._reply(200, json.dumps(outer.complete(body)).encode())

            def _reply(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                """Requests are not logged."""

        return Handler

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Compute a prompt, and hold its KV."""
        prompt: Sequence[int] = body["prompt"]
        with self._one_prompt:
            self.num_prompts += 1
            block_ids, logprobs = prefill(self._peer, self._runner, prompt)
            kv = self._peer.kv(block_ids, f"cmpl-http-{self.num_prompts}")
        entries = [
            None if logprob is None else {str(token): {"logprob": logprob - self.logprobs_apart}}
            for token, logprob in zip(prompt, logprobs, strict=True)
        ]
        return {
            "choices": [{"prompt_logprobs": entries}],
            "kv_transfer_params": self._peer.params(kv, len(prompt)),
        }
