"""The environment by which this process and its children find a small S3 server."""

from __future__ import annotations

import pytest

from benchmarks.chaos.s3_server import S3Server, environment_for


def point_environment_at(server: S3Server, patch: pytest.MonkeyPatch) -> None:
    for name, value in environment_for(server).items():
        patch.setenv(name, value)
