"""Settings of the HTTP APIs that operators choose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from baton.core.errors import InvalidConfig
from baton.core.options import SECURITY, Option, check_options

ANY_ORIGIN = "*"


def parse_origins(written: str) -> tuple[str, ...]:
    """Parse a comma-separated list. Raises InvalidConfig."""
    origins = tuple(origin.strip() for origin in written.split(",") if origin.strip())
    for origin in origins:
        parts = urlsplit(origin)
        is_origin = parts.scheme in ("http", "https") and bool(parts.netloc)
        if origin != ANY_ORIGIN and (not is_origin or origin != f"{parts.scheme}://{parts.netloc}"):
            raise InvalidConfig(
                f"allowed-origins: {origin!r} is not an origin; give scheme://host:port without "
                "a path, or *"
            )
    return origins


@dataclass(frozen=True, slots=True)
class CorsConfig:
    """Cross-origin requests of browsers; without origins they are off."""

    allowed_origins: Annotated[
        tuple[str, ...],
        Option(
            "Comma-separated origins whose web pages may call the HTTP API (CORS); * allows all.",
            SECURITY,
            default="",
            parse=parse_origins,
            is_setting=True,
        ),
    ] = ()
    allow_credentials: Annotated[
        bool,
        Option(
            "Allow web pages of allowed-origins to send cookies and certificates.",
            SECURITY,
            is_setting=True,
        ),
    ] = False

    def __post_init__(self) -> None:
        check_options(self)
        if self.allow_credentials and (
            not self.allowed_origins or ANY_ORIGIN in self.allowed_origins
        ):
            raise InvalidConfig(
                "allow-credentials needs allowed-origins with the origins by name, not *"
            )


NO_CORS = CorsConfig()
