"""Scheduling of models with windows: what is granted, sent and held."""

from __future__ import annotations

from baton.engine.kv_cache.groups import FULL, KvCacheSpec, KvGroup, group_layers
from baton.engine.scheduler.config import SchedulerConfig
from tests.support.engine_world import EngineWorld

# Gemma 3 1B: 26 layers, of which each sixth attends to everything.
GEMMA = group_layers([FULL if layer % 6 == 5 else KvCacheSpec(window=512) for layer in range(26)])
NUM_TOKENS = 4096
FULL_BLOCKS, WINDOW_BLOCKS = NUM_TOKENS // 16, 512 // 16


def test_only_blocks_within_windows_are_granted() -> None:
    world = _world()
    world.add(NUM_TOKENS, receives=True)

    [order] = world.step().kv_orders.receives

    assert len(order.block_ids) == FULL_BLOCKS + 6 * WINDOW_BLOCKS  # 448 of 7 * 256
    world.run_to_end()


def test_only_blocks_within_windows_are_sent() -> None:
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


def test_the_blocks_of_each_group_are_counted() -> None:
    world = _world()
    world.add(NUM_TOKENS, max_tokens=40)
    world.add(16, max_tokens=1)  # waits, or has ended
    world.step_until(lambda plan: not plan.num_prompt_tokens and plan.num_scheduled_tokens)

    held = _held(world)

    stats = world.scheduler.stats()
    assert sum(held.values()) == stats.num_blocks - stats.num_free_blocks
    assert held.pop("0 full") == FULL_BLOCKS + 1
    assert set(held) == {f"{number} window 512" for number in range(1, 7)}
    assert set(held.values()) <= {WINDOW_BLOCKS, WINDOW_BLOCKS + 1}
    world.run_to_end()
    assert not any(_held(world).values())


def test_the_hits_and_evictions_of_each_group_are_counted() -> None:
    world = _world(num_blocks=7 * 40)
    for _ in range(2):
        world.add(600, max_tokens=1)
        world.run_to_end()
    hits = {name: each.total_hits for name, each in world.scheduler.stats_by_group().items()}
    evictions_before = [each.total_evictions for each in world.scheduler.stats_by_group().values()]
    world.add([5] * 600, max_tokens=1)
    world.run_to_end()

    # After 37 blocks, a window of 512 tokens needs the last 32.
    assert hits == {"0 full": 37} | {f"{number} window 512": 32 for number in range(1, 7)}
    assert not any(evictions_before)
    evictions = [each.total_evictions for each in world.scheduler.stats_by_group().values()]
    assert all(evictions)
    # The last prompt takes 38 blocks of each group, three of which were not cached.
    assert sum(evictions) == 7 * (38 - (40 - 37))


def test_windows_let_more_conversations_fit() -> None:
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


def _world(num_blocks: int = 2048) -> EngineWorld:
    return EngineWorld(_config(), num_blocks=num_blocks, block_size=16, groups=GEMMA)


def _held(world: EngineWorld) -> dict[str, int]:
    return {name: each.num_held for name, each in world.scheduler.stats_by_group().items()}
