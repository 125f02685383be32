"""PDFs are read in a process: its limits, and its end."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from io import BytesIO
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from baton.router.documents.reader import PDFS, PdfLimits, PdfText, read_pdfs
from baton.rpc.errors import QueueFull, UnsupportedInput
from tests.support.confined_processes import confined_process_of, confined_processes, end_of
from tests.support.pdf_files import LOCK, SHOW_IMAGE, SPACES, many_pages, pdf_of, show

pytest.importorskip("pypdfium2", reason="baton[documents] is not installed")

PATIENCE_S = 60
LIMITS = PdfLimits(max_pictures=0)
GOOD = pdf_of(show("Hello"))


def read(*files: bytes, limits: PdfLimits = LIMITS) -> list[PdfText]:
    return asyncio.run(asyncio.wait_for(read_pdfs(files, limits), PATIENCE_S))


def test_files_are_read_in_their_order_up_to_the_first_problem() -> None:
    two_pages = pdf_of(show("one"), show("two") + SHOW_IMAGE)
    without_end = GOOD[: GOOD.index(b"xref")] + b"trailer << /Root 1 0 R >>"
    locked = pdf_of(show("secret"), more_of_trailer=LOCK)

    texts = read(two_pages, without_end, locked, pdf_of(SHOW_IMAGE), b"%PDF-1.4", GOOD)

    assert texts[:2] == [PdfText("one\n\ntwo", has_images=True), PdfText("Hello")]
    problems = ["is encrypted", "has no text, only images", "is damaged or no PDF"]
    for found, problem in zip(texts[2:5], problems, strict=True):
        assert found.problem.startswith(problem)
    assert texts[5] == PdfText("Hello")


def test_pages_without_text_become_pictures_for_a_model_that_takes_them() -> None:
    dark = b"q 150 0 0 144 0 0 cm" + SHOW_IMAGE + b" Q"  # a black image on the left half
    limits = replace(LIMITS, max_pictures=2)

    scan, mixed = read(pdf_of(dark, b""), pdf_of(show("one"), dark), limits=limits)

    assert mixed == PdfText("one", has_images=True)
    assert scan.text == scan.problem == ""
    first, second = (Image.open(BytesIO(page)).convert("L") for page in scan.pages)
    assert first.size == second.size == (1536, 738)
    assert first.getpixel((700, 400)) == 0
    assert first.getpixel((800, 400)) == second.getpixel((700, 400)) == 255


BOMB = pdf_of(SPACES)  # 64 KB


@pytest.mark.parametrize(
    ("files", "limits", "problem"),
    [
        ((many_pages(100_000),), {}, "has 100000 pages; all files of a request may have 2000"),
        ((GOOD, GOOD), {"max_pages": 1}, "has 1 pages; all files of a request may have 1:"),
        ((pdf_of(b"", b""),), {"max_pictures": 1}, "has 2 pages without text; all files"),
        ((pdf_of(show("x" * 99)),), {"max_characters": 50}, "has too much text"),
        ((BOMB,), {"memory_bytes": 128 << 20}, "takes more than 128 MiB of memory"),
        ((BOMB,), {"cpu_s": 0}, "takes more than 0 s of CPU time"),
        ((BOMB,), {"wall_s": 0.0}, "takes more than 0 s to read"),
    ],
)
def test_what_exceeds_a_limit_is_named(
    files: tuple[bytes, ...], limits: dict[str, Any], problem: str
) -> None:
    texts = read(*files, limits=replace(LIMITS, **limits))

    assert texts[-1].problem.startswith(problem)


def test_a_cancelled_request_ends_its_process() -> None:
    async def run() -> None:
        reading = asyncio.ensure_future(read_pdfs([BOMB] * 50, LIMITS))
        process = await confined_process_of(os.getpid())
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert process not in confined_processes(os.getpid())

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


ROUTER = """
import asyncio, sys
from baton.router.documents.reader import PdfLimits, read_pdfs
asyncio.run(read_pdfs([sys.stdin.buffer.read()] * 50, PdfLimits()))
"""


def test_the_process_ends_with_a_killed_router() -> None:
    async def run() -> None:
        router = await asyncio.create_subprocess_exec(
            sys.executable, "-c", ROUTER, stdin=asyncio.subprocess.PIPE
        )
        assert router.stdin is not None
        router.stdin.write(BOMB)
        router.stdin.close()
        process = await confined_process_of(router.pid)
        router.kill()
        await router.wait()
        await end_of(process)

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_without_the_package_the_error_names_the_command() -> None:
    without_package = replace(PDFS, package="no_such_package")

    with pytest.raises(UnsupportedInput, match=r"pip install 'baton\[documents\]'"):
        asyncio.run(read_pdfs([GOOD], LIMITS, without_package))


def test_a_process_that_cannot_start_is_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")

    with pytest.raises(QueueFull, match="cannot start a process to read PDFs"):
        read(GOOD)


mutations = st.lists(
    st.tuples(st.integers(0, len(GOOD)), st.integers(0, 40), st.binary(max_size=9)),
    min_size=1,
    max_size=6,
)


def mutated(changes: list[tuple[int, int, bytes]]) -> bytes:
    data = GOOD
    for start, num_removed, added in changes:
        data = data[:start] + added + data[start + num_removed :]
    return data


@settings(max_examples=3, deadline=None)
@given(st.lists(mutations.map(mutated), min_size=40, max_size=40))
def test_a_damaged_file_has_a_text_or_a_problem(files: list[bytes]) -> None:
    texts = read(*files)

    for found in texts:
        assert bool(found.text) != bool(found.problem)
    assert len(texts) == len(files) or texts[-1].problem.startswith("takes more than")
