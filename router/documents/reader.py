"""Reads the documents of a request. PDFs are read in a process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from baton.core.errors import InvalidRequest
from baton.router.documents.pdf_process import PdfLimits, PdfText, read_pdfs
from baton.router.fair_slots import FairSlots
from baton.router.parts import Document

NUM_PROCESSES = 2
MAX_WAITING = 64  # requests, each of which holds its files in memory


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
