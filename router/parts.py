"""Parts of a message: texts, documents and images. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baton.router.pictures.plan import ImageFile, PreparedImage


@dataclass(frozen=True, slots=True)
class Document:
    """A document of a message, with the field that has it."""

    content: str | bytes  # bytes: a PDF that is not read yet
    where: str
    name: str = ""
    context: str = ""  # what the client says about it
    warnings: tuple[str, ...] = ()
    pages: tuple[bytes, ...] = ()  # image files in place of a text

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


Part = str | Document | ImageFile | PreparedImage
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
