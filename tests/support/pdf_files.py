"""Small PDFs, and hostile ones."""

from __future__ import annotations

import base64
import zlib

CATALOG = b"<< /Type /Catalog /Pages 2 0 R >>"
FONT = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"
PAGE = b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 300 144] /Contents 4 0 R /Resources 6 0 R >>"
IMAGE_SIZE = b"/Width 2 /Height 2 /BitsPerComponent 8 /ColorSpace /DeviceGray"
SHOW_IMAGE = b" /I Do"
SPACES = b" " * (1 << 26)  # a page that takes long to read, and much memory
LOCK = b" /ID [<00><00>] /Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <%b> /U <%b> >>" % (
    b"41" * 32,
    b"42" * 32,
)


def show(text: str) -> bytes:
    """Return the operators of a page that show a line of text."""
    return b"BT /F1 12 Tf 72 72 Td (%b) Tj ET" % text.encode()


def pdf_of(*contents: bytes, more_of_trailer: bytes = b"") -> bytes:
    """Return a PDF, one page for each of the contents, which can show an image `I`."""
    pages = range(9, 9 + 2 * len(contents), 2)
    kids = b" ".join(b"%d 0 R" % number for number in pages)
    objects = {
        1: CATALOG,
        2: b"<< /Type /Pages /Kids [%b] /Count %d >>" % (kids, len(contents)),
        5: FONT,
        6: b"<< /Font << /F1 5 0 R >> /XObject << /I 7 0 R >> >>",
        7: _stream(b"\0" * 4, b"/Type /XObject /Subtype /Image " + IMAGE_SIZE),
    }
    for number, content in zip(pages, contents, strict=True):
        objects[number] = PAGE.replace(b"4 0 R", b"%d 0 R" % (number + 1))
        objects[number + 1] = _stream(content)
    return _file(objects, b"/Root 1 0 R" + more_of_trailer)


def many_pages(number: int) -> bytes:
    """Return a small file with this number of pages, which are all the same one."""
    pages = b"<< /Type /Pages /Kids [%b] /Count %d >>" % (b"3 0 R " * number, number)
    return _file({1: CATALOG, 2: pages, 3: PAGE, 4: _stream(b""), 6: b"<< >>"}, b"/Root 1 0 R")


def data_url(data: bytes, media_type: str = "application/pdf") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def _stream(data: bytes, entries: bytes = b"") -> bytes:
    packed = zlib.compress(data)
    head = b"<< /Filter /FlateDecode /Length %d %b >>\nstream\n" % (len(packed), entries)
    return head + packed + b"\nendstream"


def _file(objects: dict[int, bytes], trailer: bytes) -> bytes:
    written, places = bytearray(b"%PDF-1.4\n"), {}
    for number, body in objects.items():
        places[number] = len(written)
        written += b"%d 0 obj\n%b\nendobj\n" % (number, body)
    start = len(written)
    written += b"xref\n"
    for number, place in places.items():
        written += b"%d 1\n%010d 00000 n \n" % (number, place)
    size = max(objects) + 1
    return bytes(written) + b"trailer\n<< /Size %d %b >>\nstartxref\n%d\n%%%%EOF" % (
        size,
        trailer,
        start,
    )
