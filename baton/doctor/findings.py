"""What the doctor finds: one value for each look at the machine. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    OK = "ok"
    WARN = "warn"  # it works, less well than it could
    FAIL = "fail"  # something that was asked for does not work


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    status: Status
    found: str
    advice: str = ""  # what to do; empty when all is well


def ok(check: str, found: str) -> Finding:
    return Finding(check, Status.OK, found)


def warn(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Status.WARN, found, advice)


def fail(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Status.FAIL, found, advice)
