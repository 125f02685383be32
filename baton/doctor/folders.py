"""Checks of the folders that processes write to: traces and the model cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from baton.doctor.findings import Finding, ok, warn
from baton.writable import folder_error


def check_folders(trace_dir: Path | None) -> Iterator[Finding]:
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
