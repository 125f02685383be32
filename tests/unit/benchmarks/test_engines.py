"""Selection of the engines of a benchmark by its options."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from baton.core.errors import InvalidConfig
from benchmarks.peers.completions_api import CompletionsApi
from benchmarks.peers.engine_options import announced, chosen_engines, keep_engines_warm

WAYS = "shipped, patched, baton"

two_cores = pytest.mark.usefixtures("cores")


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    return tmp_path


@two_cores
def test_engines_are_built_in_each_requested_variant(venv: Path) -> None:
    assert list(chosen_engines("model", "default,120", venv, "default,64", WAYS)) == [
        "baton, prefill and decode",
        "baton, colocated",
        "baton, colocated, steps of 120 ms",
        "vllm, colocated, steps of default",
        "vllm, colocated, steps of 64",
        "vllm, prefill and decode, shipped",
        "vllm, prefill and decode, patched",
        "vllm prefill, baton decode",
    ]


@two_cores
def test_vllm_is_left_out_without_its_environment() -> None:
    assert len(chosen_engines("model", "default", None, "default", "")) == 2
    with pytest.raises(InvalidConfig, match="vllm-venv"):
        chosen_engines("model", "default", None, "default", "shipped")


@two_cores
def test_on_a_gpu_only_prefill_and_decode_nodes_are_compared(venv: Path) -> None:
    chosen = chosen_engines("model", "", venv, "", "shipped", "cuda", "triton")

    assert list(chosen) == ["baton, prefill and decode", "vllm, prefill and decode, shipped"]
    with pytest.raises(InvalidConfig, match="colocated engines run on the CPU"):
        chosen_engines("model", "default", venv, "", "shipped", "cuda")
    with pytest.raises(InvalidConfig, match="baton runs on the CPU"):
        chosen_engines("model", "", venv, "", "baton", "cuda")


@two_cores
def test_invalid_engines_are_refused_before_the_start(venv: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="painted"):
        chosen_engines("model", "default", venv, "", "painted")
    with pytest.raises(InvalidConfig, match="not a virtual environment"):
        chosen_engines("model", "default", tmp_path / "gone", "", "")


@two_cores
def test_keeping_servers_warm_requires_memory_for_all_of_them(
    venv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = venv / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(bytes(2**20))
    engines = chosen_engines(str(model), "default", venv, "default", "patched")  # three servers

    with ExitStack() as lifetime:
        monkeypatch.setattr(
            "baton.engine.runner.device.host_memory.free_host_bytes", lambda: 11 * 2**30
        )
        assert list(keep_engines_warm(engines, str(model), lifetime)) == list(engines)

        monkeypatch.setattr(
            "baton.engine.runner.device.host_memory.free_host_bytes", lambda: 10 * 2**30
        )
        with pytest.raises(InvalidConfig, match="3 vLLM servers need"):
            keep_engines_warm(engines, str(model), lifetime)


def test_one_core_is_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})

    with pytest.raises(InvalidConfig, match="one core each"):
        chosen_engines("model", "default", None, "", "")


def test_the_progress_of_engines_is_reported() -> None:
    reported: list[str] = []

    @contextmanager
    def start() -> Iterator[CompletionsApi]:
        reported.append("started")
        yield CompletionsApi("http://nowhere")

    with announced({"one": start}, reported.append)["one"]() as api:
        reported.append(api.url)

    assert reported == ["one: starting", "started", "one: measuring", "http://nowhere"]
