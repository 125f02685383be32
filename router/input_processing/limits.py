"""Size limits of one request and its answers, the same over gRPC and HTTP. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.errors import ContextLengthExceeded, InvalidRequest
from baton.core.kv_hints import KvHints
from baton.core.sampling import SamplingParams
from baton.rpc.messages.limits import MAX_MESSAGE_BYTES, MAX_VECTORS_BYTES

MAX_NAME_CHARACTERS = 256  # of request ids, models and cache salts: logs and metrics hold them
MAX_ANSWERS = 128  # `n` of one request; each answer is a sequence of its own
MAX_CHAT_MESSAGES = 1 << 14
MAX_TOOLS = 1 << 10
MAX_EXTRA_ARGS = 64
MAX_TOKENS_TO_DETOKENIZE = 1 << 20
# The text of an answer is searched for each stop string after every token.
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024
MAX_STOP_ENTRIES = 1024  # including empty ones, which are ignored
# Every token of an answer is compared with each spelling of each word.
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARACTERS = 256
# Total size of the sampling parameters of all answers, each of which has its own copy.
MAX_SAMPLING_SIZE = 1 << 18
MAX_LOGPROBS_PER_POSITION = 1 << 11  # of all answers together, that one step can return
# Positions with logprobs, at most 65 entries each, converted before the event loop gets a turn.
MAX_POSITIONS_PER_SLICE = 256
# Upper bounds of protobuf's bytes for an entry of TokenLogprobs.top, and for the rest of a token.
TOP_BYTES = 17
TOKEN_BYTES = 40
# Limit of the logprobs in one HTTP body, for generated tokens and prompts separately. Each makes
# about 35 MB of JSON.
MAX_LOGPROBS_PER_REQUEST = 1 << 19


# Spaces of all widths, and joiners, which Python does not count as printable.
FILE_NAME_CHARACTERS = dict.fromkeys(
    (0xA0, 0x1680, *range(0x2000, 0x200B), 0x200C, 0x200D, 0x202F, 0x205F, 0x3000), " "
)


def is_valid_name(value: str) -> bool:
    return 0 < len(value) <= MAX_NAME_CHARACTERS and value.isprintable()


def check_name(field: str, value: str) -> None:
    """Raises InvalidRequest for a name that is too long or not printable, which breaks logs."""
    if value and is_valid_name(value):
        return
    if len(value) > MAX_NAME_CHARACTERS:
        raise InvalidRequest(
            f"{field} has {len(value)} characters; at most {MAX_NAME_CHARACTERS} are allowed", field
        )
    if not value.isprintable():
        raise InvalidRequest(
            f"{field} has characters that are not printable; leave them out", field
        )


def check_file_name(field: str, value: str) -> None:
    """Raises InvalidRequest as `check_name` does, but allows any space, and joined emoji."""
    check_name(field, value.translate(FILE_NAME_CHARACTERS))


def check_count(field: str, count: int, most: int) -> None:
    """Raises InvalidRequest for a list or map that is too long."""
    if count > most:
        raise InvalidRequest(f"{field} has {count} entries; at most {most} are allowed", field)


def check_texts(model: str, cache_salt: str, stop: Sequence[str], bad_words: Sequence[str]) -> None:
    """Check the texts that a request of any API has. Raises InvalidRequest."""
    check_name("model", model)
    check_name("cache_salt", cache_salt)
    _check_stop_strings(stop)
    _check_bad_words(bad_words)


def _check_stop_strings(entries: Sequence[str]) -> None:
    check_count("stop", len(entries), MAX_STOP_ENTRIES)
    lengths = [len(entry) for entry in entries if entry]
    if len(lengths) > MAX_STOP_STRINGS:
        raise InvalidRequest(
            f"stop has {len(lengths)} strings; at most {MAX_STOP_STRINGS} are allowed", "stop"
        )
    longest = max(lengths, default=0)
    if longest > MAX_STOP_CHARACTERS:
        raise InvalidRequest(
            f"stop has a string of {longest} characters; at most {MAX_STOP_CHARACTERS} are allowed",
            "stop",
        )


def _check_bad_words(words: Sequence[str]) -> None:
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(
            f"bad_words has {len(words)} texts; at most {MAX_BAD_WORDS} are allowed", "bad_words"
        )
    for word in words:
        if not 0 < len(word) <= MAX_BAD_WORD_CHARACTERS:
            raise InvalidRequest(
                f"bad_words has a text of {len(word)} characters; from 1 to "
                f"{MAX_BAD_WORD_CHARACTERS} are allowed",
                "bad_words",
            )


def check_prompt_length(num_tokens: int, max_model_len: int | None) -> None:
    """Check the length before the token ids are read. Raises ContextLengthExceeded."""
    if max_model_len is not None and num_tokens > max_model_len:
        raise ContextLengthExceeded.of_prompt(num_tokens, max_model_len, "prompt")


def check_total_size(sampling: SamplingParams, bad_words: Sequence[str], num_answers: int) -> None:
    """Raises InvalidRequest if the parameters or logprobs of all answers are too large."""
    # A word has two spellings, each with at most one token per character.
    size = sampling.size + 2 * sum(8 + len(word) for word in bad_words)
    if size * num_answers > MAX_SAMPLING_SIZE:
        raise InvalidRequest(
            f"the lists and maps of the sampling parameters have the size of {size} token ids; "
            f"those of {num_answers} answers may have {MAX_SAMPLING_SIZE} together: request fewer "
            "answers, or list fewer tokens",
            "n",
        )
    num_logprobs = 0 if sampling.logprobs is None else (sampling.logprobs + 1) * num_answers
    if num_logprobs > MAX_LOGPROBS_PER_POSITION:
        raise InvalidRequest(
            f"{num_answers} answers with {sampling.logprobs} logprobs are {num_logprobs} logprobs "
            f"for each token; at most {MAX_LOGPROBS_PER_POSITION} are allowed: lower logprobs or n",
            "logprobs",
        )


def check_hints(hints: KvHints, num_answers: int, prompt_logprobs: int | None) -> None:
    """Raises InvalidRequest for hints that do not fit the rest of the request."""
    check_name("kv_hints.session_id", hints.session_id)
    if hints.prefetch and (num_answers > 1 or prompt_logprobs is not None):
        raise InvalidRequest(
            "kv_hints.prefetch generates nothing: leave out n, echo and prompt_logprobs, and send "
            "one prompt",
            "kv_hints.prefetch",
        )


class LogprobBudget:
    """Remaining number of prompt logprobs that the answers of one request may return in total."""

    def __init__(self, num_answers: int = 1) -> None:
        self._num_answers = num_answers  # to each prompt, which all repeat its logprobs
        self._num_left = MAX_LOGPROBS_PER_REQUEST

    def spend(self, num_prompt_tokens: int, prompt_logprobs: int | None) -> None:
        """Deduct the logprobs of one prompt for all answers to it.

        Raises InvalidRequest if too few are left.
        """
        if prompt_logprobs is None:
            return
        num_answers = self._num_answers
        num_logprobs = num_prompt_tokens * (prompt_logprobs + 1) * num_answers
        if num_logprobs > self._num_left:
            raise InvalidRequest(
                f"prompt_logprobs is {prompt_logprobs}: {num_answers} answers to "
                f"{num_prompt_tokens} prompt tokens repeat {num_logprobs} logprobs; all answers of "
                f"a request may repeat {MAX_LOGPROBS_PER_REQUEST}, and {self._num_left} are left: "
                "lower prompt_logprobs or n, or shorten the prompt",
                "prompt_logprobs",
            )
        self._num_left -= num_logprobs


def max_tokens_with_logprobs(logprobs: int, num_answers: int) -> int:
    """Return the largest `max_tokens` with which the logprobs of all answers fit one HTTP body."""
    return max(1, MAX_LOGPROBS_PER_REQUEST // ((logprobs + 1) * num_answers))


def check_token_vectors_fit(num_tokens: int, vector_size: int) -> None:
    """Raise InvalidRequest if the vectors of so many tokens are too many for one request."""
    if 4 * num_tokens * vector_size > MAX_VECTORS_BYTES:
        raise InvalidRequest(
            f"{num_tokens} tokens have a vector of {vector_size} numbers each: more than a request "
            f"may return ({MAX_VECTORS_BYTES >> 20} MiB, {MAX_VECTORS_BYTES // (4 * vector_size)} "
            "tokens); send fewer or shorter texts, or set truncate_prompt_tokens",
            "input",
        )


def check_prompt_logprobs_fit(num_prompt_tokens: int, prompt_logprobs: int | None) -> None:
    """Check that prompt logprobs fit one message: they are sent together with the first token.

    Raises InvalidRequest.
    """
    if prompt_logprobs is None:
        return
    per_token = TOKEN_BYTES + TOP_BYTES * prompt_logprobs
    if num_prompt_tokens * per_token > MAX_MESSAGE_BYTES:
        num_max = max(0, (MAX_MESSAGE_BYTES // num_prompt_tokens - TOKEN_BYTES) // TOP_BYTES)
        raise InvalidRequest(
            f"prompt_logprobs is {prompt_logprobs}: with {num_prompt_tokens} prompt tokens that is "
            f"more than a message may hold ({MAX_MESSAGE_BYTES >> 20} MiB); ask for at most "
            f"{num_max}, or leave it out"
        )
