"""Requests of a chaos run that generate text, and the check of their answers."""

from __future__ import annotations

import math
from contextlib import aclosing
from dataclasses import dataclass, replace

from baton.client import Answer, Generation, Prompt, Served
from benchmarks.chaos.sending import ChaosRequest, Sending, WrongAnswer

# Tolerance of logprobs: the order of summation differs between batches.
LOGPROB_TOLERANCE = 1e-2
STOP_CHARACTERS = 4


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """Prompt to continue. Implements `ChaosRequest`."""

    tag: int
    kind: str
    prompt: Prompt
    generation: Generation
    needs_stop: bool = False  # a string that ends the answer
    needs_prediction: bool = False  # of the answer, from which nodes that speculate draft

    async def send(self, sending: Sending) -> Answer:
        answer = Answer()
        generation = replace(self.generation, cache_salt=sending.salt)
        stream = sending.router.client.stream(self.prompt, generation, timeout_s=sending.timeout_s)
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                if chunk.first_index != len(answer.token_ids):
                    raise WrongAnswer(f"token {chunk.first_index} is out of order")
                answer.take(chunk)
                if answer.token_ids:
                    sending.on_tokens()
        return answer

    def refined(self, answer: Answer) -> ChaosRequest:
        """Return the request with what it needs of its answer.

        A stop string is from the middle of the answer; a prediction lacks it.
        """
        if not (self.needs_stop or self.needs_prediction):
            return self
        middle = len(answer.text) // 2
        before, cut = answer.text[:middle], answer.text[middle : middle + STOP_CHARACTERS]
        generation = self.generation
        if self.needs_stop:
            generation = replace(generation, stop=(cut,) if cut else ())
        if self.needs_prediction:
            generation = replace(generation, prediction=before + answer.text[middle + len(cut) :])
        return replace(self, generation=generation, needs_stop=False, needs_prediction=False)

    def difference(self, answer: Answer, expected: Answer) -> str | None:
        if answer.token_ids != expected.token_ids:
            pairs = zip(answer.token_ids, expected.token_ids, strict=False)
            index = next((i for i, (a, b) in enumerate(pairs) if a != b), "the end")
            counts = f"{len(answer.token_ids)} tokens, expected {len(expected.token_ids)}"
            return f"tokens differ from index {index} on; {counts}"
        if answer.text != expected.text:
            return f"text is {answer.text!r}, expected {expected.text!r}"
        if answer.finish is None or expected.finish is None:
            return "no finish reason"
        for name in ("reason", "stop_token_id", "stop_string", "num_prompt_tokens"):
            actual, wanted = getattr(answer.finish, name), getattr(expected.finish, name)
            if actual != wanted:
                return f"{name} is {actual}, expected {wanted}"
        return _difference_of_logprobs(answer, expected)

    def served(self, answer: Answer) -> Served | None:
        return None if answer.finish is None else answer.finish.served


def _difference_of_logprobs(answer: Answer, expected: Answer) -> str | None:
    if len(answer.logprobs) != len(expected.logprobs):
        return f"{len(answer.logprobs)} logprobs for {len(expected.logprobs)} tokens"
    for place, (actual, wanted) in enumerate(zip(answer.logprobs, expected.logprobs, strict=True)):
        is_close = math.isclose(actual.logprob, wanted.logprob, abs_tol=LOGPROB_TOLERANCE)
        if actual.token_id != wanted.token_id or len(actual.top) != len(wanted.top) or not is_close:
            return f"logprobs at index {place} are {actual}, expected {wanted}"
    return None
