"""Images are read in a process: its limits, its end, and what hostile files can do."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL", reason="baton[images] is not installed")

from baton.core.errors import InvalidRequest
from baton.router.confined.process import (
    PROGRAM,
    FileReader,
    confined_process,
    package_folder,
)
from baton.router.part_readers import FileReading
from baton.router.pictures.families.gemma3 import Gemma3Format
from baton.router.pictures.families.qwen_vl import QwenVlFormat
from baton.router.pictures.picture_process import IMAGES, PictureLimits, read_pixels
from baton.router.pictures.plan import Detail, ImageFile, PictureFormat, PreparedImage, Size
from baton.router.pictures.reader import PictureReader
from baton.rpc.errors import QueueFull, UnsupportedInput
from tests.support import mutated_images
from tests.support.confined_processes import confined_process_of, confined_processes
from tests.support.image_files import image_file, png_bomb, png_header, png_of, rotated_file

PATIENCE_S = 120
FORMAT = Gemma3Format(Size(56, 56), 2, 2)
LIMITS = PictureLimits()
QWEN = QwenVlFormat(56 * 56, 1 << 20, 28, 3)
GOOD = image_file(30, 20)
BOMB = png_bomb(16_000, 16_000)
MAX_RSS_KIB = 64 << 10


def read(
    *files: bytes, limits: PictureLimits = LIMITS, pictures: PictureFormat = FORMAT
) -> list[PreparedImage]:
    images = [ImageFile(data, f"images[{at}]") for at, data in enumerate(files)]
    reader = PictureReader(limits)
    return asyncio.run(asyncio.wait_for(reader.read(images, FileReading(pictures)), PATIENCE_S))


def test_a_picture_is_named_by_its_file_its_format_its_detail_and_its_tile() -> None:
    def digests(data: bytes, pictures: PictureFormat, detail: Detail) -> tuple[bytes, ...]:
        images = [ImageFile(data, "images[0]", detail)]
        (prepared,) = asyncio.run(PictureReader().read(images, FileReading(pictures)))
        return tuple(picture.digest for picture in prepared.pictures)

    plain = digests(GOOD, FORMAT, Detail.AUTO)
    others = [
        digests(GOOD + b"\0", FORMAT, Detail.AUTO),
        digests(GOOD, replace(FORMAT, resample=3), Detail.AUTO),
        digests(GOOD, FORMAT, Detail.LOW),
    ]

    assert digests(GOOD, FORMAT, Detail.AUTO) == plain
    assert len({plain, *others}) == 4


def test_an_image_that_a_client_sends_again_is_not_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    again, other = ImageFile(GOOD, "images[0]"), ImageFile(image_file(9, 9), "images[0]")

    async def run() -> None:
        reader = PictureReader()
        first = await reader.read([again, other, again], FileReading(FORMAT, "a"))
        monkeypatch.setattr(sys, "executable", "/nowhere/python")  # no process can start
        assert await reader.read([other, again], FileReading(FORMAT, "a")) == [first[1], first[0]]
        assert first[0] == first[2]
        with pytest.raises(QueueFull):
            await reader.read([again], FileReading(FORMAT, "b"))
        with pytest.raises(QueueFull):
            await reader.read([again], FileReading(replace(FORMAT, resample=3), "a"))

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


HUGE_TEXT = png_of(
    png_header(8, 8), (b"tEXt", b"key\0" + bytes(8 << 20)), (b"IDAT", b""), (b"IEND", b"")
)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (BOMB, "has more than 33554432 pixels: send it smaller"),
        (png_bomb(7_000, 5_000), "has more than 33554432 pixels"),
        (png_of(png_header(0, 8), (b"IDAT", b""), (b"IEND", b"")), "is damaged"),
        (HUGE_TEXT, "is damaged"),
        (b"", "is damaged, or no PNG, JPEG, WebP or GIF"),
        (b"BM" + bytes(99), "is damaged, or no PNG, JPEG, WebP or GIF"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is damaged, or no PNG"),
        (image_file(200, 200)[:-5000], "is damaged or incomplete"),
        (image_file(200, 200, kind="JPEG")[:-5000], "is damaged or incomplete"),
        (image_file(200, 200, kind="WEBP")[:-500], "is damaged"),
        (image_file(200, 200, "P", "GIF")[:-5000], "is damaged or incomplete"),
    ],
)
def test_what_cannot_be_read_is_named_before_any_pixels_are_read(data: bytes, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=r"images\[1\]: the image") as raised:
        read(GOOD, data)

    assert problem in str(raised.value)
    assert raised.value.field == "images[1]"


@pytest.mark.parametrize(
    ("files", "limits", "problem"),
    [
        ([GOOD] * 3, {"max_images": 2}, "the request has 3 images; it may have 2"),
        ([GOOD], {"max_file_bytes": 10}, "bytes; it may have 10: send it smaller"),
        ([GOOD], {"max_pixels": 599}, "has more than 599 pixels"),
        ([GOOD, GOOD + b"1", GOOD + b"2"], {"max_prepared_bytes": 20_000}, "is one too many"),
        ([GOOD], {"cpu_s": 0}, "takes more than 0 s of CPU time"),
        ([GOOD], {"wall_s": 0.0}, "takes more than 0 s to read"),
        ([png_bomb(5_000, 5_000)], {"memory_bytes": 80 << 20}, "memory to read"),
    ],
)
def test_what_exceeds_a_limit_is_named(
    files: list[bytes], limits: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        read(*files, limits=replace(LIMITS, **limits))

    assert problem in str(raised.value)


def test_images_that_were_prepared_before_count_in_the_limit_of_a_request() -> None:
    images = [ImageFile(GOOD + bytes([number]), f"image {number}") for number in range(3)]

    async def read_more_and_more() -> None:
        reader = PictureReader(replace(LIMITS, max_prepared_bytes=20_000))
        for num_images in (1, 2):
            await reader.read(images[:num_images], FileReading(FORMAT))
        with pytest.raises(InvalidRequest, match="send fewer") as raised:
            await reader.read(images, FileReading(FORMAT))
        assert raised.value.field == "image 0"

    asyncio.run(read_more_and_more())


def test_a_shape_that_the_model_refuses_names_the_field() -> None:
    with pytest.raises(InvalidRequest, match=r"images\[1\]: the image has 300x1 pixels; the long"):
        read(GOOD, image_file(300, 1), pictures=QWEN)


def test_the_shape_is_that_of_the_upright_image() -> None:
    (prepared,) = read(rotated_file(280, 56, 6), pictures=QWEN)

    assert [(tile.rows, tile.columns) for tile in prepared.plan.tiles] == [(10, 2)]


MEASURE = """
import os, resource, subprocess, sys
program, reader, packages, *limits = sys.argv[1:]
command = [sys.executable, "-I", "-S", program, reader, packages, str(os.getpid()), *limits]
answer = subprocess.run(command, stdout=subprocess.PIPE).stdout
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, answer)
"""


@pytest.mark.parametrize("data", [BOMB, HUGE_TEXT], ids=["bomb", "text"])
def test_a_refused_file_takes_little_memory(data: bytes) -> None:
    numbers = map(str, (LIMITS.cpu_s, LIMITS.memory_bytes, LIMITS.max_pixels))
    program = (str(PROGRAM), str(IMAGES.path), package_folder(IMAGES))
    # From a small process, since the peak of a new process includes that of the one before it.
    measured = subprocess.run(
        [sys.executable, "-I", "-S", "-c", MEASURE, *program, *numbers],
        input=json.dumps([len(data)]).encode() + b"\n" + data,
        capture_output=True,
        check=True,
    )

    peak, _, answer = measured.stdout.partition(b" ")
    assert int(peak) < MAX_RSS_KIB
    assert b"problem" in answer


def test_a_cancelled_request_ends_its_process() -> None:
    images = [ImageFile(image_file(2000, 1500), "images[0]")] * 50

    async def run() -> None:
        reading = asyncio.ensure_future(PictureReader().read(images, FileReading(FORMAT)))
        process = await confined_process_of(os.getpid())
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert process not in confined_processes(os.getpid())

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_a_uuid_finds_an_image_and_never_names_its_pictures() -> None:
    def image(data: bytes, uuid: str = "mine", detail: Detail = Detail.AUTO) -> ImageFile:
        return ImageFile(data, "images[0]", detail, uuid=uuid)

    other = image_file(9, 9)

    async def run() -> None:
        reader = PictureReader()
        [first] = await reader.read([image(GOOD)], FileReading(FORMAT, "a"))
        assert await reader.read([image(b"")], FileReading(FORMAT, "a")) == [first]
        [second] = await reader.read([image(other)], FileReading(FORMAT, "a"))
        assert await reader.read([image(b""), image(GOOD)], FileReading(FORMAT, "a")) == [
            second,
            first,
        ]
        assert await reader.read([image(b"")], FileReading(FORMAT, "a")) == [first]
        assert second == (await reader.read([image(other, uuid="")], FileReading(FORMAT, "a")))[0]
        assert second.pictures[0].digest != first.pictures[0].digest
        unknown = (
            (image(b""), FORMAT, "b"),
            (image(b"", uuid="other"), FORMAT, "a"),
            (image(b""), QWEN, "a"),
            (image(b"", detail=Detail.LOW), FORMAT, "a"),
        )
        for sent, pictures, client in unknown:
            with pytest.raises(InvalidRequest, match=r"images\[0\]: no image with this uuid"):
                await reader.read([image(GOOD, uuid="new"), sent], FileReading(pictures, client))

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_a_router_that_may_fetch_from_nowhere_names_the_option() -> None:
    images = [ImageFile(GOOD, "images[0]"), ImageFile(b"", "images[1]", url="https://a.test/b")]

    with pytest.raises(
        UnsupportedInput, match=r"images\[1\]: this router fetches no URLs.*--image"
    ):
        asyncio.run(PictureReader().read(images, FileReading(FORMAT)))


def test_clients_take_turns() -> None:
    async def run() -> list[str]:
        reader, ended = PictureReader(), []

        async def request(client: str) -> None:
            await reader.read([ImageFile(GOOD, "images[0]")], FileReading(FORMAT, client))
            ended.append(client)

        # One process of each client at a time: the second one's is not behind those of the first.
        await asyncio.gather(*map(request, ["a", "a", "a", "a", "b"]))
        return ended

    assert "b" in asyncio.run(asyncio.wait_for(run(), PATIENCE_S))[:3]


def test_without_the_package_the_error_names_the_command() -> None:
    without_package = replace(IMAGES, package="no_such_package")
    images = [ImageFile(GOOD, "images[0]")]

    with pytest.raises(UnsupportedInput, match=r"pip install 'baton\[images\]'"):
        asyncio.run(read_pixels(images, FORMAT, LIMITS, without_package))


def test_a_process_that_cannot_start_is_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")

    with pytest.raises(QueueFull, match="cannot start a process to read images"):
        read(GOOD)


TAKEN_OVER = """
import sys
class Reader:
    def __init__(self, max_pixels):
        pass
    def read(self, files):
        sys.stdout.buffer.write({output!r})
