"""Endpoints that load and unload adapters, with vLLM's fields."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from baton.router.doors.openai.request.bodies import Body, openai_body
from baton.router.http.bodies import Bodies, run_while_connected
from baton.router.orders.adapter_updates import AdapterOrder, AdapterUpdates
from baton.rpc.security.token import HEADER


class LoadBody(Body):
    lora_name: str
    lora_path: str
    load_inplace: bool = False  # replaces an adapter of this name
    model: str = ""  # Baton's own: the base, where there are several


class UnloadBody(Body):
    lora_name: str
    lora_int_id: int | None = None  # ignored, as in vLLM


@dataclass(frozen=True, slots=True)
class LoraEndpoints:
    adapters: AdapterUpdates
    bodies: Bodies

    async def load(self, request: Request) -> Response:
        async with self.bodies.receive(request) as received:
            body = openai_body(await received.fields(), LoadBody)
        order = AdapterOrder(body.lora_name, body.lora_path, body.model, body.load_inplace)
        update = self.adapters.load(order, request.headers.get(HEADER))
        await run_while_connected(request.receive, update)
        return _success(body.lora_name, "added")

    async def unload(self, request: Request) -> Response:
        async with self.bodies.receive(request) as received:
            body = openai_body(await received.fields(), UnloadBody)
        update = self.adapters.unload(body.lora_name, request.headers.get(HEADER))
        await run_while_connected(request.receive, update)
        return _success(body.lora_name, "removed")


def _success(name: str, done: str) -> Response:
    return PlainTextResponse(f"Success: LoRA adapter '{name}' {done} successfully.")
