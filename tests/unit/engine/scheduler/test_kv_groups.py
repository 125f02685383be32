"""Scheduling of models with windows: what is granted, sent and held."""

from __future__ import annotations

from engine.kv_cache.groups import FULL, KvCacheSpec, KvGroup, group_layers
from engine.scheduler.config import SchedulerConfig
from tests.support.engine_world import EngineWorld

# Gemma 3 1B: 26 layers, of which each sixth attends to everything.
GEMMA = group_layers([FULL if layer % 6 == 5 else KvCacheSpec(window=512) for layer in range(26)])
NUM_TOKENS = 4096
FULL_BLOCKS, WINDOW_BLOCKS = NUM_TOKENS // 16, 512 // 16


def test_only_what_windows_need_is_granted() -> None:
    world = _world()
    world.add(NUM_TOKENS, receives=True)

    [order] = world.step().kv_orders.receives

    assert len(order.block_ids) == FULL_BLOCKS + 6 * WINDOW_BLOCKS  # 448 of 7 * 256
    world.run_to_end()


def test_only_what_windows_need_is_sent() -> None:
    world = _world()
    world.add(NUM_TOKENS, sends=True)

    sends = [send for _ in range(8) for send in world.step().kv_orders.sends]

    assert sum(len(send.block_ids) for send in sends) == FULL_BLOCKS + 6 * WINDOW_BLOCKS
    world.run_to_end()


def test_a_running_request_holds_no_more_than_its_windows() -> None:
    world = _world()
    name = world.add(NUM_TOKENS, max_tokens=40)
    num_held = []

    world.step_until(lambda _: world.tokens(name))
    while world.finish_reason(name) is None:
        stats = world.scheduler.stats()
        num_held.append(stats.num_blocks - stats.num_free_blocks)
        world.step()

    most = FULL_BLOCKS + 3 + 6 * (WINDOW_BLOCKS + 2)
    assert max(num_held) <= most < 7 * FULL_BLOCKS / 3
    world.run_to_end()


def test_more_conversations_fit_than_without_windows() -> None:
    num_running = {}
    for groups in (GEMMA, tuple(KvGroup() for _ in GEMMA)):
        world = EngineWorld(
            _config(), num_blocks=7 * (FULL_BLOCKS + 1), block_size=16, groups=groups
        )
        for tenant in "abcd":
            world.add(NUM_TOKENS, receives=True, max_tokens=2, cache_salt=tenant)
        world.step()
        num_running[groups] = world.scheduler.stats().num_waiting_for_remote_kvs

    assert list(num_running.values()) == [3, 1]


def _config() -> SchedulerConfig:
    return SchedulerConfig(max_num_batched_tokens=1024, max_num_seqs=8)


def _world() -> EngineWorld:
    return EngineWorld(_config(), num_blocks=2048, block_size=16, groups=GEMMA)
