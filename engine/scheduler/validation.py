"""Request validation: rejects requests that can never be served, from the settings alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain

from baton.core.errors import ContextLengthExceeded, InvalidRequest
from baton.core.media import PICTURE_SALT, Picture, PictureRows, encoding_rows
from baton.core.pooling import PoolingKind
from baton.core.request import EmbedTask, EngineRequest, TaskOutput
from baton.core.structured_outputs import FIELD
from baton.engine.kv_cache.block_hashes import MAX_TOKEN_ID
from baton.engine.kv_cache.groups import CacheConfig
from baton.engine.request_media import RequestMedia
from baton.engine.scheduler.config import SchedulerConfig


def validate_request(
    request: EngineRequest,
    config: SchedulerConfig,
    cache: CacheConfig,
    adapters: Collection[str] = (),
) -> None:
    """Raise InvalidRequest if the request can never complete on this engine."""
    if request.adapter.id and request.adapter.id not in adapters:
        raise InvalidRequest(f"the adapter {request.adapter.name!r} is not served by this node")
    if request.media:
        _check_media(request, config)
    if request.task.output is TaskOutput.ENCODING:
        _check_encode(request, config)
    elif isinstance(request.task, EmbedTask):
        _check_embed(request, request.task, config)
    elif not config.can_generate:
        raise InvalidRequest(
            "this node generates no text: its model embeds or scores texts only, or it encodes "
            "pictures for other nodes"
        )
    _check_tokens(request, config)
    _check_lengths(request, config)
    _check_fits_cache(request, config, cache)
    if request.sampling.structured_outputs is not None and not config.eos_token_ids:
        raise InvalidRequest(
            "the model has no EOS token: structured_outputs cannot be enforced, leave it out",
            FIELD,
        )
    if request.sampling.extra_args:
        config.check_extra_args(request.sampling.extra_args)
    if request.receive_from is not None and request.send_to is not None:
        raise InvalidRequest("receive_from and send_to exclude each other: KV is passed on once")


def _check_media(request: EngineRequest, config: SchedulerConfig) -> None:
    is_computed = request.receive_from is None and request.task.output is not TaskOutput.KV
    if is_computed and not config.num_encoder_rows:
        raise InvalidRequest("this node encodes no pictures: send text only")
    end, media = 0, RequestMedia.of(request, config.picture_rows)
    for segment in request.media:
        if segment.start < end:
            raise InvalidRequest("the media of the prompt overlap, or are not in order")
        end = segment.start + segment.num_tokens
    if end > len(request.prompt_token_ids):
        raise InvalidRequest(f"a picture ends at token {end}, after the end of the prompt")
    if is_computed and media.lacking(0) and config.stored_rows is None:
        raise InvalidRequest("a picture of the prompt has no pixels")
    for picture in request.pictures:
        if bool(picture.dtype) is not config.takes_prompt_embeds:
            what = "embeddings" if picture.dtype else "pictures"
            raise InvalidRequest(f"this node takes no {what} in prompts")
        _check_picture(picture, media.num_rows.get(picture.digest, 0), config.picture_rows)
    largest = max(media.num_rows.values())
    if is_computed and largest > config.num_encoder_rows:
        raise InvalidRequest(
            f"a picture takes {largest} tokens, more than encoder-cache-tokens "
            f"({config.num_encoder_rows}): send a smaller one"
        )
    if config.whole_pictures:
        _check_whole_pictures(media, config, is_computed_here=request.receive_from is None)


def _check_whole_pictures(
    media: RequestMedia, config: SchedulerConfig, *, is_computed_here: bool
) -> None:
    """Refuse a picture in parts, or one that no step can compute together with its batch."""
    for segment in media.segments:
        num_rows = media.num_rows[segment.digest]
        if segment.num_tokens != num_rows:
            raise InvalidRequest(
                f"{segment.num_tokens} of the {num_rows} tokens of a picture follow each other: "
                "this model needs all of them in one place"
            )
        if is_computed_here and num_rows > config.max_whole_picture:
            raise InvalidRequest(
                f"a picture takes {num_rows} tokens, which this model computes in one step: "
                f"max-num-batched-tokens ({config.max_num_batched_tokens}) leaves "
                f"{config.max_whole_picture} of them beside max-num-seqs ({config.max_num_seqs}): "
                "start the node with more, or with fewer sequences"
            )


def _check_picture(picture: Picture, num_rows: int, picture_rows: PictureRows | None) -> None:
    """Refuse a picture that the tower cannot encode: its pass would fail."""
    if picture_rows is None:
        raise InvalidRequest("this node has no vision tower: send no pixels to it")
    try:
        expected = picture_rows(picture.height, picture.width)
    except ValueError as error:
        raise InvalidRequest(f"{error}: is the router's model folder another one?") from error
    if num_rows > expected:
        raise InvalidRequest(
            f"a picture of {picture.width}x{picture.height} pixels has {expected} tokens in this "
            f"model, and {num_rows} in the prompt: is the router's model folder another one?"
        )


def _check_encode(request: EngineRequest, config: SchedulerConfig) -> None:
    """Refuse what is not the prompt of a stored encoding: it would be cached as one."""
    rows, pictures = config.stored_rows, request.pictures
    if rows is None or config.picture_rows is None or config.can_generate:
        raise InvalidRequest("this node encodes no pictures for others: use an encode node")
    if len(pictures) != 1 or not request.cache_salt.startswith(PICTURE_SALT):
        raise InvalidRequest("an encode leg has one picture, and the salt of a stored encoding")
    [picture] = pictures
    stored = rows.prompt(picture.digest, config.picture_rows(picture.height, picture.width))
    if (request.prompt_token_ids, request.media) != (stored.token_ids, stored.media):
        raise InvalidRequest(
            f"the encoding of a picture of {picture.width}x{picture.height} pixels takes "
            f"{stored.num_blocks} blocks, not {len(request.prompt_token_ids) // rows.block_size}: "
            "is the router's model folder another one?"
        )


def _check_embed(request: EngineRequest, task: EmbedTask, config: SchedulerConfig) -> None:
    if config.pooling is None:
        raise InvalidRequest(
            "this model does not embed: its folder has no pooling (modules.json); start its nodes "
            "with --pooling last, mean, cls or tokens to embed with it all the same"
        )
    gives_vectors = task.output is TaskOutput.VECTORS
    if gives_vectors and config.pooling.num_labels:
        raise InvalidRequest("this model scores texts: it has no vectors of their tokens")
    if not gives_vectors and config.pooling.kind is PoolingKind.TOKENS:
        raise InvalidRequest(
            "this model has a vector for each token of a text, and none for the text: request the "
            "task token_embed, or start its nodes with --pooling last, mean or cls"
        )
    if request.send_to is not None or request.receive_from is not None:
        raise InvalidRequest("an embedding takes no part in a hand-off")
    if not 0 <= task.second_text_start <= len(request.prompt_token_ids):
        raise InvalidRequest(
            f"second_text_start is {task.second_text_start}; the prompt has "
            f"{len(request.prompt_token_ids)} tokens"
        )


def max_num_tokens(request: EngineRequest, config: SchedulerConfig) -> int:
    """Return the number of tokens, prompt included, at which a limit ends the request."""
    if request.task.is_pooling:
        return len(request.prompt_token_ids) + 1  # the token that is not sampled
    return min(len(request.prompt_token_ids) + request.sampling.max_tokens, config.max_model_len)


def max_sequence_length(config: SchedulerConfig, cache: CacheConfig) -> int:
    """Return the maximum of prompt and output tokens together for this model and KV cache."""
    if cache.layout.is_empty:
        return config.max_model_len
    num_slots = cache.max_blocks_per_group * cache.block_size
    # The last token is never an input, so its KV is never written.
    return min(config.max_model_len, num_slots + 1)


def _check_tokens(request: EngineRequest, config: SchedulerConfig) -> None:
    if not request.prompt_token_ids:
        raise InvalidRequest("the prompt is empty: it must have at least one token")
    highest = MAX_TOKEN_ID if config.vocab_size is None else config.vocab_size - 1
    for where, token_ids in _named_token_ids(request):
        for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
            if not 0 <= token_id <= highest:
                raise InvalidRequest(
                    f"token id {token_id} is outside the vocabulary in {where}: "
                    f"it must be from 0 to {highest}"
                )


def _named_token_ids(request: EngineRequest) -> Iterator[tuple[str, tuple[int, ...]]]:
    sampling = request.sampling
    yield "the prompt", request.prompt_token_ids
    yield "the answer so far", request.prior_output_token_ids
    yield "the prediction", request.predicted_token_ids
    yield "stop_token_ids", sampling.stop_token_ids
    yield "banned_token_ids", sampling.banned_token_ids
    yield "allowed_token_ids", sampling.allowed_token_ids or ()
    yield "banned_sequences", tuple(chain.from_iterable(sampling.banned_sequences))
    yield "logit_bias", tuple(sampling.logit_bias)
    yield "reasoning", () if sampling.reasoning is None else sampling.reasoning.token_ids


def _check_lengths(request: EngineRequest, config: SchedulerConfig) -> None:
    num_context = len(request.prompt_token_ids) + len(request.prior_output_token_ids)
    if request.task.is_pooling:
        if num_context > config.max_model_len:
            raise ContextLengthExceeded.of_text(num_context, config.max_model_len)
    elif num_context >= config.max_model_len:
        raise ContextLengthExceeded.of_prompt(num_context, config.max_model_len)
    if len(request.predicted_token_ids) > config.max_model_len:
        raise InvalidRequest(
            f"the prediction has {len(request.predicted_token_ids)} tokens; the model's context "
            f"has {config.max_model_len}: shorten it"
        )
    if len(request.prior_output_token_ids) >= request.sampling.max_tokens:
        raise InvalidRequest(
            f"{len(request.prior_output_token_ids)} tokens were generated already: "
            f"max_tokens {request.sampling.max_tokens} leaves nothing to do"
        )
    # KV from a peer needs no budget here. If it is lost, it is recomputed in chunks.
    is_computed_here = request.receive_from is None
    budget = config.max_num_batched_tokens
    if is_computed_here and not config.enable_chunked_prefill and num_context > budget:
        raise InvalidRequest(
            f"the prompt has {num_context} tokens; without chunked prefill at most "
            f"max_num_batched_tokens ({budget}) can be computed"
        )


def _check_fits_cache(request: EngineRequest, config: SchedulerConfig, cache: CacheConfig) -> None:
    if cache.layout.is_empty:
        return
    num_context = len(request.prompt_token_ids) + len(request.prior_output_token_ids)
    # The last token is never an input, so its KV is never written. A sender ends with its first
    # token. Draft tokens never exceed these slots.
    num_slots = num_context
    if request.send_to is None:
        num_slots = max_num_tokens(request, config) - 1
    num_blocks = -(-num_slots // cache.block_size)
    reads_stored = request.receive_from is None and not request.pictures
    if request.media and reads_stored and config.stored_rows is not None:
        rows = encoding_rows(request.media).values()  # held beside those of the prompt
        num_stored = sum(map(config.stored_rows.num_blocks, rows))
        num_prompt_blocks = -(-num_context // cache.block_size)
        num_prompt_blocks += -(-num_stored // len(cache.layout.groups))
        num_blocks = max(num_blocks, num_prompt_blocks)
    if num_blocks > cache.max_blocks_per_group:
        num_prompt_tokens = len(request.prompt_token_ids)
        longest = max_sequence_length(config, cache)
        need = (
            f"prompt and max_tokens may need {cache.describe_blocks(num_blocks)}; "
            f"the whole cache has {cache.num_blocks}"
        )
        remedy = "or start the node with a larger --kv-cache-memory"
        if request.send_to is not None or num_prompt_tokens >= longest:
            raise ContextLengthExceeded(
                f"{need}. The prompt has {num_prompt_tokens} tokens; with this cache, this model's "
                f"maximum context length is {longest} tokens: shorten the prompt, {remedy}"
            )
        raise InvalidRequest(
            f"{need}. With this prompt of {num_prompt_tokens} tokens, max_tokens may be at most "
            f"{longest - num_prompt_tokens}, {remedy}",
            "max_tokens",
        )
