"""Speculative decoding as a setting: who proposes tokens, and how many at once."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import InvalidConfig

MOST_PROPOSED = 32


@dataclass(frozen=True, slots=True)
class Speculation:
    """Proposals by prompt lookup: what followed the newest tokens the last time they were there."""

    num_tokens: int  # that are proposed at once, at most
    min_ngram: int = 3  # so many of the newest tokens must have been there before
    max_ngram: int = 8  # more of them are not looked at
    # More rows than this make a step slower by about what they are: then nothing is proposed.
    max_rows: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.num_tokens <= MOST_PROPOSED:
            raise InvalidConfig(
                f"{self.num_tokens} tokens to propose at once; it must be from 1 to {MOST_PROPOSED}"
            )
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise InvalidConfig(f"n-grams of {self.min_ngram} to {self.max_ngram} tokens")


def parse_speculation(written: str) -> Speculation | None:
    """`ngram:5`; nothing, or `none`, is none. Raises InvalidConfig."""
    if written in ("", "none"):
        return None
    kind, _, number = written.partition(":")
    if kind != "ngram" or not number.isascii() or not number.isdigit():
        raise InvalidConfig(
            f"--speculative {written!r}: write it like ngram:5, with the tokens to propose at once"
        )
    return Speculation(int(number))
