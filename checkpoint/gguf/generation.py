"""GGUF metadata about results: tokens that end an answer, sampling parameters, pooling, chats."""

from __future__ import annotations

from baton.checkpoint.checkpoint import GenerationDefaults
from baton.checkpoint.gguf.gguf_file import GgufFile
from baton.core.errors import InvalidRequest, ModelError
from baton.core.pooling import Pooling, PoolingKind
from baton.core.sampling import SamplingDefaults

# Names of tokens that end a turn, in models whose metadata names only another EOS token.
ENDS_OF_TURN = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|eot|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|return|>",
        "<|call|>",
        "<|end_of_text|>",
        "<EOT>",
        "<|end_of_sentence|>",
    }
)
CONTROL = 3
IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
SAMPLING = "general.sampling"
TEMPLATE = "tokenizer.chat_template"
# Those of llama.cpp, for files that recommend none.
ASSUMED_SAMPLING = SamplingDefaults(temperature=0.8, top_p=0.95, min_p=0.05)
POOLING_TYPES = {1: PoolingKind.MEAN, 2: PoolingKind.CLS, 3: PoolingKind.LAST}


def read_chat_templates(file: GgufFile) -> dict[str, str]:
    """Return the templates by name."""
    templates = {"default": file.require(TEMPLATE, str)} if file.has(TEMPLATE) else {}
    for name in file.list_of("tokenizer.chat_templates", str):
        templates[name] = file.require(f"{TEMPLATE}.{name}", str)
    return templates


def read_generation_defaults(file: GgufFile) -> GenerationDefaults:
    defaults = SamplingDefaults(
        temperature=_number(file, "temp"),
        top_p=_number(file, "top_p"),
        top_k=file.get(f"{SAMPLING}.top_k", int, 0) or None,
        min_p=_number(file, "min_p"),
        repetition_penalty=_number(file, "penalty_repeat"),
    )
    try:
        defaults.params()
    except InvalidRequest as error:
        raise ModelError(f"{file.path}: {SAMPLING}: {error}") from error
    is_assumed = not defaults.given
    sampling = ASSUMED_SAMPLING if is_assumed else defaults
    suppressed = tuple(file.list_of("tokenizer.ggml.suppress_tokens", int))
    return GenerationDefaults(_eos_ids(file), sampling, is_assumed, suppressed)


def read_pooling(file: GgufFile) -> Pooling | None:
    """Return the pooling of an embedder. GGUF has no flag for it: vectors are normalised."""
    name = f"{file.architecture}.pooling_type"
    number = file.get(name, int, 0)
    if not number:
        return None
    if number not in POOLING_TYPES:
        raise file.wrong(name, f"must be one of {', '.join(map(str, POOLING_TYPES))}")
    return Pooling(POOLING_TYPES[number])


def _number(file: GgufFile, name: str) -> float | None:
    full = f"{SAMPLING}.{name}"
    return file.require(full, float) if file.has(full) else None


def _eos_ids(file: GgufFile) -> tuple[int, ...]:
    tokens = file.list_of("tokenizer.ggml.tokens", str)
    names = [f"tokenizer.ggml.{name}" for name in IDS]
    found = [file.require(name, int) for name in names if file.has(name)]
    for name, token_id in zip(names, found, strict=False):
        if token_id >= len(tokens):
            raise file.wrong(name, f"must be below {len(tokens)}, the number of tokens")
    types = file.list_of("tokenizer.ggml.token_type", int)
    ends = (
        token_id
        for token_id, (name, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == CONTROL and name in ENDS_OF_TURN
    )
    return tuple(dict.fromkeys((*found, *ends)))
