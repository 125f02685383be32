"""Check for the extra `baton[smg]`, whose package has the messages of SMG's gRPC services."""

from __future__ import annotations

from importlib.util import find_spec

from baton.core.errors import InvalidConfig

SERVICE_OPTION = "--smg"


def check_installed() -> None:
    """Raises InvalidConfig without the package."""
    if find_spec("smg_grpc_proto") is None:
        raise InvalidConfig(
            f"{SERVICE_OPTION} needs the package smg-grpc-proto: pip install 'baton[smg]'"
        )
