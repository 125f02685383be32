"""Sources of a prompt's KV, and the reasons for computing what was computed before. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from baton.client import Finish, Served
from benchmarks.replay.prefix_tree import Holders

COMPUTED = "computed on "
UNKNOWN = "unknown"  # the node's count did not reach the router in time
KV_CACHE = " KV cache"

IN_FLIGHT = "in flight"  # requests with these tokens had not ended
OTHER_NODE = "other node"  # only other nodes had computed them
SAME_NODE = "same node"  # the node itself had computed them: evicted, or not stored in a tier


def tokens_by_source(finish: Finish) -> dict[str, int]:
    """Return the prompt tokens by their source; the sum is the number of prompt tokens."""
    cached = finish.num_cached_prompt_tokens
    if cached is None:
        return {UNKNOWN: finish.num_prompt_tokens}
    place = "prefill" if finish.served.is_prefill_remote else "decode"
    loaded = finish.served.prompt_tokens_loaded
    sources = {
        f"{place}{KV_CACHE}": cached - sum(loaded.values()),
        **loaded,
        f"{COMPUTED}{place}": finish.num_prompt_tokens - cached,
    }
    return {name: count for name, count in sources.items() if count}


def num_reused(by_source: Mapping[str, int]) -> int:
    """Return the tokens that were not computed."""
    return sum(
        count
        for name, count in by_source.items()
        if name != UNKNOWN and not name.startswith(COMPUTED)
    )


def holders_of(served: Served) -> Holders:
    """Return the nodes that have the whole prompt's KV after an answer."""
    return frozenset(filter(None, (served.prefill_node, served.decode_node)))


def lost_by_reason(
    finish: Finish, found: Sequence[Holders], reused: int, block_size: int
) -> Counter[str]:
    """Return the tokens that were computed although they had been seen before, by reason.

    `found` has the holders of each leading block when the request was sent.
    """
    served = finish.served
    node = served.prefill_node if served.is_prefill_remote else served.decode_node
    lost: Counter[str] = Counter()
    for holders in found[reused // block_size :]:
        if node in holders:
            lost[SAME_NODE] += block_size
        else:
            lost[OTHER_NODE if holders else IN_FLIGHT] += block_size
    return lost
