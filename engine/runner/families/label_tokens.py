"""Label of a reranker that is read from its head for tokens."""

from __future__ import annotations

from baton.checkpoint.checkpoint import Checkpoint
from baton.checkpoint.json_fields import JsonFields

FIELD = "classifier_from_token"


def read_label_tokens(raw: JsonFields, checkpoint: Checkpoint) -> tuple[int, int] | None:
    """Return two tokens: the label's logit is that of the second one less that of the first one.

    The field is vLLM's, for Qwen3-Reranker, whose tokens are `no` and `yes`. Raises ModelError.
    """
    if not raw.has(FIELD):
        return None
    words = raw.get(FIELD)
    if not isinstance(words, list) or len(words) != 2 or not all(type(w) is str for w in words):
        raise raw.wrong(FIELD, 'must be two tokens, such as ["no", "yes"]')
    tokenizer = checkpoint.load_tokenizer()
    found = [tokenizer.encode(word, add_special_tokens=False) for word in words]
    if [len(ids) for ids in found] != [1, 1]:
        raise raw.wrong(FIELD, f"must be two words that are one token each, not {words}")
    return found[0][0], found[1][0]
