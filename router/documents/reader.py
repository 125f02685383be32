"""Reads the documents of a request. PDFs are read in a process."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic_core import from_json

from baton.core.errors import InvalidRequest
from baton.router.confined.process import FileReader, ProcessLimits, confined_process
from baton.router.fair_slots import FairSlots
from baton.router.values import Document

NUM_PROCESSES = 2
MAX_WAITING = 64  # requests, each of which holds its files in memory
PDFS = FileReader(
    path=Path(__file__).with_name("pdf_program.py"),
    package="pypdfium2",
    extra="documents",
    files="PDFs",
    remedy="send fewer pages, or their text",
)
MAX_BYTES_PER_CHARACTER = 6  # of UTF-8 in JSON, where a control character is an escape
LINE_BYTES = 1 << 10  # around the text of a file
PICTURE_BYTES = 10 << 20  # of a page in base64, which has 1,536x1,536 pixels at most


@dataclass(frozen=True, slots=True)
class PdfLimits(ProcessLimits):
    """Limits of the confined process that reads a PDF, and of what it returns."""

    max_pages: int = 2_000
    max_characters: int = 1 << 22
    max_pictures: int = 16  # of pages without text, for a model that takes images


@dataclass(frozen=True, slots=True)
class PdfText:
    text: str = ""
    has_images: bool = False
    pages: tuple[bytes, ...] = ()  # PNG files, of a document without text
    problem: str = ""  # continues the file's name; empty: it has been read


async def read_pdfs(
    files: Sequence[bytes], limits: PdfLimits, reader: FileReader = PDFS
) -> list[PdfText]:
    """Return the texts of the files, up to the first one with a problem.

    Raises UnsupportedInput without the package that reads PDFs, and QueueFull if no process can
    start.
    """
    output, problem = b"", ""
    longest = MAX_BYTES_PER_CHARACTER * limits.max_characters + LINE_BYTES * len(files)
    longest += PICTURE_BYTES * limits.max_pictures
    numbers = (limits.max_pages, limits.max_characters, limits.max_pictures)
    async with confined_process(reader, limits, numbers) as process:
        try:
            async with asyncio.timeout(limits.wall_s):
                await process.send_files(files)
                output = await process.receive(longest)
                problem = await process.problem()
        except TimeoutError:
            problem = process.problem_of_time()
    # On a thread: it can be millions of characters.
    return await asyncio.to_thread(_texts, output, problem, len(files))


def _texts(output: bytes, problem: str, num_files: int) -> list[PdfText]:
    # A line without an end is that of a process which was killed.
    lines = output.split(b"\n")[:-1]
    texts = [_text(line) for line in lines[:num_files]]
    return texts if len(texts) == num_files else [*texts, PdfText(problem=problem)]


def _text(line: bytes) -> PdfText:
    """Return what the process has written, which a hostile file may have made it write."""
    try:
        match from_json(line):
            case {"text": str(text), "has_images": bool(has_images)}:
                return PdfText(text, has_images)
            case {"pages": [str(), *_] as pages}:
                return PdfText(pages=tuple(b64decode(page, validate=True) for page in pages))
            case {"problem": str(problem)}:
                return PdfText(problem=problem)
    except (ValueError, TypeError):
        pass
    return PdfText(problem="cannot be read: send its text")


def _new_slots() -> FairSlots:
    return FairSlots(
        NUM_PROCESSES, MAX_WAITING, max_per_client=NUM_PROCESSES // 2, what="requests with files"
    )


@dataclass(frozen=True, slots=True)
class DocumentReader:
    limits: PdfLimits = PdfLimits()
    slots: FairSlots = field(default_factory=_new_slots)

    async def read(
        self, documents: Sequence[Document], client: str, *, shows_pages: bool = False
    ) -> list[Document]:
        """Return the documents with texts, and warnings about what these leave out.

        `shows_pages`: those without text get pictures of their pages.

        Clients take turns; `client` is empty without authentication. Raises InvalidRequest and
        UnsupportedInput, which name the field, and QueueFull if too many requests wait.
        """
        pdfs = [each.content for each in documents if isinstance(each.content, bytes)]
        if not pdfs:
            return list(documents)
        async with self.slots.slot(client):
            limits = self.limits if shows_pages else replace(self.limits, max_pictures=0)
            texts = iter(await read_pdfs(pdfs, limits))
        return [
            each if isinstance(each.content, str) else _with_text(each, next(texts))
            for each in documents
        ]


def _with_text(document: Document, pdf: PdfText) -> Document:
    if pdf.problem:
        raise InvalidRequest(f"{document.label} {pdf.problem}", document.where)
    warnings = (f"{document.label}: images are left out",) if pdf.has_images else ()
    return replace(
        document, content=pdf.text, pages=pdf.pages, warnings=(*document.warnings, *warnings)
    )
