"""GGUF files that somebody made to do harm: each is loaded or refused by name, and soon."""

from __future__ import annotations

import resource
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from baton.checkpoint.gguf.header import MAX_TEXTS
from baton.checkpoint.hub import open_checkpoint
from baton.core.errors import InvalidRequest, ModelError
from tests.support.fuzzed_gguf import MAX_BYTES, base_files, fuzz, load
from tests.support.gguf_files import write_pieces

ENDLESS = "{% for a in range(99999) %}" * 9 + "{% endfor %}" * 9
DOUBLED = (
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% endfor %}{{ ns.x }}"
)
Write = Callable[[gguf.GGUFWriter], Any]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    return base_files(tmp_path_factory.mktemp("bases"))


def written(folder: Path, *fields: Write, kind: str = "llama") -> Path:
    """Write a file of a vocabulary and an embedding, with further metadata."""
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, kind)
    writer.add_tensor("token_embd.weight", np.zeros((300, 8), dtype=np.float32))
    for field in fields:
        field(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def pieces(writer: gguf.GGUFWriter) -> None:
    write_pieces(writer, ["a", "b", "ab"])


def byte_level(
    tokens: Sequence[str] = ("a", "b", "ab"), merges: Sequence[str] = ("a b",), **fields: Any
) -> Write:
    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model(fields.get("model", "gpt2"))
        writer.add_tokenizer_pre(fields.get("pre", "llama-bpe"))
        writer.add_token_list(list(tokens))
        writer.add_token_merges(list(merges))
        if "scores" in fields:
            writer.add_token_scores(fields["scores"])
        if "types" in fields:
            writer.add_token_types(fields["types"])
        if "bos" in fields:
            writer.add_bos_token_id(fields["bos"])

    return write


@pytest.mark.parametrize("seed", [0])
def test_damaged_files_are_loaded_or_refused_by_name(
    bases: list[bytes], seed: int, tmp_path: Path
) -> None:
    """`python -m tests.support.fuzzed_gguf --count 2000 --seed 1` does so with many."""
    report = fuzz(bases, tmp_path, 150, seed)

    assert not report.failed
    assert report.num_loaded >= 5
    assert report.num_refused >= 100
    assert report.peak_bytes < MAX_BYTES
    assert not list(tmp_path.iterdir())


def test_valid_files_are_loaded(bases: list[bytes], tmp_path: Path) -> None:
    for number, content in enumerate(bases):
        (tmp_path / f"{number}.gguf").write_bytes(content)
        load(tmp_path / f"{number}.gguf")


def test_a_file_cut_in_each_part_is_refused(bases: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    for content in bases:
        for end in range(0, len(content), len(content) // 40):
            path.write_bytes(content[:end])
            with pytest.raises(ModelError, match=r"cut\.gguf"):
                load(path)


@pytest.mark.parametrize(
    ("tokenizer", "fault"),
    [
        (byte_level(model="wordpiece"), r"'tokenizer\.ggml\.model' is 'wordpiece'; it must be"),
        (byte_level(pre="unheard-of"), r"'tokenizer\.ggml\.pre' is 'unheard-of'; it must be one"),
        (byte_level(merges=["a b c"]), r"'tokenizer\.ggml\.merges' must hold pairs"),
        (byte_level(merges=["a x"]), "its tokenizer cannot be used"),
        (byte_level(tokens=["a", "b", "a"]), r"'tokenizer\.ggml\.tokens' has 'a' twice"),
        (byte_level(types=[1]), r"'tokenizer\.ggml\.token_type' must have a number for each"),
        (byte_level(bos=3), r"'tokenizer\.ggml\.bos_token_id' is 3; it must be below 3"),
        (byte_level(model="llama", scores=[0.0]), r"'tokenizer\.ggml\.scores' must have a number"),
    ],
)
def test_a_tokenizer_that_cannot_be_is_named(tokenizer: Write, fault: str, tmp_path: Path) -> None:
    path = written(tmp_path, tokenizer)

    with pytest.raises(ModelError, match=fault):
        open_checkpoint(str(path)).load_tokenizer()


@pytest.mark.parametrize(
    ("tokens", "types", "fault"),
    [
        (["a" * length for length in range(1, 1500)], None, "tokens that are too long"),
        (["a", "a" * 50_000], None, "tokens that are too long"),
        ([f"<{number}>" for number in range(40_000)], 3, "40000 control and user-defined tokens"),
    ],
    ids=["nested", "long", "control"],
)
def test_a_vocabulary_that_takes_long_is_refused(
    tokens: list[str], types: int | None, fault: str, tmp_path: Path
) -> None:
    fields: dict[str, Any] = {"types": [types] * len(tokens)} if types else {}
    vocabulary = byte_level(tokens, model="llama", scores=[0.0] * len(tokens), **fields)

    with pytest.raises(ModelError, match=fault):
        open_checkpoint(str(written(tmp_path, vocabulary))).load_tokenizer()


@pytest.mark.parametrize("template", [ENDLESS, DOUBLED, "{{ 'x' * 10 ** 12 }}"])
def test_an_endless_chat_template_fails_only_its_request(template: str, tmp_path: Path) -> None:
    path = written(tmp_path, pieces, lambda writer: writer.add_chat_template(template))
    tokenizer = open_checkpoint(str(path)).load_tokenizer()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    with pytest.raises(InvalidRequest, match="it takes too much time or memory"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])

    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 128 << 10
    assert tokenizer.decode(tokenizer.encode("ab")) == "ab"


def test_many_empty_texts_are_refused_before_they_take_memory(tmp_path: Path) -> None:
    """Eight bytes of a file would become a text of fifty."""
    path, name = tmp_path / "model.gguf", b"tokenizer.ggml.tokens"
    field = struct.pack("<Q", len(name)) + name + struct.pack("<IIQ", 9, 8, MAX_TEXTS + 1)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + field + bytes(8 * MAX_TEXTS + 8))

    with pytest.raises(ModelError, match=f"at most {MAX_TEXTS} are supported"):
        load(path)
