"""Logprobs of the chosen and the top tokens, from raw logits before any sampling parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.core.logprobs import TokenLogprobs


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_tops: Sequence[int]
) -> list[TokenLogprobs]:
    """Compute logprobs from `logits`, [rows, vocab_size] in float32.

    The rank of a token is one plus the number of tokens with a higher logprob.
    """
    logprobs = logits.log_softmax(dim=-1)
    chosen_ids = torch.tensor(list(token_ids), dtype=torch.int64, device=logits.device)[:, None]
    chosen = logprobs.gather(1, chosen_ids)
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    max_tops = min(max(num_tops, default=0), logits.shape[1])
    top_values, top_ids = logprobs.topk(max_tops, dim=-1)
    columns = (token_ids, chosen.flatten().tolist(), ranks.tolist())
    tops = zip(num_tops, top_ids.tolist(), top_values.tolist(), strict=True)
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(zip(ids[:num], values[:num], strict=True)))
        for token_id, logprob, rank, (num, ids, values) in zip(*columns, tops, strict=True)
    ]
