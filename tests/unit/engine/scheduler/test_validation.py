"""Validation: requests that can never complete are refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.errors import ContextLengthExceeded, InvalidRequest
from baton.core.ids import AdapterRef, HandoffId, NodeId, Peer, RequestId
from baton.core.media import MediaSegment, StoredRows
from baton.core.request import EngineRequest, ReceiveKv
from baton.core.sampling import SamplingParams
from baton.engine.kv_cache.groups import CacheConfig
from baton.engine.scheduler.config import SchedulerConfig
from baton.engine.scheduler.validation import max_num_tokens, max_sequence_length, validate_request
from tests.support.requests import make_engine_request

CONFIG = SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=4, max_model_len=20, vocab_size=100)
CACHE = CacheConfig(num_blocks=4, block_size=4)


def test_a_request_that_just_fits_is_accepted() -> None:
    validate_request(make_engine_request(range(10), max_tokens=7), CONFIG, CACHE)


def test_an_empty_prompt_is_refused() -> None:
    _assert_refused(make_engine_request([]), "the prompt is empty")


def test_media_are_refused() -> None:
    image = MediaSegment(0, 1, bytes(32))

    _assert_refused(replace(make_engine_request([1]), media=(image,)), "encodes no pictures")


def test_stored_encodings_need_blocks_only_where_a_prompt_is_computed() -> None:
    config = replace(CONFIG, stored_rows=StoredRows(row_bytes=1, block_bytes=2, block_size=4))
    image = MediaSegment(0, 4, bytes(32))  # its encoding takes two blocks
    filling = replace(make_engine_request(range(6), max_tokens=11), media=(image,))
    computed = replace(make_engine_request(range(10), max_tokens=1), media=(image,))
    peer = Peer(NodeId("p"), "p:1")
    received = replace(computed, receive_from=ReceiveKv(HandoffId("r", 1), peer))

    validate_request(received, config, CACHE)
    validate_request(filling, config, CACHE)  # its answer takes the place of the encoding
    with pytest.raises(InvalidRequest, match="may need 5 KV blocks; the whole cache has 4"):
        validate_request(computed, config, CACHE)


def test_an_adapter_is_refused() -> None:
    _assert_refused(
        replace(make_engine_request([1]), adapter=AdapterRef("a", "1")),
        "the adapter 'a' is not served",
    )


@pytest.mark.parametrize("token_id", [-1, 100])
def test_a_token_outside_the_vocabulary_is_refused(token_id: int) -> None:
    _assert_refused(
        make_engine_request([1, token_id]), f"token id {token_id} is outside the vocabulary"
    )


def test_a_prior_output_outside_the_vocabulary_is_refused() -> None:
    _assert_refused(make_engine_request(prior=[100]), "outside the vocabulary")


@pytest.mark.parametrize(
    ("predicted", "reason"),
    [((100,), "outside the vocabulary in the prediction"), ((1,) * 21, "has 21 tokens")],
)
def test_a_prediction_that_no_answer_can_repeat_is_refused(
    predicted: tuple[int, ...], reason: str
) -> None:
    _assert_refused(replace(make_engine_request([1]), predicted_token_ids=predicted), reason)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(stop_token_ids=(100,)),
        SamplingParams(banned_token_ids=(100,)),
        SamplingParams(allowed_token_ids=(100,)),
        SamplingParams(banned_sequences=((1, 2), (3, 100))),
        SamplingParams(logit_bias={100: 1.0}),
    ],
)
def test_a_sampling_value_outside_the_vocabulary_is_refused(sampling: SamplingParams) -> None:
    _assert_refused(make_engine_request(sampling=sampling), "token id 100 is outside")


def test_without_a_vocabulary_size_token_ids_must_fit_the_hash() -> None:
    unchecked = SchedulerConfig()

    validate_request(make_engine_request([2**32 - 1]), unchecked, CACHE)
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        validate_request(make_engine_request([2**32]), unchecked, CACHE)


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused() -> None:
    with pytest.raises(ContextLengthExceeded, match="maximum context length is 20 tokens"):
        validate_request(make_engine_request(range(20), max_tokens=1), CONFIG, CACHE)


def test_prior_output_tokens_count_towards_the_length() -> None:
    _assert_refused(
        make_engine_request(range(15), prior=range(5), max_tokens=9), "the prompt has 20 tokens"
    )


def test_a_migrated_request_without_remaining_tokens_is_refused() -> None:
    _assert_refused(make_engine_request(prior=[1, 2], max_tokens=2), "leaves nothing to do")


def test_a_request_larger_than_the_kv_cache_is_refused() -> None:
    _assert_refused(make_engine_request(range(10), max_tokens=8), "may need 5 KV blocks")


def test_speculation_needs_no_slot_past_the_end_of_the_answer() -> None:
    config = SchedulerConfig(max_num_seqs=1, num_lookahead_tokens=9)

    validate_request(make_engine_request(range(10), max_tokens=7), config, CACHE)


def test_a_sender_needs_blocks_for_its_prompt_only() -> None:
    request = make_engine_request(range(16), max_tokens=1000, send_to=HandoffId("r", 1))

    validate_request(request, SchedulerConfig(), CACHE)


def test_without_chunks_a_prompt_must_fit_one_step() -> None:
    whole = SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=4, enable_chunked_prefill=False)

    validate_request(make_engine_request(range(8)), whole, CACHE)
    with pytest.raises(InvalidRequest, match="without chunked prefill at most"):
        validate_request(make_engine_request(range(9)), whole, CACHE)


def test_a_request_is_not_both_sender_and_receiver() -> None:
    source = ReceiveKv(HandoffId("r", 1), Peer(NodeId("p"), "host:1"))
    sends = HandoffId("r", 1)
    request = EngineRequest(
        RequestId("r"), (1,), SamplingParams(), 0, receive_from=source, send_to=sends
    )

    _assert_refused(request, "exclude each other")


def test_the_limit_is_max_tokens_or_the_model_length() -> None:
    limits = [max_num_tokens(make_engine_request(range(10), max_tokens=n), CONFIG) for n in (3, 99)]

    assert limits == [13, 20]


@pytest.mark.parametrize("num_lookahead", [0, 3])
@pytest.mark.parametrize("num_blocks", [1, 4, 5, 6])
def test_the_longest_sequence_is_the_longest_that_is_accepted(
    num_blocks: int, num_lookahead: int
) -> None:
    config = replace(CONFIG, max_num_seqs=2, num_lookahead_tokens=num_lookahead)
    cache = replace(CACHE, num_blocks=num_blocks)
    longest = max_sequence_length(config, cache)

    if longest > 1:
        validate_request(make_engine_request([1], max_tokens=longest - 1), config, cache)
    if longest < config.max_model_len:
        with pytest.raises(
            InvalidRequest, match=f"max_tokens may be at most {longest - 1}|shorten"
        ):
            validate_request(make_engine_request([1], max_tokens=longest), config, cache)


def test_a_refusal_for_missing_blocks_states_the_length_that_fits() -> None:
    with pytest.raises(InvalidRequest, match=r"at most 9, or start .* --kv-cache") as refused:
        validate_request(make_engine_request(range(8), max_tokens=10), CONFIG, CACHE)
    assert refused.value.field == "max_tokens"
    for sender in (None, HandoffId("r", 1)):
        with pytest.raises(ContextLengthExceeded, match="length is 17 tokens: shorten the prompt"):
            validate_request(
                make_engine_request(range(17), max_tokens=2, send_to=sender), CONFIG, CACHE
            )


def _assert_refused(request: EngineRequest, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        validate_request(request, CONFIG, CACHE)
