"""Tokenizer of a GGUF file, in the format of tokenizer.json. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

import msgspec
from tokenizers import Tokenizer as FastTokenizer

from baton.checkpoint.gguf.generation import read_chat_templates, read_generation_defaults
from baton.checkpoint.gguf.gguf_file import GgufFile
from baton.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from baton.checkpoint.json_fields import shorten
from baton.checkpoint.tokenizer import SPACE, Clock, Tokenizer
from baton.core.errors import ModelError

PREFIX = "tokenizer.ggml"
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",
    "cls_token": "cls_token_id",
}
# No model comes near these limits. They bound the time that a vocabulary takes.
MAX_ADDED_TOKENS = 1 << 15
MAX_SQUARED_CHARS = 1 << 26  # all tokens' numbers of characters, squared
Json = dict[str, object]


def load_tokenizer(file: GgufFile, *, clock: Clock = datetime.now) -> Tokenizer:
    """Return the tokenizer. Raises ModelError, which names the metadata field."""
    try:
        fast = FastTokenizer.from_str(tokenizer_json(file))
    except ModelError:
        raise
    except BaseException as error:  # the library raises nothing narrower; Rust may panic
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise ModelError(f"{file.path}: its tokenizer cannot be used: {error}") from error
    return Tokenizer(
        fast,
        named_tokens=_named_tokens(file),
        chat_templates=read_chat_templates(file),
        eos_token_ids=read_generation_defaults(file).eos_token_ids,
        clock=clock,
    )


def tokenizer_json(file: GgufFile) -> str:
    """Return the tokenizer in the format of tokenizer.json."""
    kind = file.require(f"{PREFIX}.model", str)
    builders = {"gpt2": _byte_level, "llama": _sentence_piece, "gemma4": _merged_pieces}
    if kind not in builders:
        raise file.wrong(f"{PREFIX}.model", f"must be one of {', '.join(builders)}")
    # Empty tokens get the names that llama.cpp gives them.
    tokens = [
        token or f"[EMPTY_{token_id}]"
        for token_id, token in enumerate(file.list_of(f"{PREFIX}.tokens", str))
    ]
    if not tokens:
        raise ModelError(f"{file.path} lacks the metadata field '{PREFIX}.tokens'; fetch it again")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for place, token in enumerate(tokens) if vocabulary[token] != place)
        raise ModelError(f"{file.path}: '{PREFIX}.tokens' has {shorten(repr(twice))} twice")
    described = {
        "version": "1.0",
        "added_tokens": _added_tokens(file, tokens),
        **builders[kind](file, vocabulary),
    }
    return msgspec.json.encode(described).decode()


def _byte_level(file: GgufFile, vocabulary: Mapping[str, int]) -> Json:
    """Return a BPE whose tokens are bytes, as GPT-2's."""
    pre, pairs = _pre_tokenizer(file), _merges(file)
    to_bytes: Json = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return {
        "normalizer": {"type": "NFC"} if pre.is_nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*pre.steps, to_bytes]},
        "post_processor": _specials(file, adds_bos=pre.adds_bos),
        "decoder": to_bytes,
        "model": {
            "type": "BPE",
            "vocab": vocabulary,
            "merges": pairs,
            "ignore_merges": pre.ignores_merges,
        },
    }


def _merges(file: GgufFile) -> list[list[str]]:
    merges = file.list_of(f"{PREFIX}.merges", str)
    if not merges:
        raise ModelError(f"{file.path} lacks the metadata field '{PREFIX}.merges'; fetch it again")
    pairs = [merge.split(" ") for merge in merges]
    if set(map(len, pairs)) != {2}:
        raise ModelError(f"{file.path}: '{PREFIX}.merges' must hold pairs of tokens")
    return pairs


def _pre_tokenizer(file: GgufFile) -> PreTokenizer:
    name = file.get(f"{PREFIX}.pre", str, "default")
    if name not in PRE_TOKENIZERS:
        raise file.wrong(f"{PREFIX}.pre", f"must be one of {', '.join(sorted(PRE_TOKENIZERS))}")
    return PRE_TOKENIZERS[name]


def _sentence_piece(file: GgufFile, vocabulary: Mapping[str, int]) -> Json:
    """Return a BPE of characters, whose merges are those of the scores."""
    has_prefix = file.get(f"{PREFIX}.add_space_prefix", bool, True)
    return _pieces(file, vocabulary, _merges_of_scores(file, vocabulary), has_prefix=has_prefix)


