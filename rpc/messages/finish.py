"""Conversion of the end of an answer: `Finish` is flat, its message has parts. Pure."""

from __future__ import annotations

from baton.core.finish import Finish, Served
from baton.rpc.messages.mapper import Converter, Mapper
from baton.v1 import inference_pb2

TIMES = ("dispatched_s", "first_token_s", "first_decoded_token_s", "finished_s")
COUNTS = ("num_prompt_tokens", "num_completion_tokens", "num_cached_prompt_tokens")
REMOTE, LOCAL = inference_pb2.PREFILL_PLACE_REMOTE, inference_pb2.PREFILL_PLACE_LOCAL

_SERVED = Mapper(Served, inference_pb2.Served, unmapped=("prefill", "is_prefill_remote"))


def _served_from(message: inference_pb2.Served) -> Served:
    return _SERVED.from_message(message, is_prefill_remote=message.prefill == REMOTE)


def _served_to(served: Served) -> inference_pb2.Served:
    return _SERVED.to_message(served, prefill=REMOTE if served.is_prefill_remote else LOCAL)


_FINISH = Mapper(
    Finish,
    inference_pb2.Finish,
    converters={"served": Converter(_served_from, _served_to)},
    unmapped=(*TIMES, *COUNTS, "timings", "usage"),
)


def finish_from(message: inference_pb2.Finish) -> Finish:
    usage = message.usage
    has_cached = usage.HasField("cached_prompt_tokens")
    return _FINISH.from_message(
        message,
        num_prompt_tokens=usage.prompt_tokens,
        num_completion_tokens=usage.completion_tokens,
        num_cached_prompt_tokens=usage.cached_prompt_tokens if has_cached else None,
        **{name: getattr(message.timings, name) for name in TIMES},
    )


def finish_to(finish: Finish) -> inference_pb2.Finish:
    return _FINISH.to_message(
        finish,
        usage=inference_pb2.Usage(
            prompt_tokens=finish.num_prompt_tokens,
            completion_tokens=finish.num_completion_tokens,
            cached_prompt_tokens=finish.num_cached_prompt_tokens,
        ),
        timings=inference_pb2.Timings(**{name: getattr(finish, name) for name in TIMES}),
    )
