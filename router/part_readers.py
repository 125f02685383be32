"""Interface of what reads files of messages, one reader for each kind of file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeVar

from baton.router.parts import MessageFile, Part
from baton.router.pictures.plan import PictureFormat
from baton.telemetry.tracing.spans import AttributeValue

File = TypeVar("File", bound=MessageFile)
# Traces work of a name until a block ends, and yields attributes to be set.
WorkTrace = Callable[[str], AbstractContextManager[dict[str, AttributeValue]]]


def ignore_bytes(num_bytes: int) -> None:
    """Count nothing."""


def untraced(_name: str) -> AbstractContextManager[dict[str, AttributeValue]]:
    return nullcontext({})


@dataclass(frozen=True, slots=True)
class FileReading:
    """Model and client for whom the files of a prompt are read."""

    images_as: PictureFormat | None = None  # None: the model takes text alone
    client: str = ""  # name of `turn_name`: clients take turns
    hold: Callable[[int], None] = ignore_bytes  # counts bytes of files, and of what they become
    trace: WorkTrace = untraced
    model: str = ""  # its name, for errors


class PartReader(Protocol[File]):
    """Reader of the files of one kind."""

    @property
    def kind(self) -> type[File]: ...

    async def read(
        self, files: Sequence[File], reading: FileReading
    ) -> Sequence[Part | tuple[Part, ...]]:
        """Return what the prompt has in place of each file.

        Raises InvalidRequest and UnsupportedInput, which name the field, QueueFull if too many
        requests wait, and what `hold` raises.
        """
        ...
