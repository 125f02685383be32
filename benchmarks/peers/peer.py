"""Peer benchmark: Baton and other engines alternately, on the same model folder and load.

Each peer runs in its own virtual environment, as a process that loads the model once and then
measures on request. The processes that do not measure are frozen.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from baton.bench.engine.benchmark import DECODE_PROMPT_LEN, EngineBench, engine_meter, longest
from benchmarks.peers.settings import clean_environment, python_of, vllm_settings
from benchmarks.processes import external_process
from engine.errors import EngineError, InvalidConfig

ENDS = Path(__file__).resolve().parent / "workers"
MARK = "BATON "


@dataclass(frozen=True, slots=True)
class PeerBench:
    """Settings of the benchmark and the environments of the peers."""

    engine: EngineBench
    vllm_venv: Path | None
    llamacpp_venv: Path | None
    scratch: Path  # for the copy of the weights for llama.cpp


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians of tokens per second; the ratio is the median over the pairs."""

    peer: str
    phase: str  # prefill or decode
    size: int
    baton_tokens_per_s: float
    peer_tokens_per_s: float
    ratio: float
    worst_ratio: float
    best_ratio: float


class PeerMeter(Protocol):
    def prefill(self, prompt_len: int) -> float: ...

    def decode(self, batch_size: int) -> float: ...


class PeerFailed(EngineError):
    """A peer process ended before it answered."""


class _Peer:
    """Peer process behind two pipes, frozen with its children between requests.

    vLLM's workers spin for a second when idle, which would slow the measurement of others.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._answer()  # wait until it is ready
        os.killpg(process.pid, signal.SIGSTOP)

    def prefill(self, prompt_len: int) -> float:
        return self._request("prefill", prompt_len)

    def decode(self, batch_size: int) -> float:
        return self._request("decode", batch_size)

    def _request(self, phase: str, size: int) -> float:
        os.killpg(self._process.pid, signal.SIGCONT)
        if self._process.stdin is not None:
            request = json.dumps({"phase": phase, "size": size}) + "\n"
            # `_answer` reports a process that has ended. A buffered write would fail later.
            with suppress(BrokenPipeError):
                os.write(self._process.stdin.fileno(), request.encode())
        rate = float(self._answer())
        os.killpg(self._process.pid, signal.SIGSTOP)
        return rate

    def _answer(self) -> str:
        # Engines write their own lines to the same pipe.
        for line in self._process.stdout or ():
            if line.startswith(MARK):
                return line.removeprefix(MARK).strip()
        raise PeerFailed(f"{self._process.args!r} ended with code {self._process.wait()}")


def run(bench: PeerBench, on_comparison: Callable[[Comparison], None]) -> None:
    """Run for minutes; `on_comparison` is called with each result. Raises PeerFailed."""
    with ExitStack() as stack:
        peers = dict(_peers(bench, stack))
        own = stack.enter_context(engine_meter(bench.engine))
        for phase, size in _settings(bench.engine):
            supported = {name: one for name, one in peers.items() if _supports(name, phase, size)}
            for one in _compared(phase, size, bench.engine.num_runs, own, supported):
                on_comparison(one)


def _settings(bench: EngineBench) -> Iterator[tuple[str, int]]:
    yield from (("decode", size) for size in bench.batch_sizes)
    yield from (("prefill", size) for size in bench.prompt_lens)


def _supports(name: str, phase: str, size: int) -> bool:
    return name == "vllm" or phase == "prefill" or size == 1


def _compared(
    phase: str, size: int, num_runs: int, own: PeerMeter, peers: dict[str, PeerMeter]
) -> Iterator[Comparison]:
    """Measure Baton and the peers one right after the other in each round."""
    meters = {"baton": own, **peers}
    for meter in meters.values():
        getattr(meter, phase)(size)  # warm-up: page faults, thread start
    rounds = [
        {name: float(getattr(meter, phase)(size)) for name, meter in meters.items()}
        for _ in range(num_runs)
    ]
    for name in peers:
        ratios = [rates["baton"] / rates[name] for rates in rounds]
        yield Comparison(
            name,
            phase,
            size,
            statistics.median(rates["baton"] for rates in rounds),
            statistics.median(rates[name] for rates in rounds),
            statistics.median(ratios),
            min(ratios),
            max(ratios),
        )


def _peers(bench: PeerBench, stack: ExitStack) -> Iterator[tuple[str, PeerMeter]]:
    cpus = _cpus(bench.engine.num_threads)
    settings = {
        "model": bench.engine.model,
        "max_model_len": longest(bench.engine) + 64,
        "num_threads": len(cpus),
        "num_decode_steps": bench.engine.num_decode_steps,
        "decode_prompt_len": DECODE_PROMPT_LEN,
        "scratch": str(bench.scratch),
        "weights": "q8_0" if bench.engine.quantize == ("int8",) else "bf16",
    }
    if bench.vllm_venv is not None:
        environment = vllm_settings(bench.vllm_venv, cpus, kv_gib=4)
        process = _started(bench.vllm_venv, "vllm_worker.py", settings, environment)
        yield "vllm", _Peer(stack.enter_context(process))
    if bench.llamacpp_venv is not None:
        process = _started(bench.llamacpp_venv, "llamacpp_worker.py", settings, {})
        yield "llamacpp", _Peer(stack.enter_context(process))


def _cpus(num_threads: int | None) -> Sequence[int]:
    """Return one allowed core per thread."""
    cpus = sorted(os.sched_getaffinity(0))
    if num_threads is not None and num_threads > len(cpus):
        raise InvalidConfig(f"{num_threads} threads need as many cores; there are {len(cpus)}")
    return cpus[:num_threads]


def _started(
    venv: Path, script: str, settings: dict[str, object], environment: dict[str, str]
) -> AbstractContextManager[subprocess.Popen[str]]:
    return external_process(
        _command(python_of(venv), ENDS / script, settings),
        clean_environment() | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def _command(python: Path, script: Path, settings: dict[str, object]) -> Sequence[str]:
    return [str(python), str(script), json.dumps(settings)]
