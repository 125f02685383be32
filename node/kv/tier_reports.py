"""Reports of the tiers below the KV cache, for routers and operators."""

from __future__ import annotations

from collections.abc import Mapping

from baton.kv_transfer.tiers.tiered_kv import TieredKv
from baton.rpc.node_info import TierReport


def tier_reports(tiers: TieredKv, loaded_tokens: Mapping[str, int]) -> tuple[TierReport, ...]:
    return tuple(
        TierReport(
            name=tier.name,
            num_blocks=tier.num_blocks,
            num_bytes=tier.num_bytes,
            max_bytes=tier.max_bytes,
            num_loaded_tokens=loaded_tokens.get(tier.name, 0),
            num_loaded_blocks=tier.counters.num_loaded,
            num_stored_blocks=tier.counters.num_stored,
            num_evicted_blocks=tier.num_evicted,
            num_failed_blocks=tier.counters.num_failed,
        )
        for tier in tiers.status()
    )
