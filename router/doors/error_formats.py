"""Formats of errors by path, and responses for unknown paths and methods, with a hint."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from baton.router.doors.messages.errors import MESSAGES_ERRORS
from baton.router.doors.openai.errors import OPENAI_ERRORS
from baton.router.http.errors import ErrorFormat, HttpFailure

MAX_SHOWN_PATH_CHARACTERS = 200
USE_CHAT = "use /v1/chat/completions"
NO_CORS = (
    "cross-origin requests are off (CORS): start the router with allowed-origins, or call this "
    "server from a program"
)
# Parts of OpenAI's, Anthropic's and vLLM's APIs that clients look for here, by path prefix.
REASONS = {
    "/v1/conversations": "conversations are not stored here; send previous_response_id",
    "/v1/messages/batches": "batches are not stored here; send each request by itself",
    "/v1/moderations": "moderation is not implemented; Baton generates text only",
    "/v1/images": "images are not implemented; Baton generates text only",
    "/v1/audio": "audio is not implemented; Baton generates text only",
    "/v1/realtime": f"the Realtime API is not implemented; {USE_CHAT}",
    "/v1/assistants": f"the Assistants API is not implemented; {USE_CHAT}",
    "/v1/threads": f"the Assistants API is not implemented; {USE_CHAT}",
    "/v1/files": "files are not stored here; send them in messages, in base64",
    "/v1/batches": "batches are not stored here; send each request by itself",
    "/v1/fine_tuning": "Baton does not train; start it with the model you want (--model)",
    "/redoc": "the page of the API is /docs",
}
DEFAULT_ERRORS = OPENAI_ERRORS  # outside of the paths of another API
FORMATS: dict[str, ErrorFormat] = {"/v1/messages": MESSAGES_ERRORS}


async def handle_http_exception(request: Request, error: Exception) -> Response:
    """Handle Starlette's errors 404 and 405."""
    if not isinstance(error, HTTPException):
        raise error
    if error.status_code == 405:
        return _wrong_method(request, error)
    message = _not_found(request) if error.status_code == 404 else error.detail
    reason = error.detail.upper().replace(" ", "_")
    return _response(request, error, message, reason)


def _wrong_method(request: Request, error: HTTPException) -> Response:
    allowed = (error.headers or {}).get("Allow", "")
    path = _shorten(request.url.path)
    if request.method == "OPTIONS":
        body = {"path": path, "allow": allowed.split(", "), "message": NO_CORS}
        return JSONResponse(body, headers={"allow": f"{allowed}, OPTIONS"})
    message = f"{path} takes {allowed}, not {_shorten(request.method)}"
    return _response(request, error, message, "METHOD_NOT_ALLOWED")


def _response(request: Request, error: HTTPException, message: str, reason: str) -> Response:
    failure = HttpFailure(error.status_code, message, reason, headers=error.headers or {})
    return errors_of(request.url.path).response(failure)


def _not_found(request: Request) -> str:
    path = request.url.path
    served = list(_list_routes(request.app.routes))
    reason = next((REASONS[prefix] for prefix in REASONS if is_under(path, prefix)), None)
    if reason is None:
        known = {served_path for _, served_path in served}
        # A base URL without /v1, or with it twice.
        variants = (f"/v1{path}", path.removeprefix("/v1"))
        near = next((variant for variant in variants if variant in known), None)
        listed = ", ".join(f"{methods} {served_path}" for methods, served_path in served)
        reason = f"served are {listed}" if near is None else f"its path here is {near}"
    return f"{_shorten(request.method)} {_shorten(path)} is not served here: {reason}"


def _list_routes(routes: Iterable[BaseRoute]) -> Iterable[tuple[str, str]]:
    for route in routes:
        if isinstance(route, Route):
            methods = sorted((route.methods or set()) - {"HEAD"})
            yield "/".join(methods), route.path.replace(":path}", "}")


def _shorten(text: str) -> str:
    limit = MAX_SHOWN_PATH_CHARACTERS
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def errors_of(path: str) -> ErrorFormat:
    """Return the format of errors below this path."""
    formats = (FORMATS[prefix] for prefix in FORMATS if is_under(path, prefix))
    return next(formats, DEFAULT_ERRORS)


def is_under(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}/")
