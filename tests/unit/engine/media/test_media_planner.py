"""Encodings of pictures, planned with the scheduler and its simulated runner."""

from __future__ import annotations

import pytest

from baton.core.errors import InvalidRequest
from baton.core.media import DIGEST_BYTES, MediaSegment
from baton.core.output import FinishReason
from baton.engine.errors import EncodingsUnaccounted, OutOfOrder
from baton.engine.media.encoder_cache import EncoderCache
from baton.engine.scheduler.config import SchedulerConfig
from tests.support.engine_world import EngineWorld

PROMPT = list(range(8))
CAT, DOG, OX = (bytes([number]) * DIGEST_BYTES for number in range(1, 4))


def _world(
    num_rows: int = 12, step: int = 32, *, threshold: int = 0, whole_pictures: bool = False
) -> EngineWorld:
    config = SchedulerConfig(
        max_num_batched_tokens=step,
        max_num_seqs=4,
        long_prefill_token_threshold=threshold,
        encodes_pictures=True,
        encoder_cache_tokens=num_rows,
        whole_pictures=whole_pictures,
    )
    return EngineWorld(config, num_blocks=64, block_size=2)


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

    assert world.scheduler._state.media is not None
    cache = world.scheduler._state.media.cache
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
