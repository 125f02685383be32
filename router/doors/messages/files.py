"""Document and image blocks of Anthropic's messages. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from baton.core.errors import InvalidRequest
from baton.router.doors.file_data import read_base64
from baton.router.doors.messages.bodies import Block, TextBlock
from baton.router.doors.openai.request.bodies import Body, validate_by_type
from baton.router.doors.openai.request.files import image_of_url
from baton.router.input_processing.limits import check_file_name
from baton.router.parts import Document, DocumentFile
from baton.router.pictures.plan import ImageFile

NO_CITATIONS = "citations: the answer has none"


class Base64Source(Body):
    type: str
    media_type: Literal["application/pdf", "text/plain"]
    data: str


class TextSource(Body):
    type: str
    media_type: Literal["text/plain"]
    data: str


class ContentSource(Body):
    type: str
    content: str | list[Any]


class Citations(Body):
    enabled: bool = False


class DocumentBlock(Block):
    source: dict[str, Any]
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None


class ImageDataSource(Body):
    type: str
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class ImageUrlSource(Body):
    type: str
    url: str


class ImageBlock(Block):
    source: dict[str, Any]
    transformations: None = None


SOURCES: Mapping[str, type[Body]] = {
    "base64": Base64Source,
    "text": TextSource,
    "content": ContentSource,
}
IMAGE_SOURCES: Mapping[str, type[Body]] = {"base64": ImageDataSource, "url": ImageUrlSource}
# Sources without support.
NO_FILES = {"file": "files are not stored here; send the content as base64"}
NOT_HERE = {"url": "the router fetches no URLs; send the content as base64", **NO_FILES}


def document_of_block(block: DocumentBlock, where: str) -> DocumentFile | Document:
    """Raises InvalidRequest and UnsupportedInput, which name the field."""
    name, inside = block.title or "", f"{where}.source"
    check_file_name(f"{where}.title", name)
    has_citations = block.citations is not None and block.citations.enabled
    warnings = (f"{where}.{NO_CITATIONS}",) if has_citations else ()
    file = DocumentFile(where, name=name, context=block.context or "", warnings=warnings)
    match validate_by_type(block.source, SOURCES, inside, NOT_HERE):
        case Base64Source(data=data, media_type=media_type):
            content = read_base64(data, f"{inside}.data")
            return replace(file, data=content, media_type=media_type)
        case TextSource(data=text):
            return file.with_text(text)
        case ContentSource(content=content):
            return file.with_text(_text(content, f"{inside}.content"))
    raise InvalidRequest(f"{inside} has no content", inside)


def image_of_block(block: ImageBlock, where: str) -> ImageFile:
    """Raises InvalidRequest and UnsupportedInput, which name the field."""
    inside = f"{where}.source"
    match validate_by_type(block.source, IMAGE_SOURCES, inside, NO_FILES):
        case ImageDataSource(data=data):
            return ImageFile(read_base64(data, f"{inside}.data"), inside)
        case ImageUrlSource(url=url):
            return image_of_url(url, None, f"{inside}.url")
    raise InvalidRequest(f"{inside} has no content", inside)


def _text(content: str | list[Any], where: str) -> str:
    if isinstance(content, str):
        return content
    kinds = {"text": TextBlock}
    blocks = [
        validate_by_type(each, kinds, f"{where}.{index}") for index, each in enumerate(content)
    ]
    return "\n".join(block.text for block in blocks)
