"""`warnings` of an answer: what a request asked for and did not get, in words. Pure.

A whole answer has them next to `usage`, a stream in the chunk that ends a choice.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.openai.asking import Telling
from router.openai.choices import Json
from router.openai.parsing import Parsing
from router.openai.tool_choice import Calling
from router.values import Ending


class Warnings:
    """Of one request."""

    def __init__(self, telling: Telling, parsing: Parsing, *, shows_tools: bool) -> None:
        self._telling = telling
        self._of_tools = _of_tools(telling, parsing, shows_tools=shows_tools)

    def of(self, *endings: Ending) -> Json:
        """Return the field, or nothing where there is nothing to warn about."""
        capped = (self._capped(each.num_prompt_tokens) for each in endings)
        told = [*self._of_tools, *dict.fromkeys(filter(None, capped))]
        return {"warnings": told} if told else {}

    def _capped(self, num_prompt_tokens: int) -> str:
        max_tokens, max_model_len = self._telling.max_tokens, self._telling.max_model_len
        if max_tokens is None or max_model_len is None:
            return ""
        rest = max_model_len - num_prompt_tokens
        if max_tokens <= rest:
            return ""
        return (
            f"max_tokens {max_tokens} was lowered to {rest}: max_model_len is {max_model_len}, and "
            f"the prompt has {num_prompt_tokens} tokens"
        )


def _of_tools(telling: Telling, parsing: Parsing, *, shows_tools: bool) -> Sequence[str]:
    if telling.calling is Calling.NONE:
        return ()
    told = []
    if not shows_tools:
        told.append("tools: this model's chat template does not show them to the model")
    if telling.calling is Calling.BY_MODEL:
        if telling.has_form:
            told.append("tools: an answer in a form calls none, unless tool_choice forces a call")
        elif not parsing.tools:
            told.append("tools: without --tool-parser, calls that the model writes are content")
    return told
