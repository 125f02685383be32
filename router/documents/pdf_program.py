"""Reader of PDFs in a confined process.

stdout: a line of JSON for each file, `{"text": …, "has_images": …}` or `{"problem": …}`.
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from typing import Any

MAX_OBJECTS = 10_000  # of a file, among which an image is searched
BROKEN_LINE = "\ufffe"  # PDFium's mark in place of a hyphen and the end of its line
BLANK = "\0\n "


class Problem(Exception):
    """A file cannot be read; the message continues the file's name."""


class Reader:
    """Reads files, within limits for all of them together."""

    def __init__(self, max_pages: int, max_characters: int) -> None:
        # Imported, with the codec that it uses, before the process can open no more files.
        import pypdfium2

        "".encode("utf-16-le")
        self._pdfium = pypdfium2
        self._max_pages, self._pages_left = max_pages, max_pages
        self._max_characters, self._characters_left = max_characters, max_characters

    def read(self, files: list[bytes]) -> None:
        for data in files:
            line = json.dumps(self._outcome(data), ensure_ascii=False) + "\n"
            sys.stdout.buffer.write(line.encode(errors="replace"))
            sys.stdout.buffer.flush()

    def _outcome(self, data: bytes) -> dict[str, object]:
        try:
            with self._pdfium.PdfDocument(data) as document:
                text, has_images = self._text_and_images(document)
        except Problem as problem:
            return {"problem": str(problem)}
        except MemoryError:
            return {"problem": "takes too much memory to read: send a smaller file, or its text"}
        except self._pdfium.PdfiumError as error:
            return {"problem": _problem_of(error, self._pdfium.raw.FPDF_ERR_PASSWORD)}
        return {"text": text, "has_images": has_images}

    def _text_and_images(self, document: Any) -> tuple[str, bool]:
        self._pages_left -= len(document)
        if self._pages_left < 0:
            raise Problem(
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
        if not text:
            raise Problem("has no text, only images: send the text of its pages")
        return text, has_images

    def _text_of(self, page: Any) -> str:
        textpage = page.get_textpage()
        self._characters_left -= textpage.count_chars()
        if self._characters_left < 0:
            raise Problem(
                f"has too much text; all files of a request may have {self._max_characters} "
                "characters: send the pages that matter"
            )
        text: str = textpage.get_text_range()
        textpage.close()
        text = text.replace("\r\n", "\n").replace(BROKEN_LINE, "-\n").replace("\0", "")
        return text.strip(BLANK)


def _problem_of(error: Exception, password_code: int) -> str:
    if getattr(error, "err_code", None) == password_code:
        return "is encrypted: send it without a password"
    return "is damaged or no PDF: send a file that PDF viewers open"
