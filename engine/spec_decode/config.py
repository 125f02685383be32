"""Settings of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.errors import InvalidConfig

METHODS = ("ngram", "suffix", "draft", "eagle", "eagle3", "mtp")
# They look drafts up, which often finds nothing; the others compute them.
LOOK_UP_METHODS = frozenset({"ngram", "suffix"})
MAX_PROPOSED_TOKENS = 32
AUTO = "auto"  # a method that is chosen when the model is known


@dataclass(frozen=True, slots=True)
class Speculation:
    """Settings of a proposer.

    By `ngram`, it proposes what followed the newest tokens earlier in the sequence, by `suffix`
    also what followed them in past answers of the same cache salt. By `eagle`, `eagle3` and `mtp`,
    a layer computes the drafts from the model's hidden states, and by `draft`, a smaller model.
    """

    num_tokens: int  # maximum of tokens proposed at once
    min_ngram: int = 3  # minimum length of a match
    max_ngram: int = 24  # maximum length of a match that is compared
    # With more rows, a step takes longer in proportion to its tokens: nothing is proposed, and the
    # time of passes is not measured.
    max_rows: int = 16
    method: str = "ngram"  # one of METHODS, or AUTO
    is_adaptive: bool = True  # draft what pays off; False: always as many tokens as there can be

    @property
    def looks_up(self) -> bool:
        return self.method in LOOK_UP_METHODS

    def __post_init__(self) -> None:
        if not 1 <= self.num_tokens <= MAX_PROPOSED_TOKENS:
            raise InvalidConfig(
                f"{self.num_tokens} tokens to propose at once; "
                f"it must be from 1 to {MAX_PROPOSED_TOKENS}"
            )
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise InvalidConfig(f"n-grams of {self.min_ngram} to {self.max_ngram} tokens")


def parse_speculation(written: str) -> Speculation | None:
    """Parse `ngram:5`, `ngram:5:fixed` or `auto`; of an empty text or `none`, return None.

    Raises InvalidConfig.
    """
    if written in ("", "none"):
        return None
    if written == AUTO:
        return Speculation(MAX_PROPOSED_TOKENS, method=AUTO)
    method, _, rest = written.partition(":")
    number, colon, ending = rest.partition(":")
    is_number = number.isascii() and number.isdigit()
    if method not in METHODS or not is_number or ending != ("fixed" if colon else ""):
        raise InvalidConfig(
            f"--speculative {written!r}: write it like suffix:5, with the tokens to propose at "
            "once, suffix:5:fixed to propose as many whatever it costs, or auto"
        )
    return Speculation(int(number), method=method, is_adaptive=not colon)
