"""Fixtures of model folders and runners, made once per session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.runner.load import RunnerConfig, load_runner
from baton.engine.runner.model_runner import TorchRunner
from tests.support.families import FAMILY_VARIANTS, STATE_VARIANTS, WRAPPED_PLAIN, WRAPPED_TEXT
from tests.support.models import VARIANTS, make_model_folder

BLOCK_SIZE = 16
KV_CACHE_BYTES = 4 << 20


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-models-page", action="store_true", help="update its matrix")


EVERY_VARIANT = {**FAMILY_VARIANTS, **WRAPPED_PLAIN, **WRAPPED_TEXT, **STATE_VARIANTS}


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Run torch with one thread: small models are slower with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = make_model_folder(tmp_path_factory.mktemp(name), VARIANTS[name])
        return made[name]

    return make


@pytest.fixture(scope="session")
def runner_of(model_folder: Callable[[str], Path]) -> Iterator[Callable[[str], TorchRunner]]:
    loaded: dict[str, TorchRunner] = {}

    def load(name: str) -> TorchRunner:
        if name not in loaded:
            config = RunnerConfig(
                str(model_folder(name)),
                block_size=BLOCK_SIZE,
                kv_cache_bytes=KV_CACHE_BYTES,
                max_num_seqs=32,
            )
            loaded[name] = load_runner(config)
        return loaded[name]

    yield load
    for runner in loaded.values():
        runner.__exit__(None, None, None)


@pytest.fixture(scope="session")
def family_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            variant = EVERY_VARIANT[name]
            made[name] = make_model_folder(tmp_path_factory.mktemp(name), variant)
        return made[name]

    return make


@pytest.fixture(scope="session")
def family_runner(family_folder: Callable[[str], Path]) -> Iterator[Callable[..., TorchRunner]]:
    """Yield a loader of runners. Settings other than the family make further runners."""
    loaded: dict[tuple[str, ...], TorchRunner] = {}

    def load(name: str, **settings: Any) -> TorchRunner:
        key = (name, *map(str, settings.values()))
        if key not in loaded:
            settings.pop("copy", "")
            config = RunnerConfig(
                str(family_folder(name)),
                block_size=BLOCK_SIZE,
                max_num_seqs=32,
                **{"kv_cache_bytes": KV_CACHE_BYTES, **settings},
            )
            loaded[key] = load_runner(config)
        return loaded[key]

    yield load
    for runner in loaded.values():
        runner.__exit__(None, None, None)
