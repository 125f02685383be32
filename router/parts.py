"""Parts of a message: texts and documents. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Document:
    """A document of a message, with the field that has it."""

    content: str | bytes  # bytes: a PDF that is not read yet
    where: str
    name: str = ""
    context: str = ""  # what the client says about it
    warnings: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Field and name, for errors and warnings."""
        return f"{self.where}: {self.name or 'the file'}"

    @property
    def text(self) -> str:
        """Text as the model sees it."""
        if not isinstance(self.content, str):
            raise TypeError(f"the document in {self.where} was not read")
        title = f"File {self.name}:" if self.name else "File:"
        context = f"\n{self.context}" if self.context else ""
        return f"{title}{context}\n\n{self.content}"


Part = str | Document
Content = str | tuple[Part, ...]


def content_of(parts: Iterable[Part]) -> Content:
    """Return parts as the content of a message: one text, unless a document is among them."""
    parts = tuple(parts)
    return parts if any(isinstance(part, Document) for part in parts) else text_of(parts)


def text_of(content: Content) -> str:
    """Join texts by newlines, as vLLM does."""
    if isinstance(content, str):
        return content
    return "\n".join(part if isinstance(part, str) else part.text for part in content)
