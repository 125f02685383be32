"""Logprobs of tokens."""

from __future__ import annotations

from dataclasses import dataclass

# Logprobs of generated tokens: before all sampling settings, or after them, as in vLLM.
RAW_LOGPROBS, PROCESSED_LOGPROBS = LOGPROBS_MODES = "raw_logprobs", "processed_logprobs"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprob of one sampled token, and of the most likely tokens at its position."""

    token_id: int
    logprob: float
    rank: int  # 1: the most likely token
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Token sampled by prefill, with its logprobs. Sent together with the KV."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    draft_state: bytes = b""  # from which a draft head goes on; empty: there is no head
