"""Requests of a chaos run about pictures of numbers, and their check against an engine alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from io import BytesIO
from typing import Any

from baton.client import Generation
from baton.core.sampling import SamplingParams
from baton.llm import LLM
from benchmarks.chaos.generated_text import GeneratedText
from benchmarks.chaos.workload import MAX_TOKENS, MIN_TOKENS, Drawing, KnownAnswer, UnstableAnswer
from tools.number_pictures import draw

QUESTION = "Which number is in the picture?"
ABOUT_THE_SECOND = "Which number is in the second picture?"
NUM_SHARED = 4  # pictures that begin several chats

Message = dict[str, Any]


def _asked(drawing: Drawing, messages: Sequence[Message]) -> GeneratedText:
    max_tokens = drawing.draw.randint(MIN_TOKENS, MAX_TOKENS)
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
    return GeneratedText(drawing.tag, drawing.kind, tuple(messages), Generation(sampling))


def _one(drawing: Drawing) -> GeneratedText:
    """Ask about one picture. All these requests have the same text."""
    return _asked(drawing, [_user(QUESTION, _own_picture(drawing))])


def _two(drawing: Drawing) -> GeneratedText:
    """Ask about the second of two pictures, of which others have the first one, too."""
    pictures = (_shared_picture(drawing), _own_picture(drawing))
    return _asked(drawing, [_user(ABOUT_THE_SECOND, *pictures)])


def _chat(drawing: Drawing) -> GeneratedText:
    """Ask about a picture after turns about another, which is the beginning of other chats, too."""
    before = _user(QUESTION, _shared_picture(drawing))
    answer = {"role": "assistant", "content": "a number"}
    return _asked(drawing, [before, answer, _user(QUESTION, _own_picture(drawing))])


# They take turns. Another one is a line here.
PICTURE_KINDS: Mapping[str, Callable[[Drawing], GeneratedText]] = {
    "picture": _one,
    "two pictures": _two,
    "chat about pictures": _chat,
}


def check_alone(model: str, known: Sequence[KnownAnswer]) -> None:
    """Compare answers about pictures with those of an engine without a cluster and prefix hits.

    Raises UnstableAnswer for one that differs.
    """
    asked = [
        (one.request, one.answer)
        for one in known
        if isinstance(one.request, GeneratedText) and one.request.kind in PICTURE_KINDS
    ]
    if not asked:
        return
    with LLM(model, num_threads=1, enable_prefix_caching=False, show_progress=False) as llm:
        for request, answer in asked:
            text, images = _rendered(llm, request.prompt)
            sampling = request.generation.sampling
            if not isinstance(sampling, SamplingParams):
                raise TypeError(f"{sampling} is not what `_asked` gives")
            [alone] = llm.generate(text, sampling, images=[images])
            if alone.token_ids != answer.token_ids:
                raise UnstableAnswer(
                    f"request {request.tag} ({request.kind}): an engine alone answers "
                    f"{alone.text!r}, and the cluster {answer.text!r}"
                )


def _rendered(llm: LLM, messages: Any) -> tuple[str, list[bytes]]:
    """Return a chat as the router renders it, without the first token, and its images."""
    mark, images, turns = {"type": "image"}, list[bytes](), list[Message]()
    for message in messages:
        its = message.get("images", ())
        text = {"type": "text", "text": message["content"]}
        turns.append({"role": message["role"], "content": [*[mark] * len(its), text]})
        images += its
    rendered = llm.tokenizer.render_chat(turns)
    first = llm.tokenizer.decode(llm.tokenizer.encode("")[:1], skip_special_tokens=False)
    return rendered.removeprefix(first), images


def _user(text: str, *images: bytes) -> Message:
    return {"role": "user", "content": text, "images": list(images)}


def _own_picture(drawing: Drawing) -> bytes:
    """Return the picture of a number that no other request of a run has."""
    look = drawing.draw.getrandbits(32)
    return _picture(f"own {look}", str(10 + drawing.tag * 7919 % 9990))


def _shared_picture(drawing: Drawing) -> bytes:
    return _picture(f"shared {drawing.draw.randrange(NUM_SHARED)}")


@cache
def _picture(seed: str, number: str | None = None) -> bytes:
    file = BytesIO()
    draw(f"chaos {seed}", number).image.save(file, "PNG")
    return file.getvalue()
