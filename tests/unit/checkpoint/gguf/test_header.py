"""Headers of GGUF files: what is read, and what is refused. Files may be hostile."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from baton.checkpoint.gguf.gguf_file import GgufFile
from baton.checkpoint.gguf.header import MAX_FIELDS, MAX_TENSORS, read_header
from baton.core.errors import ModelError

U8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10
Field = tuple[str, int, bytes]
Entry = tuple[str, Sequence[int], int, int]  # name, sizes, type, offset
SOME_FIELDS: Sequence[Field] = (
    ("general.architecture", STRING, struct.pack("<Q", 5) + b"llama"),
    ("llama.block_count", U32, struct.pack("<I", 2)),
    ("llama.epsilon", F32, struct.pack("<f", 0.5)),
    ("flag", BOOL, b"\x01"),
    (
        "tokens",
        ARRAY,
        struct.pack("<IQ", STRING, 2)
        + b"".join(struct.pack("<Q", len(text)) + text for text in (b"a", "ö".encode())),
    ),
    ("types", ARRAY, struct.pack("<IQ3I", U32, 3, 7, 8, 9)),
)
SOME_TENSORS: Sequence[Entry] = (
    ("first.weight", (64, 3), 2, 0),  # Q4_0: 2 blocks of 18 bytes a row
    ("second.weight", (5,), 0, 128),  # F32
)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def made_file(
    fields: Sequence[Field] = SOME_FIELDS,
    tensors: Sequence[Entry] = SOME_TENSORS,
    num_data_bytes: int = 148,
    version: bytes = struct.pack("<I", 3),
    counts: tuple[int, int] | None = None,
) -> bytes:
    num_tensors, num_fields = counts or (len(tensors), len(fields))
    parts = [b"GGUF", version, struct.pack("<QQ", num_tensors, num_fields)]
    parts += [text(name.encode()) + struct.pack("<I", kind) + value for name, kind, value in fields]
    for name, sizes, kind, offset in tensors:
        shape = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        parts.append(text(name.encode()) + shape + struct.pack("<IQ", kind, offset))
    header = b"".join(parts)
    return header + bytes(-len(header) % 32) + bytes(num_data_bytes)


def written(folder: Path, content: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(content)
    return path


def test_metadata_and_places_of_tensors_are_read(tmp_path: Path) -> None:
    content = made_file()

    header = read_header(written(tmp_path, content))

    assert header.metadata == {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.epsilon": 0.5,
        "flag": True,
        "tokens": ["a", "ö"],
        "types": [7, 8, 9],
    }
    first, second = header.tensors["first.weight"], header.tensors["second.weight"]
    assert (first.shape, first.type.name, first.num_bytes) == ((3, 64), "Q4_0", 108)
    assert (second.shape, second.type.name, second.num_bytes) == ((5,), "F32", 20)
    assert first.offset == len(content) - 148
    assert second.offset == first.offset + 128


def test_a_file_cut_anywhere_is_refused_by_name(tmp_path: Path) -> None:
    content = made_file()

    for length in range(len(content)):
        path = written(tmp_path, content[:length])
        with pytest.raises(ModelError, match=str(path)):
            read_header(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"JUNK" + made_file()[4:], "does not begin with GGUF"),
        (made_file(version=struct.pack("<I", 1)), "version 1"),
        (made_file(version=struct.pack(">I", 3)), "big-endian"),
        (made_file(counts=(1 << 60, 2)), rf"at most {MAX_TENSORS} are supported"),
        (made_file(counts=(2, 1 << 60)), rf"at most {MAX_FIELDS} are supported"),
        (made_file(fields=[("a", STRING, struct.pack("<Q", 1 << 40))]), "text of 1099511627776"),
        (made_file(fields=[("a", ARRAY, struct.pack("<IQ", U64, 1 << 60))]), "ends within a"),
        (made_file(fields=[("a", ARRAY, struct.pack("<IQ", STRING, 1 << 60))]), "texts in 'a'"),
        (made_file(fields=[("a", ARRAY, struct.pack("<IQ", ARRAY, 1))]), "unknown type 9 in 'a'"),
        (made_file(fields=[("a", 99, b"")]), "unknown type 99 in 'a'"),
        (made_file(fields=[("a", STRING, text(b"\xff"))]), "not UTF-8"),
        (made_file(fields=[("a", U8, b"1")] * 2), "the metadata field 'a' twice"),
        (made_file(tensors=[("a", (64,), 77, 0)]), "unknown type 77"),
        (made_file(tensors=[("a", (256,), 10, 0)]), "'a' as Q2_K; supported are F32, .*MXFP4"),
        (made_file(tensors=[("a", (63,), 2, 0)]), "Q4_0 cannot store"),
        (made_file(tensors=[("a", (), 0, 0)]), "0 dimensions"),
        (made_file(tensors=[("a", (0, 4), 0, 0)]), "cannot store"),
        (made_file(tensors=[("a", (1 << 62, 1 << 62), 0, 0)]), "larger than the file"),
        (made_file(tensors=[("a", (4,), 0, 1 << 63)]), "larger than the file"),
        (made_file(tensors=[("a", (4,), 0, 7)]), "not aligned"),
        (made_file(tensors=[("a", (9,), 0, 0), ("b", (9,), 0, 32)]), "'b' overlapping 'a'"),
        (made_file(tensors=[("a", (4,), 0, 0), ("a", (4,), 0, 32)]), "the tensor 'a' twice"),
        (made_file(fields=[("general.alignment", U32, struct.pack("<I", 24))]), "alignment 24"),
        (made_file(fields=[("general.alignment", U32, struct.pack("<I", 0))]), "alignment 0"),
    ],
)
def test_a_file_that_lies_is_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=reason):
        read_header(written(tmp_path, content))


def test_damaged_files_are_read_or_refused_by_name(tmp_path: Path) -> None:
    draw, content = random.Random(5), made_file()
    num_refused = 0

    for _ in range(2000):
        damaged = bytearray(content)
        for _ in range(draw.randint(1, 4)):
            damaged[draw.randrange(len(content))] = draw.choice((0, 1, 127, 128, 255))
        try:
            GgufFile.read(written(tmp_path, bytes(damaged)))
        except ModelError:
            num_refused += 1

    assert 200 < num_refused < 2000


def test_the_parts_of_a_split_model_are_read_together(tmp_path: Path) -> None:
    split = ("split.count", U32, struct.pack("<I", 2))
    total = ("split.tensors.count", U32, struct.pack("<I", 2))
    for number, entry in enumerate(SOME_TENSORS):
        entries = [(*entry[:3], 0)]
        content = made_file([*SOME_FIELDS, split, total] if not number else [split], entries)
        (tmp_path / f"m-0000{number + 1}-of-00002.gguf").write_bytes(content)

    found = GgufFile.read(tmp_path / "m-00001-of-00002.gguf")

    assert set(found.tensors) == {"first.weight", "second.weight"}
    assert [path.name[:7] for path in found.paths] == ["m-00001", "m-00002"]
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelError, match=r"lacks m-00002-of-00002\.gguf"):
        GgufFile.read(tmp_path / "m-00001-of-00002.gguf")


def test_a_file_is_shared_while_it_is_in_use_and_does_not_change(tmp_path: Path) -> None:
    path = written(tmp_path, made_file())
    first = GgufFile.open(path)

    assert GgufFile.open(path) is first

    written(tmp_path, made_file(SOME_FIELDS[:2]))
    assert GgufFile.open(path).metadata.keys() == {"general.architecture", "llama.block_count"}
