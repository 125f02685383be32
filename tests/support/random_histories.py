"""Random engine histories, drawn from a seed, in larger numbers than Hypothesis can run.

`python -m tests.support.random_histories 0 20000` runs so many and says how many held.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from baton.core.errors import InvalidRequest
from baton.core.ids import HandoffId, RequestId
from baton.core.kv_hints import NO_KV_HINTS, KvHints
from baton.core.media import DIGEST_BYTES, MediaSegment, StoredRows, encoding_rows
from baton.core.output import FinishReason
from baton.core.pause_mode import PauseMode
from baton.core.pooling import Pooling, PoolingKind
from baton.core.request import EMBED, Task
from baton.core.sampling import SamplingParams
from baton.engine.containment import MAX_CRASHES_IN_A_ROW
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.groups import ONE_GROUP, CacheLayout, KvCacheSpec, KvGroup
from baton.engine.scheduler.config import LoadFailurePolicy, SchedulerConfig, SchedulingPolicy
from tests.support.engine_world import OTHER_SOURCE, SOURCE, VOCAB_SIZE, EngineWorld
from tests.support.fake_runner import CrashPlace
from tests.support.fake_wire import context_of

NUM_ACTIONS = 80
MAX_PICTURE_ROWS, PLACEHOLDER = 5, 7
Action = Callable[[EngineWorld, random.Random], None]
ALL_ROLES = ("local", "local", "receives", "receives", "sends")
HINTS = (
    NO_KV_HINTS,
    NO_KV_HINTS,
    KvHints(session_id="s", priority=3),
    KvHints(retain_s=9.0),
    KvHints(release=True),
    KvHints(prefetch=True),
)


def run_history(seed: int) -> EngineWorld:
    """Run one history to its end. Raises at the first violated invariant."""
    chance = random.Random(seed)
    pulls = random.Random(seed) if seed % 3 == 0 else None
    runs_ahead = bool(seed & 4)
    groups, num_state_blocks = draw_groups(chance), chance.choice([0, 0, 1, 2, 3])
    num_blocks = chance.randint(5, 16) * len(groups) - chance.randrange(len(groups))
    # Some caches hold little more than the state of one request.
    num_blocks += num_state_blocks * chance.choice([3, 3, 6, 12])
    evictions = random.Random(seed) if seed % 2 else None
    kinds = random.Random(seed) if seed % 5 < 3 else None
    pauses = random.Random(seed) if seed % 7 < 2 else None
    sights = random.Random(seed) if seed % 11 < 4 else None
    config = draw_config(chance, can_draft=not num_state_blocks)
    config = config if kinds is None else _draw_kinds(config, kinds)
    block_size = chance.choice([1, 2, 2, 3, 4])
    layout = CacheLayout(groups)
    world = EngineWorld(
        config if sights is None else _draw_encoder(config, sights, block_size, layout),
        num_blocks=num_blocks,
        groups=groups,
        num_state_blocks=num_state_blocks,
        block_size=block_size,
        enable_prefix_caching=chance.random() < 0.8 or pulls is not None,
        chance=chance,
        external_chance=evictions,
        runs_ahead=runs_ahead,
    )
    world.wire.num_proved_if_revoked = seed % 4
    roles = chance.choice([("local",), ("receives",), ("sends",), ALL_ROLES, ALL_ROLES])
    roles = ("local", "local", "sends", "receives") if pulls is not None else roles
    if evictions is not None and seed % 4 == 1:
        _draw_costs(world, random.Random(seed))
    for _ in range(chance.randint(5, NUM_ACTIONS)):
        act(world, chance, roles, pulls, kinds, sights)
        if pauses is not None and pauses.random() < 0.15:
            _pause_or_resume(world, pauses)
        for other in (evictions, pulls):
            if other is not None and other.random() < 0.2:
                world.evict_cached()
    world.run_to_end()
    return world


def run_texts(seed: int) -> EngineWorld:
    """Run a history of an encoder, which has no KV cache."""
    chance = random.Random(seed)
    config = _draw_kinds(draw_config(chance, can_draft=False), chance)
    world = EngineWorld(
        replace(config.without_chunks(), can_generate=False),
        num_blocks=0,
        groups=(),
        enable_prefix_caching=False,
        chance=chance,
        runs_ahead=bool(seed & 1),
    )
    actions: list[Action] = [_add_text, _add_text, _step, _step, _abort, _fail, _crash, _wait]
    for _ in range(chance.randint(5, NUM_ACTIONS)):
        chance.choice(actions)(world, chance)
    world.run_to_end()
    return world


def run_stream(seed: int) -> None:
    """Run a steady stream of prompts, most of which are stored outside, in virtual time.

    Some are much larger than the others. Raises if one takes much longer than it may wait, or has
    not ended at the end.
    """
    chance = random.Random(seed)
    num_blocks, block_size = chance.choice([40, 80]), 4
    config = SchedulerConfig(max_num_seqs=8, max_fill_wait_s=3.0)
    world = EngineWorld(
        config,
        num_blocks=num_blocks,
        block_size=block_size,
        external_chance=random.Random(seed),
    )
    small, large = num_blocks // 10, chance.choice([0.4, 0.5, 0.7])
    sizes = [small] * 30 + [int(num_blocks * large)]
    prompts = [_distinct_prompt(number, size * block_size + 1) for number, size in enumerate(sizes)]
    for prompt in prompts:
        world.add(prompt, max_tokens=1)
        world.run_to_end()
    world.evict_cached()
    share_received = chance.choice([0.0, 0.3, 1.0])
    slowest_s = chance.choice([0.3, 0.6, 2.0, 9.0])
    world.let_loads_take(lambda: chance.uniform(0.5, 1.0) * slowest_s)
    # A large prompt has waited for its load, and its blocks are lacking until the loads of others
    # have ended. The next one looks for its own load only then.
    limit_s = 2 * config.max_fill_wait_s + slowest_s + 1.0
    began_s: dict[RequestId, float] = {}
    for number in range(120):
        is_large = number % 20 == 5
        prompt = prompts[-1 if is_large else number % 30]
        name = world.add(prompt, receives=chance.random() < share_received, max_tokens=1)
        began_s[name] = world.now_s
        for _ in range(2):
            world.wire.settle()
            world.step()
        world.wait(0.1)
        for name in [each for each in began_s if world.finish_reason(each)]:
            took_s = world.now_s - began_s.pop(name)
            assert took_s < limit_s, f"{name} took {took_s} s"
    for name, at_s in began_s.items():
        assert world.now_s - at_s < limit_s, f"{name} has not ended"
    world.let_loads_take(lambda: 0.0)
    world.run_to_end()


def run_priced_loads(seed: int) -> None:
    """Ask again and again for prompts that an external cache holds, for which estimates are wrong.

    Raises if a prompt is loaded against the estimate, or computed against it, or takes longer than
    the way that was taken.
    """
    chance = random.Random(seed)
    token_s, num_blocks, block_size = 0.01, 6, 4
    block_s = token_s * block_size * chance.choice([0.05, 0.3, 0.8, 1.25, 10.0])
    world = EngineWorld(
        SchedulerConfig(),
        num_blocks=80,
        block_size=block_size,
        external_chance=random.Random(seed),
        external_fails=False,
    )
    errors = [1.0]
    world.price(token_s, block_s, lambda: errors[-1])
    prompts = [_distinct_prompt(number, num_blocks * block_size + 1) for number in range(5)]
    for prompt in prompts:
        world.add(prompt, max_tokens=1)
        world.run_to_end()
    compute_s = num_blocks * block_size * token_s
    for _ in range(20):
        world.evict_cached()
        errors.append(chance.choice([1.0, 1.0, 1.0, 0.01, 100.0]))
        began_s = world.now_s
        name = world.add(chance.choice(prompts), max_tokens=1)
        world.run_to_end()
        served = world.receipts[name].outputs[-1].served
        assert served is not None
        is_loaded = sum(served.loaded_tokens.values()) == num_blocks * block_size
        assert is_loaded is (num_blocks * block_s * errors[-1] < compute_s)
        way_s = num_blocks * block_s if is_loaded else compute_s
        assert world.now_s - began_s < way_s + 1.0


def _draw_costs(world: EngineWorld, chance: random.Random) -> None:
    token_s, block_s = chance.choice([0.001, 0.05]), chance.choice([0.0, 0.01, 0.1, 2.0])
    world.price(token_s, block_s, lambda: chance.choice([1.0, 1.0, 0.02, 50.0]))


def _distinct_prompt(number: int, length: int) -> list[int]:
    """Return a prompt whose first block no other number's prompt has."""
    digits = [number % VOCAB_SIZE, number // VOCAB_SIZE % VOCAB_SIZE]
    return (digits * length)[:2] + [(number + place) % VOCAB_SIZE for place in range(length - 2)]


def draw_config(chance: random.Random, *, can_draft: bool = True) -> SchedulerConfig:
    threshold = chance.choice([0, 0, 2, 5])
    max_num_seqs = chance.randint(1, 6)
    num_lookahead_tokens = chance.choice([0, 0, 0, 1, 3, 6]) if can_draft else 0
    return SchedulerConfig(
        max_num_batched_tokens=max_num_seqs + chance.choice([0, 1, 3, 8, 40]),
        max_num_seqs=max_num_seqs,
        max_model_len=chance.choice([7, 12, 16, 30, 30]),
        eos_token_ids=frozenset(chance.choice([(), (), (1,)])),
        policy=chance.choice(list(SchedulingPolicy)),
        enable_chunked_prefill=bool(threshold) or chance.random() < 0.7,
        long_prefill_token_threshold=threshold,
        max_num_partial_prefills=chance.choice([None, 1, 2]),
        max_long_partial_prefills=chance.choice([None, 1]) if threshold else None,
        num_lookahead_tokens=num_lookahead_tokens,
        kv_load_failure_policy=chance.choice(list(LoadFailurePolicy)),
        remote_headroom_blocks=chance.choice([0, 1, 2]),
        push_layers=chance.random() < 0.5,
    )


def draw_groups(chance: random.Random) -> tuple[KvGroup, ...]:
    """Return one group with full attention, or up to four groups of any kinds."""
    if chance.random() < 0.5:
        return ONE_GROUP
    kinds = [
        lambda: KvCacheSpec(),
        lambda: KvCacheSpec(window=chance.randint(1, 9)),
        lambda: KvCacheSpec(chunk=chance.randint(1, 9)),
    ]
    return tuple(KvGroup(chance.choice(kinds)()) for _ in range(chance.randint(1, 4)))


def act(
    world: EngineWorld,
    chance: random.Random,
    roles: Sequence[str],
    pulls: random.Random | None,
    kinds: random.Random | None,
    sights: random.Random | None = None,
) -> None:
    """Apply one random event, mostly a step or a new request.

    With `pulls`, peers are said to have prefixes, and pull blocks. With `kinds`, some requests have
    adapters, and some are pooled. With `sights`, some have pictures.
    """
    weight_by_action: dict[Action, float] = {
        partial(_add, roles=roles, pulls=pulls, kinds=kinds, sights=sights): 4,
        partial(_continue, roles=roles, pulls=pulls, kinds=kinds): 1.5,
        **({} if pulls is None else {_request_blocks: 2}),
        _step: 40 if world.runs_ahead else 12,
        _abort: 0.6,
        _wire_in: 4,
        _wire_out: 2,
        _give_up_sending: 0.3,
        _fail: 0.3,
        _crash: 0.3,
        _reset: 0.3,
        _wait: 0.5,
        **({_burst: 1} if "receives" in roles else {}),
        **({_grant: 2} if "sends" in roles else {}),
    }
    action = chance.choices(list(weight_by_action), list(weight_by_action.values()))[0]
    action(world, chance)


def draw_tokens(chance: random.Random, longest: int, block_size: int = 1) -> list[int]:
    """Return a prompt, often with a prefix of another one and often of whole blocks."""
    length = chance.randint(1, longest)
    if chance.random() < 0.5:
        length = -(-length // block_size) * block_size
    shared = chance.choice([length, length, length // 2, 0])
    line = chance.randint(0, 1)
    own = [chance.randrange(VOCAB_SIZE) for _ in range(length - shared)]
    return [(place + line) % VOCAB_SIZE for place in range(shared)] + own


def _add(
    world: EngineWorld,
    chance: random.Random,
    roles: Sequence[str],
    pulls: random.Random | None,
    kinds: random.Random | None,
    sights: random.Random | None,
) -> None:
    max_tokens = chance.choice([1, 2, 4, 8, 12, 16, 40])
    num_prior = min(max_tokens - 1, 15)
    prior = draw_tokens(chance, num_prior) if num_prior and chance.random() < 0.2 else []
    role = chance.choice(roles)
    hints = HINTS[len(world.receipts) % len(HINTS)]
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=chance.choice([0, 0, max_tokens // 2]),
        stop_token_ids=chance.choice([(), (), (3,)]),
        ignore_eos=chance.random() < 0.2,
        logprobs=chance.choice([None, None, 1]),
        prompt_logprobs=chance.choice([None, None, None, 1]),
    )
    prompt = draw_tokens(chance, chance.choice([3, 8, 20]), world.kv.block_size)
    media = _draw_media(prompt, sights, whole_pictures=world.runner.whole_pictures)
    seen = [each.request for each in world.receipts.values() if each.request.media]
    if sights is not None and seen and sights.random() < 0.5:  # prefixes often end in pictures
        earlier = sights.choice(seen)
        prompt, media = list(earlier.prompt_token_ids), list(earlier.media)
    salt, rows = chance.choice(["", "", "tenant"]), world.config.stored_rows
    is_stored = sights is not None and rows is not None and sights.random() < 0.5
    try:
        if is_stored and rows is not None:
            for digest, num_rows in encoding_rows(media).items():
                world.fetch(rows.prompt(digest, num_rows), salt)
            for _ in range(4):
                world.wire.settle()
                world.step()
        world.add(
            prompt,
            receives=role == "receives",
            sends=role == "sends",
            prior=prior,
            priority=chance.randint(0, 2),
            cache_salt=salt,
            sampling=sampling,
            is_paced=role == "local" and chance.random() < 0.2,
            num_promised=_draw_promise(pulls),
            kv_hints=hints if role == "local" or not hints.prefetch else NO_KV_HINTS,
            adapter=_draw_adapter(kinds),
            task=_draw_task(role, kinds),
            media=media,
            has_pixels=not is_stored,
            num_reported=0 if sights is None else sights.choice([0, 0, 0, len(prompt) // 2]),
        )
    except InvalidRequest:
        return


def _add_text(world: EngineWorld, chance: random.Random) -> None:
    with suppress(InvalidRequest):
        world.add(
            draw_tokens(chance, chance.choice([3, 8, 20])),
            priority=chance.randint(0, 2),
            adapter=_draw_adapter(chance),
            task=EMBED,
        )


def _draw_kinds(config: SchedulerConfig, kinds: random.Random) -> SchedulerConfig:
    kind = kinds.choice([PoolingKind.LAST, PoolingKind.MEAN])
    wait_s = kinds.choice([0.0, 1.0, 5.0])
    return replace(
        config,
        pooling=Pooling(kind),
        max_loras=kinds.randint(1, 3),
        max_adapter_wait_s=wait_s,
    )


def _draw_encoder(
    config: SchedulerConfig, sights: random.Random, block_size: int, layout: CacheLayout
) -> SchedulerConfig:
    num_rows = sights.choice([MAX_PICTURE_ROWS, MAX_PICTURE_ROWS + 1, 10, 100])
    group = layout.lasting_group
    stored = None if group is None else StoredRows(1, block_size, block_size, group)
    return replace(
        config,
        picture_rows=lambda height, width: MAX_PICTURE_ROWS,
        encoder_cache_tokens=num_rows,
        stored_rows=stored,
        whole_pictures=sights.random() < 0.5,
    )


def _draw_media(
    prompt: list[int], sights: random.Random | None, *, whole_pictures: bool
) -> list[MediaSegment]:
    """Return pictures of a prompt, some in two runs if they can be. Writes their placeholders."""
    media: list[MediaSegment] = []
    end = 0 if sights is not None and sights.random() < 0.5 else len(prompt)
    while sights is not None:
        rows, start = sights.randint(1, MAX_PICTURE_ROWS), end + sights.choice([0, 0, 1, 3])
        runs = [range(rows)]
        if rows > 2 and sights.random() < 0.4 and not whole_pictures:
            runs = [range(2), range(2, rows)]
        for run in runs:
            place = start + run.start + (run.start > 0)  # a text token is between runs
            if place + len(run) > len(prompt):
                return media
            digest = bytes([rows]) * DIGEST_BYTES
            media.append(MediaSegment(place, len(run), digest, run.start))
            end = place + len(run)
            prompt[place:end] = [PLACEHOLDER] * len(run)
    return media


def _draw_adapter(kinds: random.Random | None) -> str:
    return "" if kinds is None else kinds.choice(["", "a", "b", "c"])


def _draw_task(role: str, kinds: random.Random | None) -> Task | None:
    is_pooling = role == "local" and kinds is not None and kinds.random() < 0.4
    return EMBED if is_pooling else None


def _draw_promise(pulls: random.Random | None) -> int | None:
    return pulls.randint(1, 30) if pulls is not None and pulls.random() < 0.9 else None


def _request_blocks(world: EngineWorld, chance: random.Random) -> None:
    """Pull a few blocks as a peer, mostly such that are cached or stored in a tier."""
    known = world.wire.known_names
    outside = world.external
    pool = world.scheduler._state.cache.pool
    cached = [
        name
        for name in known
        if pool.is_cached(BlockHash(name)) or (outside is not None and name in outside.blocks)
    ]
    names = cached if cached and chance.random() < 0.9 else known
    if names:
        world.request_blocks([chance.choice(names) for _ in range(chance.randint(1, 3))])


def _continue(
    world: EngineWorld,
    chance: random.Random,
    roles: Sequence[str],
    pulls: random.Random | None,
    kinds: random.Random | None,
) -> None:
    """Add a prompt that begins with an earlier one and its answer, as in a conversation."""
    if not world.receipts:
        return
    earlier = chance.choice(list(world.receipts.values()))
    adapter = earlier.request.adapter.id
    role = chance.choice(roles)
    with suppress(InvalidRequest):
        world.add(
            [*context_of(earlier.request), *earlier.token_ids, *draw_tokens(chance, 2)],
            receives=role == "receives",
            sends=role == "sends",
            cache_salt=earlier.request.cache_salt,
            max_tokens=chance.choice([1, 4, 16]),
            num_promised=_draw_promise(pulls),
            adapter=adapter if kinds is None or kinds.random() < 0.7 else _draw_adapter(kinds),
            media=earlier.request.media,
        )


def _burst(world: EngineWorld, chance: random.Random) -> None:
    """Add requests with a common prefix at once, mostly received from one peer."""
    shared = draw_tokens(chance, 12, world.kv.block_size)
    for _ in range(chance.randint(2, 5)):
        own = draw_tokens(chance, 4)
        source = chance.choice([SOURCE, SOURCE, SOURCE, OTHER_SOURCE])
        sampling = SamplingParams(max_tokens=chance.choice([1, 2, 8]))
        with suppress(InvalidRequest):
            world.add(
                [*shared, *own],
                receives=True,
                priority=chance.choice([0, 0, 1]),
                sampling=sampling,
                source=source,
            )


def _step(world: EngineWorld, chance: random.Random) -> None:
    world.step()


def _abort(world: EngineWorld, chance: random.Random) -> None:
    living = world.living()
    if living:
        world.abort(chance.choice(living))


def _fail(world: EngineWorld, chance: random.Random) -> None:
    if world.receipts:
        world.fail_next_token(chance.choice(list(world.receipts)))


def _crash(world: EngineWorld, chance: random.Random) -> None:
    """Crash one request; several in succession would count as a failure of the engine."""
    living = [name for name in world.living() if name not in world.runner.crashing]
    if living and len(world.runner.crashing) + 1 < MAX_CRASHES_IN_A_ROW:
        world.crash(chance.choice(living), chance.choice(list(CrashPlace)))


def _reset(world: EngineWorld, chance: random.Random) -> None:
    world.reset_prefix_cache()


def _pause_or_resume(world: EngineWorld, chance: random.Random) -> None:
    match chance.randrange(3):
        case 0:
            world.pause(chance.choice(list(PauseMode)))
        case 1:
            world.resume()
        case _:
            world.reset_prefix_cache(reset_running=True)


def _wait(world: EngineWorld, chance: random.Random) -> None:
    world.wait(chance.choice([0.1, 1.0, 5.0]))


def _wire_in(world: EngineWorld, chance: random.Random) -> None:
    if not world.wire.incoming:
        return
    handoff_id = chance.choice(list(world.wire.incoming))
    if world.wire.incoming[handoff_id].is_over and chance.random() < 0.9:
        world.wire.release(handoff_id)
    elif chance.random() < 0.7 or world.wire.incoming[handoff_id].is_over:
        world.wire.land(handoff_id)
    else:
        world.wire.lose(handoff_id, num_proved=chance.choice([0, 1, 2, 5]))


def _wire_out(world: EngineWorld, chance: random.Random) -> None:
    """End a send, mostly in time; sometimes the peer leaves before all is sent."""
    ended = [h for h, outgoing in world.wire.outgoing.items() if outgoing.is_ended]
    begun = [h for h, outgoing in world.wire.outgoing.items() if outgoing.block_ids]
    candidates = begun if chance.random() < 0.1 else ended
    if candidates:
        world.wire.end_sending(chance.choice(candidates))


def _grant(world: EngineWorld, chance: random.Random) -> None:
    """Grant blocks for a send, sometimes before its request comes."""
    if world.wire.outgoing and chance.random() < 0.9:
        world.wire.grant(chance.choice(list(world.wire.outgoing)))
    else:
        world.wire.grant(HandoffId(RequestId(f"r{len(world.receipts)}"), 1))


def _give_up_sending(world: EngineWorld, chance: random.Random) -> None:
    if world.wire.outgoing:
        world.withdraw_completed(chance.choice(list(world.wire.outgoing)))


def main(arguments: Sequence[str]) -> None:
    first, count = int(arguments[0]), int(arguments[1])
    num_requests = num_preemptions = num_pulled = num_given = num_encoded = num_read = 0
    num_by_reason: dict[FinishReason | None, int] = {}
    for seed in range(first, first + count):
        try:
            world = run_history(seed)
        except Exception as failure:
            failure.add_note(f"history {seed}")
            raise
        num_requests += len(world.receipts)
        num_preemptions += world.scheduler.stats().total_preemptions
        num_pulled += world.wire.num_pulled
        num_given += world.wire.num_given
        num_encoded += world.runner.num_encoded
        num_read += world.runner.num_read
        for receipt in world.receipts.values():
            reason = receipt.finish_reason
            num_by_reason[reason] = num_by_reason.get(reason, 0) + 1
    print(f"{count} histories held: {num_requests} requests, {num_preemptions} preemptions")
    print(f"blocks pulled: {num_pulled}, and pulled by peers: {num_given}")
    print(f"pictures encoded: {num_encoded}, and encodings read from blocks: {num_read}")
    print({reason.name: count for reason, count in num_by_reason.items() if reason is not None})


if __name__ == "__main__":
    main(sys.argv[1:])
