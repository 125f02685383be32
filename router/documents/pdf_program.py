"""Reader of PDFs in a confined process.

stdout: a line of JSON for each file, `{"text": …, "has_images": …}`, `{"pages": […]}` with PNG
files in base64 for one without text, or `{"problem": …}`.
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from base64 import b64encode
from itertools import islice
from typing import Any

PNG_SIGNATURE, RGB_BYTES = b"\x89PNG\r\n\x1a\n", 3
PAGE_EDGE = 1_536  # pixels of a picture's longer edge
MAX_OBJECTS = 10_000  # of a file, among which an image is searched
BROKEN_LINE = "\ufffe"  # PDFium's mark in place of a hyphen and the end of its line
BLANK = "\0\n "


class PdfProblem(Exception):
    """A file cannot be read; the message continues the file's name."""


class Reader:
    """Reads files, within limits for all of them together."""

    def __init__(self, max_pages: int, max_characters: int, max_pictures: int) -> None:
        """`max_pictures` of pages without text are made; 0: the model takes none."""
        # Imported, with the codec that it uses, before the process can open no more files.
        import pypdfium2

        "".encode("utf-16-le")
        self._pdfium = pypdfium2
        self._max_pages, self._pages_left = max_pages, max_pages
        self._max_characters, self._characters_left = max_characters, max_characters
        self._max_pictures, self._pictures_left = max_pictures, max_pictures

    def read(self, files: list[bytes]) -> None:
        for data in files:
            line = json.dumps(self._outcome(data), ensure_ascii=False) + "\n"
            sys.stdout.buffer.write(line.encode(errors="replace"))
            sys.stdout.buffer.flush()

    def _outcome(self, data: bytes) -> dict[str, object]:
        try:
            with self._pdfium.PdfDocument(data) as document:
                text, has_images = self._text_and_images(document)
                if not text:
                    return {"pages": self._pictures_of(document)}
        except PdfProblem as problem:
            return {"problem": str(problem)}
        except MemoryError:
            return {"problem": "takes too much memory to read: send a smaller file, or its text"}
        except self._pdfium.PdfiumError as error:
            return {"problem": _problem_of(error, self._pdfium.raw.FPDF_ERR_PASSWORD)}
        return {"text": text, "has_images": has_images}

    def _text_and_images(self, document: Any) -> tuple[str, bool]:
        self._pages_left -= len(document)
        if self._pages_left < 0:
            raise PdfProblem(
                f"has {len(document)} pages; all files of a request may have {self._max_pages}: "
                "send the pages that matter"
            )
        pages, has_images, objects_left = [], False, MAX_OBJECTS
        for page in document:
            pages.append(self._text_of(page))
            if not has_images and objects_left > 0:
                kinds = [found.type for found in islice(page.get_objects(), objects_left)]
                has_images = self._pdfium.raw.FPDF_PAGEOBJ_IMAGE in kinds
                objects_left -= len(kinds)
            page.close()
        text = "\n\n".join(filter(None, pages))
        return text, has_images

    def _pictures_of(self, document: Any) -> list[str]:
        if not self._max_pictures:
            raise PdfProblem("has no text, only images: send the text of its pages")
        self._pictures_left -= len(document)
        if self._pictures_left < 0:
            raise PdfProblem(
                f"has {len(document)} pages without text; all files of a request may have "
                f"{self._max_pictures} of them: send the pages that matter"
            )
        return [b64encode(self._picture_of(page)).decode() for page in document]

    def _picture_of(self, page: Any) -> bytes:
        scale = PAGE_EDGE / max(*page.get_size(), 1)
        bitmap = page.render(scale=scale, rev_byteorder=True)  # rows of red, green and blue
        pixels, used = memoryview(bitmap.buffer).cast("B"), bitmap.width * RGB_BYTES
        starts = range(0, bitmap.stride * bitmap.height, bitmap.stride)
        rows = b"".join(b"\0" + pixels[start : start + used] for start in starts)
        page.close()
        return _png(bitmap.width, bitmap.height, rows)

    def _text_of(self, page: Any) -> str:
        textpage = page.get_textpage()
        self._characters_left -= textpage.count_chars()
        if self._characters_left < 0:
            raise PdfProblem(
                f"has too much text; all files of a request may have {self._max_characters} "
                "characters: send the pages that matter"
            )
        text: str = textpage.get_text_range()
        textpage.close()
        text = text.replace("\r\n", "\n").replace(BROKEN_LINE, "-\n").replace("\0", "")
        return text.strip(BLANK)


def _png(width: int, height: int, rows: bytes) -> bytes:
    """Return a PNG file of rows that begin with the filter 0."""
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows, 1)),
        (b"IEND", b""),
    )
    return PNG_SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def _problem_of(error: Exception, password_code: int) -> str:
    if getattr(error, "err_code", None) == password_code:
        return "is encrypted: send it without a password"
    return "is damaged or no PDF: send a file that PDF viewers open"
