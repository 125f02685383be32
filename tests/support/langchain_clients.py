"""Connections of LangChain's clients to a router, for each of its HTTP APIs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def langchain_chat(url: str, **more: Any) -> Any:
    module = pytest.importorskip("langchain_openai")
    settings = {"model": "tiny", "api_key": "none", "max_retries": 0, "temperature": 0}
    settings["stream_usage"] = True
    return module.ChatOpenAI(base_url=f"{url}/v1", **{**settings, **more})


def langchain_responses(url: str, **more: Any) -> Any:
    return langchain_chat(url, use_responses_api=True, **more)


def langchain_messages(url: str, **more: Any) -> Any:
    module = pytest.importorskip("langchain_anthropic")
    settings = {"model": "tiny", "api_key": "none", "max_retries": 0, "temperature": 0}
    kwargs = {"extra_body": more.pop("extra_body", {})}
    return module.ChatAnthropic(base_url=url, **{**settings, **more}, model_kwargs=kwargs)


LANGCHAIN: list[Callable[..., Any]] = [langchain_chat, langchain_responses, langchain_messages]
