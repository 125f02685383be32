"""Findings of `baton doctor`, one per check, and the checks of folders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from baton.writable import folder_error


class Status(Enum):
    OK = "ok"
    WARN = "warn"  # works, but worse than it could
    FAIL = "fail"  # a requested feature does not work


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    status: Status
    found: str
    advice: str = ""  # what to do; empty if the status is OK


def ok(check: str, found: str) -> Finding:
    return Finding(check, Status.OK, found)


def warn(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Status.WARN, found, advice)


def fail(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Status.FAIL, found, advice)


def check_folders(trace_dir: Path | None) -> Iterator[Finding]:
    """Check the folders that processes write to: traces and the model cache."""
    if trace_dir is None:
        yield ok("traces", "not kept (--trace-dir none)")
    else:
        advice = "no traces are kept there; give nodes and router another --trace-dir, or none"
        yield folder_finding("traces", trace_dir, advice)
    advice = "models are not downloaded into it; set HF_HOME, or give --model a folder"
    yield folder_finding("model cache", _hub_cache(), advice)


def folder_finding(check: str, folder: Path, advice: str) -> Finding:
    trouble = folder_error(folder)
    return ok(check, str(folder)) if trouble is None else warn(check, trouble, advice)


def _hub_cache() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)
