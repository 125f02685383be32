"""Parts of messages: texts, files as clients send them, and what these become. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baton.router.pictures.plan import ImageFile, PreparedImage


@dataclass(frozen=True, slots=True)
class DocumentFile:
    """Document of a message, with the field that has it."""

    where: str
    data: bytes = b""
    name: str = ""
    context: str = ""  # what the client says about it
    media_type: str = ""  # as the client says; empty: not known
    warnings: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Field and name, for errors and warnings."""
        return f"{self.where}: {self.name or 'the file'}"

    def with_text(self, text: str, *warnings: str) -> Document:
        """Return the document as the model sees it."""
        title = f"File {self.name}:" if self.name else "File:"
        context = f"\n{self.context}" if self.context else ""
        text = f"{title}{context}\n\n{text}"
        return Document(text, self.where, (*self.warnings, *warnings))


@dataclass(frozen=True, slots=True)
class Document:
    """Text of a document as the model sees it."""

    text: str
    where: str
    warnings: tuple[str, ...] = ()


MessageFile = DocumentFile | ImageFile  # that is not read yet
Part = str | Document | PreparedImage | MessageFile
Content = str | tuple[Part, ...]


def content_of(parts: Iterable[Part]) -> Content:
    """Return parts as the content of a message: one text, unless others are among them."""
    parts = tuple(parts)
    return text_of(parts) if all(isinstance(part, str) for part in parts) else parts


def text_of(content: Content) -> str:
    """Join texts by newlines, as vLLM does. Images have none."""
    return "\n".join(texts_of(content))


def texts_of(content: Content) -> list[str]:
    if isinstance(content, str):
        return [content]
    texts = (part.text if isinstance(part, Document) else part for part in content)
    return [text for text in texts if isinstance(text, str)]


def template_content(content: Content) -> list[dict[str, str]]:
    """Return the parts of a message as chat templates of models with images take them."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [
        {"type": "image"}
        if isinstance(part, PreparedImage)
        else {"type": "text", "text": text_of((part,))}
        for part in content
    ]
