"""Settings of a node's LoRA adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from baton.core.errors import InvalidConfig, InvalidRequest
from baton.core.options import ADAPTERS, Option, check_options

MAX_NAME_CHARACTERS, MAX_ID_CHARACTERS = 256, 128
PLACES_IN_MEMORY = 4  # by default, for each of max-loras


class AdapterFolder(NamedTuple):
    """Adapter that a node has from its start."""

    name: str
    folder: Path


def check_name(name: str) -> None:
    """Raise InvalidRequest unless the name fits an adapter."""
    if not name or len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
        raise InvalidRequest(
            f"an adapter's name must have 1 to {MAX_NAME_CHARACTERS} printable characters", "name"
        )


def check_id(adapter_id: str) -> None:
    """Raise InvalidRequest unless this can be the digest of an adapter."""
    if len(adapter_id) > MAX_ID_CHARACTERS or not adapter_id.isalnum():
        raise InvalidRequest(
            f"an adapter's id must have 1 to {MAX_ID_CHARACTERS} letters and digits", "id"
        )


def parse_adapters(written: Sequence[str]) -> tuple[AdapterFolder, ...]:
    """Parse NAME=FOLDER. Raises InvalidConfig."""
    adapters = tuple(_parse_adapter(one) for one in written if one)
    names = [adapter.name for adapter in adapters]
    for name in names:
        if names.count(name) > 1:
            raise InvalidConfig(f"--lora is given twice for {name}")
    return adapters


def _parse_adapter(written: str) -> AdapterFolder:
    name, _, folder = written.partition("=")
    if not folder:
        raise InvalidConfig(f"--lora {written!r}: write NAME=FOLDER")
    try:
        check_name(name)
    except InvalidRequest as error:
        raise InvalidConfig(f"--lora: {error}") from None
    return AdapterFolder(name, Path(folder).expanduser())


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Settings of adapters. Without a folder of one, or for them, the node serves none."""

    adapters: Annotated[
        tuple[AdapterFolder, ...],
        Option(
            "LoRA adapter to serve, as NAME=FOLDER; may be repeated. The folder is as PEFT saves "
            "it.",
            ADAPTERS,
            name="lora",
            kind=list[str],
            parse=parse_adapters,
        ),
    ] = ()
    root: Annotated[
        Path | None,
        Option(
            "Folder below which adapters can be loaded while the node runs. Default: none.",
            ADAPTERS,
            name="lora_root",
        ),
    ] = None
    max_loras: Annotated[
        int,
        Option(
            "Maximum number of different adapters in a batch.",
            ADAPTERS,
            at_least=1,
            is_setting=True,
        ),
    ] = 8
    max_lora_rank: Annotated[
        int, Option("Maximum rank of an adapter's matrices.", ADAPTERS, at_least=1, is_setting=True)
    ] = 64
    max_cpu_loras: Annotated[
        int | None,
        Option(
            "Maximum number of adapters in memory, at least max-loras; the least recently used "
            "are evicted, and read again when a request needs them. Default: 4 times max-loras.",
            ADAPTERS,
            at_least=1,
            is_setting=True,
        ),
    ] = None

    def __post_init__(self) -> None:
        check_options(self)
        if self.num_places < self.max_loras:
            raise InvalidConfig(
                f"max-cpu-loras is {self.num_places}; it must be at least max-loras, which is "
                f"{self.max_loras}"
            )

    @property
    def are_served(self) -> bool:
        return bool(self.adapters) or self.root is not None

    @property
    def num_places(self) -> int:
        """Places for adapters in memory."""
        return self.max_cpu_loras or PLACES_IN_MEMORY * self.max_loras
