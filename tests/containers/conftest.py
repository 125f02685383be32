"""Fixtures of the container image, built once, and of clusters of its containers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.containers.compose import ContainerCluster, missing


@pytest.fixture(scope="session", autouse=True)
def _docker() -> None:
    why_not = missing()
    if why_not:
        pytest.skip(why_not)


@pytest.fixture(scope="module")
def _plain() -> Iterator[ContainerCluster]:
    plain = ContainerCluster("baton-test")
    plain.build()
    yield plain
    plain.down()


@pytest.fixture
def cluster(_plain: ContainerCluster) -> ContainerCluster:
    """Return a cluster of two prefill and two decode nodes, restored before each test."""
    _plain.scale(prefill=2, decode=2)
    return _plain
