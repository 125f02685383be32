"""Invalid scheduler settings are refused at start."""

from __future__ import annotations

import pytest

from baton.core.errors import InvalidConfig
from baton.engine.kv_cache.groups import CacheConfig
from baton.engine.scheduler.config import SchedulerConfig


def test_the_default_config_is_valid() -> None:
    config = SchedulerConfig()

    assert config.num_slots_per_decode == 1


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_num_seqs", 0),
        ("max_model_len", 1),
        ("num_lookahead_tokens", -1),
        ("remote_headroom_blocks", -1),
        ("long_prefill_token_threshold", -1),
        ("max_num_partial_prefills", 0),
        ("max_long_partial_prefills", 0),
        ("max_num_batched_tokens", 127),
    ],
)
def test_an_out_of_range_setting_is_named(setting: str, value: int) -> None:
    named = f"({setting}|{setting.replace('_', '-')}) is {value}"
    with pytest.raises(InvalidConfig, match=named):
        SchedulerConfig(**{"max_num_seqs": 128, setting: value})  # type: ignore[arg-type]


def test_the_token_budget_must_cover_one_token_per_request_without_drafts() -> None:
    SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=8, num_lookahead_tokens=2)

    with pytest.raises(InvalidConfig, match="at least max_num_seqs = 9"):
        SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=9)


def test_a_long_prefill_threshold_needs_chunks() -> None:
    with pytest.raises(InvalidConfig, match="needs enable_chunked_prefill"):
        SchedulerConfig(long_prefill_token_threshold=8, enable_chunked_prefill=False)


def test_a_limit_on_long_prefills_requires_a_threshold() -> None:
    with pytest.raises(InvalidConfig, match="needs long_prefill_token_threshold"):
        SchedulerConfig(max_long_partial_prefills=1)


def test_an_empty_cache_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="num_blocks is 0"):
        CacheConfig(num_blocks=0)
    with pytest.raises(InvalidConfig, match="block_size is 0"):
        CacheConfig(num_blocks=4, block_size=0)
