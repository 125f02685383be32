"""Findings of `baton doctor`, one per check. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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
