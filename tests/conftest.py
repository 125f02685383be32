"""Settings and session fixtures of all tests: SIGINT handler, trace folder, fork servers."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Generator, Iterator
from functools import cache

import pytest
from _pytest.logging import catching_logs
from hypothesis import settings

from baton.telemetry.options import TRACE_DIR_VARIABLE
from tests.support.fork_server import SERVERS, use_servers
from tests.support.forked_workers import fork_workers
from tests.support.hypothesis_profiles import PROFILE

# Idle torch threads spin otherwise, on cores that other processes need. OpenMP reads the variable
# when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Triton reads the variable when it is imported. Nothing but tests of its kernels imports it.
os.environ.setdefault("TRITON_INTERPRET", "1")
settings.load_profile(PROFILE)

GC_THRESHOLD = 50_000  # new objects

# Files that take longest, which start first so that parallel workers end at about the same time.
LONG_FILES = (
    "tests/golden/test_families.py",
    "tests/chaos/test_faults.py",
    "tests/integration/test_engine_faults.py",
    "tests/real/test_golden.py",
    "tests/packaging/test_wheel.py",
    "tests/contract/test_same_bits.py",
    "tests/contract/test_quantized_families.py",
    "tests/contract/test_runner_attention.py",
    "tests/golden/test_speculation.py",
    "tests/properties/test_scheduler.py",
    "tests/properties/test_handoff.py",
    "tests/golden/test_greedy_tokens.py",
    "tests/golden/test_state_families.py",
    "tests/golden/test_family_matrix.py",
    "tests/real/test_serving.py",
    "tests/integration/test_hostile_kv_events.py",
    "tests/integration/test_kv_tiers.py",
    "tests/contract/test_transports.py",
    "tests/chaos/test_random_requests.py",
    "tests/integration/test_tracing.py",
    "tests/integration/test_up.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--vllm-venv", default=None, help="Virtual environment with vLLM.")
    parser.addoption("--agents", default=None, help="Folder of npm with Claude Code and Codex.")
    parser.addoption("--smg-venv", default=None, help="Virtual environment with SMG's gateway.")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the long files first."""
    rank_by_file = {name: rank for rank, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: rank_by_file.get(item.nodeid.partition("::")[0], len(LONG_FILES)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import the tests without garbage collections, which took a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Exclude all that was imported from garbage collections, which took 0.2 s each."""
    gc.freeze()


def pytest_configure() -> None:
    """Restore SIGINT, which a shell makes background processes and their children ignore.

    Before any process is forked.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Fork the workers, which saves them the imports."""
    fork_workers(config)


@pytest.fixture(scope="session", autouse=True)
def _trace_dir(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
    before = os.environ.get(TRACE_DIR_VARIABLE)
    os.environ[TRACE_DIR_VARIABLE] = str(tmp_path_factory.mktemp("traces"))
    yield
    os.environ.pop(TRACE_DIR_VARIABLE)
    if before is not None:
        os.environ[TRACE_DIR_VARIABLE] = before


@pytest.fixture(scope="session", autouse=True)
def _rare_collections() -> None:
    """Collect garbage less often than Python does, which takes a tenth of the unit tests' time."""
    gc.set_threshold(GC_THRESHOLD)


@pytest.fixture(scope="session", autouse=True)
def _propagating_loggers() -> Iterator[None]:
    """Have torch's fifty loggers propagate, and pytest add its handlers to the root logger alone.

    Six times in each test it looks through all loggers for those that do not propagate, which takes
    longer than most unit tests.
    """
    for name, logger in logging.getLogger().manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catching_logs, "__enter__", _attach_to_root)
        yield


def _attach_to_root(logs: catching_logs[logging.Handler]) -> logging.Handler:
    root = logging.getLogger()
    root.addHandler(logs.handler)
    logs.attached_loggers.append(root)
    if logs.level is not None:
        logs.handler.setLevel(logs.level)
        logs.orig_level = root.level
        root.setLevel(min(logs.orig_level, logs.level))
    return logs.handler


@pytest.fixture(scope="session", autouse=True)
def _one_tls_context() -> Iterator[None]:
    """Have all HTTP clients share a TLS context, since each would read all certificates."""
    with pytest.MonkeyPatch.context() as patch:
        if httpcore := sys.modules.get("httpcore2"):
            patch.setattr(httpcore, "default_ssl_context", cache(httpcore.default_ssl_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def _forked_processes(_trace_dir: None) -> Iterator[None]:
    """Fork the processes of clusters from servers of the test process."""
    with pytest.MonkeyPatch.context() as patch:
        use_servers(patch.setattr)
        yield
    SERVERS.close()