"""


@pytest.mark.parametrize(
    "output",
    [
        b"",
        b"[]\n",
        b"\xff\n",
        b"{}\n" * 9,
        b"x" * (1 << 20),
        b'{}\n{"width": -1, "height": 2}\n',
        b'{}\n{"width": 9, "height": 9}\n{}\ntoo few pixels',
    ],
)
def test_a_process_that_a_file_has_taken_over_is_not_trusted(tmp_path: Path, output: bytes) -> None:
    program = tmp_path / "taken_over.py"
    program.write_text(TAKEN_OVER.format(output=output))
    images = [ImageFile(GOOD, "images[0]")]

    with pytest.raises(InvalidRequest, match=r"images\[0\]: the image "):
        asyncio.run(read_pixels(images, FORMAT, LIMITS, replace(IMAGES, path=program)))

    assert not confined_processes(os.getpid())


def mutated(data: bytes, seed: int) -> bytes:
    """Change, remove or add bytes in a few places, most of them near the start."""
    rng, changed = random.Random(seed), bytearray(data)
    for _ in range(rng.randint(1, 5)):
        start = rng.randrange(min(len(changed), rng.choice([40, 200, len(changed)])))
        end = start + rng.choice([0, 1, 1, 4, 30])
        changed[start:end] = rng.randbytes(rng.choice([0, 1, 1, 4, 30])) if end > start else b"\xff"
    return bytes(changed)


async def outcomes(files: Sequence[bytes], reader: FileReader) -> list[dict[str, object]]:
    async with confined_process(reader, LIMITS, (LIMITS.max_pixels,)) as process:
        await process.send_files(files)
        output = await process.receive(max_bytes=1 << 20)
        await process.process.wait()
    return [json.loads(line) for line in output.splitlines()]


@pytest.mark.parametrize(
    "data",
    [
        image_file(40, 30, "RGBA"),
        rotated_file(40, 30, 6),
        image_file(40, 30, kind="WEBP"),
        image_file(40, 30, "P", "GIF"),
    ],
    ids=["PNG", "JPEG", "WebP", "GIF"],
)
def test_mutated_files_have_a_size_or_a_problem(data: bytes) -> None:
    files = [mutated(data, seed) for seed in range(500)]
    reader = replace(IMAGES, path=Path(mutated_images.__file__))

    lines = asyncio.run(asyncio.wait_for(outcomes(files, reader), PATIENCE_S))

    assert len(lines) == len(files)
    assert {tuple(line) for line in lines} == {("problem",), ("width", "height")}