def _merged_pieces(file: GgufFile, vocabulary: Mapping[str, int]) -> Json:
    """Return a BPE of characters, whose merges are listed (Gemma 4)."""
    return _pieces(file, vocabulary, _merges(file), has_prefix=False)


def _pieces(
    file: GgufFile,
    vocabulary: Mapping[str, int],
    merges: Sequence[Sequence[str]],
    *,
    has_prefix: bool,
) -> Json:
    """Return a BPE of characters, with bytes for characters that are no token."""
    steps: list[Json] = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    if has_prefix:
        steps.insert(0, {"type": "Prepend", "prepend": SPACE})
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = file.get(f"{PREFIX}.unknown_token_id", int, 0)
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": _specials(file, adds_bos=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "vocab": vocabulary,
            "merges": merges,
            "unk_token": _token(file, f"{PREFIX}.unknown_token_id", unknown),
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _merges_of_scores(file: GgufFile, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that form a token, the best scored token first."""
    scores = file.list_of(f"{PREFIX}.scores", float)
    types = _types(file, len(vocabulary))
    if len(scores) != len(vocabulary):
        raise ModelError(f"{file.path}: '{PREFIX}.scores' must have a number for each token")
    if sum(len(token) ** 2 for token in vocabulary) > MAX_SQUARED_CHARS:
        raise ModelError(f"{file.path}: '{PREFIX}.tokens' has tokens that are too long")
    names, merges = list(vocabulary), list[tuple[str, str]]()
    for token_id in sorted(range(len(names)), key=lambda token_id: -scores[token_id]):
        if types[token_id] in (UNKNOWN, CONTROL, USER_DEFINED):
            continue
        token = names[token_id]
        pairs = [
            (vocabulary[left], vocabulary[right], left, right)
            for at in range(1, len(token))
            if (left := token[:at]) in vocabulary and (right := token[at:]) in vocabulary
        ]
        merges += [(left, right) for _, _, left, right in sorted(pairs)]
    return merges


def _specials(file: GgufFile, *, adds_bos: bool) -> Json | None:
    """Return the tokens to add to a text: BOS before it, EOS after it."""
    single: list[Json] = [{"Sequence": {"id": "A", "type_id": 0}}]
    pair: list[Json] = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    specials: Json = {}
    for flag, default, name in (
        ("add_bos_token", adds_bos, "bos"),
        ("add_eos_token", False, "eos"),
    ):
        field = f"{PREFIX}.{name}_token_id"
        if not (file.get(f"{PREFIX}.{flag}", bool, default) and file.has(field)):
            continue
        token_id = file.require(field, int)
        token = _token(file, field, token_id)
        part: Json = {"SpecialToken": {"id": token, "type_id": 0}}
        specials[token] = {"id": token, "ids": [token_id], "tokens": [token]}
        single, pair = (
            ([part, *each] if name == "bos" else [*each, part]) for each in (single, pair)
        )
    if not specials:
        return None
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": specials,
    }


def _added_tokens(file: GgufFile, tokens: list[str]) -> list[Json]:
    """Return the tokens that are found in a text before it is split."""
    types = _types(file, len(tokens))
    added = [
        token_id for token_id, kind in enumerate(types) if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    if len(added) > MAX_ADDED_TOKENS:
        raise ModelError(
            f"{file.path}: '{PREFIX}.token_type' has {len(added)} control and user-defined tokens; "
            f"at most {MAX_ADDED_TOKENS} are supported"
        )
    return [
        {
            "id": token_id,
            "content": tokens[token_id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": types[token_id] != USER_DEFINED,
        }
        for token_id in added
    ]


def _types(file: GgufFile, count: int) -> list[int]:
    types = file.list_of(f"{PREFIX}.token_type", int)
    if types and len(types) != count:
        raise ModelError(f"{file.path}: '{PREFIX}.token_type' must have a number for each token")
    return types or [1] * count


def _token(file: GgufFile, field: str, token_id: int) -> str:
    tokens = file.list_of(f"{PREFIX}.tokens", str)
    if not 0 <= token_id < len(tokens):
        raise file.wrong(field, f"must be below {len(tokens)}, the number of tokens")
    return tokens[token_id]


def _named_tokens(file: GgufFile) -> dict[str, str]:
    fields = {name: f"{PREFIX}.{field}" for name, field in NAMED_TOKENS.items()}
    return {
        name: _token(file, field, file.require(field, int))
        for name, field in fields.items()
        if file.has(field)
    }
