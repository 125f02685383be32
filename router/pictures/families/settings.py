"""Fields of image processors that several families have."""

from __future__ import annotations

from baton.checkpoint.json_fields import JsonFields

MAX_FILTER = 5  # of Pillow: nearest, Lanczos, bilinear, bicubic, box, Hamming
LOW_DETAIL_EDGE = 512  # pixels, as in OpenAI's API


def read_resample(processor: JsonFields, default: int) -> int:
    found = processor.number("resample", default)
    if found not in range(MAX_FILTER + 1):
        raise processor.wrong("resample", f"must be a filter of Pillow, 0 to {MAX_FILTER}")
    return int(found)


def read_edge(processor: JsonFields, name: str, edge: str, default: int) -> int:
    """Return the pixels of an edge, such as `{"size": {"longest_edge": 364}}`."""
    if not processor.has(name):
        return default
    return processor.inner(name).positive_int(edge)


def require_flag(processor: JsonFields, name: str, default: bool, expected: bool) -> None:
    """Raise ModelError unless a flag has the only value that Baton knows."""
    if processor.flag(name, default) is not expected:
        raise processor.wrong(name, f"must be {str(expected).lower()}: Baton knows no other way")
