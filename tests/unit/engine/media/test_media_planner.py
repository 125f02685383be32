"""Encodings of pictures, planned with the scheduler and its simulated runner."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from baton.core.errors import InvalidRequest
from baton.core.ids import RequestId
from baton.core.media import DIGEST_BYTES, MediaSegment, StoredRows, picture_salt
from baton.core.output import FailureCause, FinishReason
from baton.core.request import ENCODE, GENERATE, UNSAMPLED, EngineRequest
from baton.engine.errors import EncodingsUnaccounted, OutOfOrder
from baton.engine.kv_cache.groups import CacheConfig
from baton.engine.media.media_planner import EncoderCache, MediaPlanner
from baton.engine.request_media import RequestMedia
from baton.engine.scheduler.config import SchedulerConfig
from baton.engine.scheduler.validation import validate_request
from tests.support.engine_world import EngineWorld, pictures_of

PROMPT = list(range(8))
ROWS = StoredRows(row_bytes=1, block_bytes=2, block_size=2)
CAT, DOG, OX = (bytes([number]) * DIGEST_BYTES for number in range(1, 4))


def _world(
    num_rows: int = 12, step: int = 32, *, threshold: int = 0, whole_pictures: bool = False
) -> EngineWorld:
    config = SchedulerConfig(
        max_num_batched_tokens=step,
        max_num_seqs=4,
        long_prefill_token_threshold=threshold,
        picture_rows=lambda height, width: 100,
        encoder_cache_tokens=num_rows,
        whole_pictures=whole_pictures,
    )
    return EngineWorld(config, num_blocks=64, block_size=2)


def _world_with_stored_encodings(
    *, runs_ahead: bool = False, has_tower: bool = False
) -> EngineWorld:
    config = SchedulerConfig(
        max_num_seqs=4,
        picture_rows=(lambda height, width: 100) if has_tower else None,
        encoder_cache_tokens=12,
        stored_rows=ROWS,
        remote_headroom_blocks=0,
    )
    return EngineWorld(config, num_blocks=16, block_size=2, runs_ahead=runs_ahead)


class _Late(random.Random):
    """Draws by which no pass is launched early."""

    def random(self) -> float:
        return 1.0


def _fetch(world: EngineWorld, *digests: bytes) -> None:
    names = [world.fetch(ROWS.prompt(digest, num_rows=4)) for digest in digests]
    world.run_to_end()
    for name in names:
        served = world.receipts[name].outputs[-1].served
        assert served is not None
        assert served.num_cached_tokens == 4


def test_a_picture_of_many_requests_is_encoded_once() -> None:
    world = _world()
    for salt in "abc":  # which share no KV
        world.add(PROMPT, media=[MediaSegment(2, 4, CAT)], cache_salt=salt)
        world.run_to_end()

    assert world.runner.num_encoded == 1


def test_a_chunk_ends_before_a_picture_that_the_step_cannot_encode_any_more() -> None:
    world = _world(step=6)
    pictures = [MediaSegment(0, 4, CAT), MediaSegment(4, 4, DOG)]
    name = world.add(PROMPT, media=pictures)

    plans = [world.step(), world.step()]

    assert [list(plan.num_scheduled_tokens.values()) for plan in plans] == [[4], [4]]
    assert [len(plan.media.encoded[name]) for plan in plans] == [1, 1]
    world.run_to_end()


def test_the_encoding_that_was_used_least_recently_makes_room() -> None:
    world = _world(num_rows=8)
    for salt, picture in zip("abcd", (CAT, DOG, CAT, OX), strict=True):
        world.add(PROMPT, media=[MediaSegment(0, 4, picture)], cache_salt=salt)
        world.run_to_end()

    planner = world.scheduler._state.media
    assert isinstance(planner, MediaPlanner)
    cache = planner.cache
    assert (CAT in cache, DOG in cache, OX in cache) == (True, False, True)


def test_two_pictures_larger_than_the_cache_together_are_encoded_one_after_the_other() -> None:
    world = _world(num_rows=4)
    world.add(PROMPT, media=[MediaSegment(0, 4, CAT), MediaSegment(4, 4, DOG)])
    world.add(PROMPT, media=[MediaSegment(0, 4, DOG), MediaSegment(4, 4, CAT)], cache_salt="b")

    world.run_to_end()

    assert {world.finish_reason(name) for name in world.receipts} == {FinishReason.LENGTH}


def test_a_picture_of_a_failed_pass_is_encoded_again() -> None:
    world = _world()
    name = world.add(PROMPT, media=[MediaSegment(0, 4, CAT)])
    world.fail_next_token(name)
    world.run_to_end()
    world.add(PROMPT, media=[MediaSegment(0, 4, CAT)], cache_salt="b")
    world.run_to_end()

    assert world.runner.num_encoded == 2


def _chunks(world: EngineWorld) -> list[int]:
    plans = [world.step() for _ in range(4)]
    return [num for plan in plans for num in plan.num_scheduled_tokens.values() if num > 1]


def test_a_picture_whose_tokens_see_each_other_is_computed_in_one_step() -> None:
    world = _world(step=7, whole_pictures=True)
    world.add(PROMPT, media=[MediaSegment(2, 4, CAT)])
    assert _chunks(world) == [7]  # it is inside

    world = _world(step=7, whole_pictures=True)
    world.add(PROMPT, media=[MediaSegment(4, 4, CAT)])
    assert _chunks(world) == [4, 4]


def test_a_whole_picture_can_have_more_than_the_share_of_its_prompt() -> None:
    world = _world(step=7, threshold=2, whole_pictures=True)
    world.add(PROMPT[:1])  # while short prompts arrive, long ones get less
    world.add(PROMPT, media=[MediaSegment(4, 4, CAT)])

    assert _chunks(world) == [2, 2, 4]


def test_a_prefix_that_ends_inside_a_whole_picture_is_used_up_to_the_picture() -> None:
    world = _world(whole_pictures=True)
    pictures = [MediaSegment(1, 2, DOG), MediaSegment(3, 4, CAT)]
    found = []
    for prompt in (PROMPT[:7], PROMPT, [*PROMPT, 8]):
        name = world.add(prompt, media=pictures, max_tokens=1)
        world.run_to_end()
        served = world.receipts[name].outputs[-1].served
        found.append(None if served is None else served.num_cached_tokens)

    # Six tokens of the second are cached: they end in one picture, and four of them in the other.
    assert found == [0, 0, 8]


def test_a_decode_node_that_loses_the_kv_of_a_picture_gives_the_request_back() -> None:
    world = _world()
    name = world.add(PROMPT, receives=True, media=[MediaSegment(0, 4, CAT)])
    world.step()
    world.wire.lose(world.wire.wanted()[0], 0)
    world.run_to_end()

    assert world.finish_reason(name) is FinishReason.ERROR
    failure = world.receipts[name].outputs[-1].failure
    assert failure is not None
    assert "no pixels" in failure.reason


def test_a_request_without_pixels_reads_the_encodings_that_a_peer_has_written() -> None:
    world = _world_with_stored_encodings()
    _fetch(world, CAT, DOG)
    media = [MediaSegment(0, 4, CAT), MediaSegment(4, 4, DOG)]
    for seed in range(2):
        world.add([*PROMPT, seed], media=media, has_pixels=False)
    world.run_to_end()

    assert (world.runner.num_read, world.runner.num_encoded) == (2, 0)
    assert {world.finish_reason(name) for name in world.receipts} == {FinishReason.LENGTH}


def test_pictures_whose_kv_is_cached_need_no_pixels() -> None:
    world = _world_with_stored_encodings(has_tower=True)
    begin, media = PROMPT[:6], [MediaSegment(0, 4, CAT), MediaSegment(6, 2, DOG)]
    world.add(begin, media=media[:1])
    world.run_to_end()
    name = world.add([*PROMPT, 1], media=media, num_reported=4)
    assert [each.digest for each in world.receipts[name].request.pictures] == [DOG]
    world.run_to_end()

    assert world.finish_reason(name) is FinishReason.LENGTH
    assert world.runner.num_encoded == 2
    world.evict_cached()
    name = world.add([*PROMPT, 1], media=media, num_reported=4)
    world.run_to_end()
    failure = world.receipts[name].outputs[-1].failure
    assert failure is not None
    assert failure.cause is FailureCause.KV_LOST


def test_an_encoding_stays_until_its_tokens_are_computed() -> None:
    world = _world_with_stored_encodings()
    _fetch(world, CAT)
    world.add(PROMPT, media=[MediaSegment(2, 4, CAT)], has_pixels=False, max_tokens=9)
    world.step()
    world.evict_cached()
    world.scheduler.check()
    world.run_to_end()

    assert world.runner.num_read == 1


def test_an_encoding_stays_until_it_was_read_although_its_request_has_ended() -> None:
    world = _world_with_stored_encodings(runs_ahead=True)
    _fetch(world, CAT)
    world._pass_chance = _Late()
    world.add(2, max_tokens=8)
    world.step()
    name = world.add(PROMPT, media=[MediaSegment(2, 4, CAT)], has_pixels=False)
    world.step()
    assert world._ahead is not None
    assert name in world._ahead.plan.media.encoded  # of a pass that has not been launched
    world.abort(name)
    world.add(22, receives=True)  # the peer writes garbage into whatever it is granted
    world.step()
    world.run_to_end()

    assert world.runner.num_read == 1


def test_a_request_ends_if_an_encoding_is_evicted_before_it_starts() -> None:
    world = _world_with_stored_encodings()
    _fetch(world, CAT)
    world.evict_cached()
    name = world.add(PROMPT, media=[MediaSegment(2, 4, CAT)], has_pixels=False)
    world.run_to_end()

    failure = world.receipts[name].outputs[-1].failure
    assert failure is not None
    assert failure.cause is FailureCause.KV_LOST


def test_encodings_of_other_salts_are_not_found() -> None:
    world = _world_with_stored_encodings()
    _fetch(world, CAT)
    name = world.add(
        PROMPT, media=[MediaSegment(2, 4, CAT)], has_pixels=False, cache_salt="another"
    )
    world.run_to_end()

    assert world.finish_reason(name) is FinishReason.ERROR


def test_a_failed_pass_removes_the_encodings_that_it_read() -> None:
    world = _world_with_stored_encodings()
    _fetch(world, CAT)
    name = world.add(PROMPT, media=[MediaSegment(0, 4, CAT)], has_pixels=False)
    world.fail_next_token(name)
    world.run_to_end()
    again = world.add(PROMPT, media=[MediaSegment(0, 4, CAT)], has_pixels=False)
    world.run_to_end()

    assert world.finish_reason(again) is FinishReason.ERROR


def test_an_answer_fills_the_cache_once_the_encodings_of_its_prompt_are_read() -> None:
    world = _world_with_stored_encodings()
    _fetch(world, CAT)
    name = world.add(PROMPT, media=[MediaSegment(0, 4, CAT)], has_pixels=False, max_tokens=25)
    world.run_to_end()

    assert len(world.tokens(name)) == 25  # 32 slots in 16 blocks of two
    assert world.scheduler.stats().total_preemptions == 0


def test_encodings_that_leave_no_room_for_the_context_cannot_be_used() -> None:
    world = _world_with_stored_encodings()
    _fetch(world, CAT)
    planner, order = world.scheduler._state.media, _encode_order(task=GENERATE, pictures=())
    media = RequestMedia.of(replace(order, cache_salt=""))

    assert planner is not None
    assert [planner.can_encode(media, 0, num_blocks) for num_blocks in (1, 2)] == [False, True]


def test_a_request_that_does_not_fit_beside_its_encodings_is_refused() -> None:
    world = _world_with_stored_encodings()
    media = [MediaSegment(0, 12, CAT)]

    with pytest.raises(InvalidRequest, match="the whole cache has 16"):
        world.add(22, media=media, has_pixels=False)


def _encode_order(**fields: Any) -> EngineRequest:
    stored = ROWS.prompt(CAT, num_rows=4)
    order = EngineRequest(
        RequestId("encode"),
        stored.token_ids,
        UNSAMPLED,
        0,
        task=ENCODE,
        media=stored.media,
        pictures=pictures_of(stored.media),
        cache_salt=picture_salt("a"),
    )
    return replace(order, **fields)


ENCODING = SchedulerConfig(
    picture_rows=lambda height, width: 4, stored_rows=ROWS, can_generate=False
)


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (ENCODING, {"cache_salt": "a"}, "the salt of a stored encoding"),
        (ENCODING, {"pictures": ()}, "has one picture"),
        (ENCODING, {"prompt_token_ids": (0,) * 7}, "takes 2 blocks, not 3"),
        (ENCODING, {"task": GENERATE}, "this node generates no text"),
        (replace(ENCODING, can_generate=True), {}, "use an encode node"),
        (replace(ENCODING, picture_rows=None), {}, "has no vision tower"),
    ],
)
def test_encode_nodes_take_pictures_alone(
    config: SchedulerConfig, fields: dict[str, Any], message: str
) -> None:
    cache = CacheConfig(num_blocks=16, block_size=2)
    validate_request(_encode_order(), ENCODING, cache)

    with pytest.raises(InvalidRequest, match=message):
        validate_request(_encode_order(**fields), config, cache)


@pytest.mark.parametrize(
    ("media", "message"),
    [
        ([MediaSegment(0, 4, CAT), MediaSegment(3, 2, DOG)], "overlap"),
        ([MediaSegment(5, 4, CAT)], "after the end of the prompt"),
        ([MediaSegment(0, 2, CAT), MediaSegment(2, 6, CAT, 9)], "send a smaller one"),
    ],
)
def test_pictures_that_cannot_be_computed_are_refused(
    media: list[MediaSegment], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        _world().add(PROMPT, media=media)


@pytest.mark.parametrize(
    ("media", "message"),
    [
        ([MediaSegment(0, 5, CAT)], "leaves 4 of them beside max-num-seqs"),
        ([MediaSegment(0, 2, CAT), MediaSegment(3, 2, CAT, 2)], "2 of the 4 tokens of a picture"),
    ],
)
def test_pictures_that_no_step_can_compute_whole_are_refused(
    media: list[MediaSegment], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        _world(step=7, whole_pictures=True).add(PROMPT, media=media)


def test_the_cache_refuses_what_it_has_no_room_for_and_notices_what_it_lacks() -> None:
    cache = EncoderCache(4)
    cache.add(CAT, 3, used=())

    with pytest.raises(OutOfOrder, match="no room"):
        cache.add(DOG, 2, used=[CAT])
    with pytest.raises(EncodingsUnaccounted, match="1 encodings in use"):
        cache.check([DOG])
