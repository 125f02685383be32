"""Reads the documents of a request: texts, and PDFs in a process."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from sys import getsizeof
from typing import ClassVar

from pydantic_core import from_json

from baton.core.errors import InvalidRequest
from baton.router.confined.process import FileReader, ProcessLimits, confined_process, reading_slots
from baton.router.documents.document import text_of_file
from baton.router.input_processing.limits import check_count
from baton.router.input_processing.tokenization import LargeTextConfig, LargeTexts
from baton.router.part_readers import FileReading
from baton.router.parts import DocumentFile, Part
from baton.router.pictures.plan import ImageFile

MAX_FILES = 64  # of a request
SMALL_BYTES = 1 << 16  # of texts that are decoded without a thread
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


LIMITS = PdfLimits()


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


class DocumentReader:
    """Reads files as texts, and PDFs without text as pictures of their pages."""

    kind: ClassVar = DocumentFile

    def __init__(self) -> None:
        self._slots = reading_slots("requests with files")
        self._threads = LargeTexts(LargeTextConfig(SMALL_BYTES, num_threads=1))

    async def read(
        self, files: Sequence[DocumentFile], reading: FileReading
    ) -> list[tuple[Part, ...]]:
        """Return the documents, each before its pages. Raises as `PartReader` says."""
        check_count("files of a request", len(files), MAX_FILES)
        num_bytes = sum(len(file.data) for file in files)
        reading.hold(num_bytes)
        texts = await self._threads.run(num_bytes, partial(_texts_in, files), reading.client)
        reading.hold(sum(map(getsizeof, filter(None, texts))))
        pdfs = [file.data for file, text in zip(files, texts, strict=True) if text is None]
        read = iter(await self._read_pdfs(pdfs, reading) if pdfs else ())
        return [
            (file.with_text(text),) if text is not None else _parts_of(file, next(read))
            for file, text in zip(files, texts, strict=True)
        ]

    async def _read_pdfs(self, pdfs: Sequence[bytes], reading: FileReading) -> list[PdfText]:
        async with self._slots.slot(reading.client):
            limits = LIMITS if reading.images_as else replace(LIMITS, max_pictures=0)
            read = await read_pdfs(pdfs, limits)
        reading.hold(sum(getsizeof(pdf.text) for pdf in read))
        return read


def _texts_in(files: Sequence[DocumentFile]) -> list[str | None]:
    return [text_of_file(file) for file in files]


def _parts_of(file: DocumentFile, pdf: PdfText) -> tuple[Part, ...]:
    if pdf.problem:
        raise InvalidRequest(f"{file.label} {pdf.problem}", file.where)
    warnings = (f"{file.label}: images are left out",) if pdf.has_images else ()
    pages = (ImageFile(page, file.where) for page in pdf.pages)
    return file.with_text(pdf.text, *warnings), *pages
