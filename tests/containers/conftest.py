"""The image, built once, and clusters of its containers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.containers.compose import ContainerCluster, compose, missing


@pytest.fixture(scope="session")
def _image() -> Iterator[None]:
    why_not = missing()
    if why_not:
        pytest.skip(why_not)
    compose("build", "--quiet")
    yield
    compose("down", "--volumes", "--timeout", "10")


@pytest.fixture
def cluster(_image: None) -> ContainerCluster:
    """Two prefill nodes and two decode nodes, whatever the test before did to them."""
    running = ContainerCluster()
    running.scale(prefill=2, decode=2)
    return running
