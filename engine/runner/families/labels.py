"""Labels of classifiers and rerankers, as config.json has them."""

from __future__ import annotations

from baton.checkpoint.checkpoint import Checkpoint
from baton.checkpoint.json_fields import JsonFields

FIELD = "classifier_from_token"
MAX_LABELS = 1 << 16


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


def read_num_labels(raw: JsonFields) -> int:
    """Return the number of labels. Raises ModelError."""
    labels = raw.get("id2label")
    if not isinstance(labels, dict):
        return raw.positive_int("num_labels", 2)
    if not 1 <= len(labels) <= MAX_LABELS:
        raise raw.wrong("id2label", f"must have 1 to {MAX_LABELS} labels")
    return len(labels)
