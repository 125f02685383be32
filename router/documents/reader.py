"""Reads the documents of a request. PDFs are read in a process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.core.errors import InvalidRequest
from baton.router.documents.document import Document
from baton.router.documents.pdf_process import PdfLimits, PdfText, read_pdfs
from baton.router.fair_slots import FairSlots

NUM_PROCESSES = 2
MAX_WAITING = 64  # requests, each of which holds its files in memory


def _new_slots() -> FairSlots:
    return FairSlots(
        NUM_PROCESSES, MAX_WAITING, max_per_client=NUM_PROCESSES // 2, what="requests with files"
    )


class ReadDocument(NamedTuple):
    text: str
    warning: str = ""


@dataclass(frozen=True, slots=True)
class DocumentReader:
    limits: PdfLimits = PdfLimits()
    slots: FairSlots = field(default_factory=_new_slots)

    async def read(self, documents: Sequence[Document], client: str) -> list[ReadDocument]:
        """Return the texts of the documents.

        Clients take turns; `client` is empty without authentication. Raises InvalidRequest and
        UnsupportedInput, which name the field, and QueueFull if too many requests wait.
        """
        pdfs = [document for document in documents if isinstance(document.content, bytes)]
        texts = iter(await self._read_pdfs(pdfs, client) if pdfs else ())
        return [
            ReadDocument(document.content)
            if isinstance(document.content, str)
            else _with_warning(document, next(texts))
            for document in documents
        ]

    async def _read_pdfs(self, documents: Sequence[Document], client: str) -> list[PdfText]:
        files = [each.content for each in documents if isinstance(each.content, bytes)]
        async with self.slots.slot(client):
            texts = await read_pdfs(files, self.limits)
        for document, pdf in zip(documents, texts, strict=False):
            if pdf.problem:
                raise InvalidRequest(f"{document.label} {pdf.problem}", document.where)
        return texts


def _with_warning(document: Document, pdf: PdfText) -> ReadDocument:
    return ReadDocument(
        pdf.text, f"{document.label}: images are left out" if pdf.has_images else ""
    )
