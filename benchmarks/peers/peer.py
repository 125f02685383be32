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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from baton.core.errors import InvalidConfig, NamedError
from benchmarks.engine.throughput import EngineBench, engine_meter, longest
from benchmarks.peers.settings import (
    GPU_SHARE,
    PATIENT,
    clean_environment,
    python_of,
    vllm_settings,
)
from benchmarks.processes import external_process

ENDS = Path(__file__).resolve().parent / "workers"
MARK = "BATON "
# Types of llama.cpp's weights, with the quantization of Baton that has as many bits.
LLAMACPP_WEIGHTS = {"bf16": "none", "q8_0": "int8", "q4_0": "int4", "q4_k_m": "int4"}


@dataclass(frozen=True, slots=True)
class PeerBench:
    """Settings of the benchmark and the environments of the peers."""

    engine: EngineBench
    vllm_venv: Path | None
    llamacpp_venv: Path | None
    scratch: Path  # for logs, and for the copy of the weights for llama.cpp
    llamacpp_weights: str = "bf16"  # or a quantized type of LLAMACPP_WEIGHTS
    openvino_venv: Path | None = None


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


StartPeer = Callable[[Path], AbstractContextManager[subprocess.Popen[str]]]  # with a log file


class PeerMeter(Protocol):
    def prefill(self, prompt_len: int) -> float: ...

    def decode(self, batch_size: int) -> float: ...


class PeerFailed(NamedError):
    """A peer process ended before it answered: it cannot run the model, for example."""


class _Peer:
    """Peer process behind two pipes, frozen with its children between requests.

    vLLM's workers spin for a second when idle, which would slow the measurement of others.
    """

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self._name = name
        self._process = process
        self._log = log
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
        reason = _last_line(self._log)
        raise PeerFailed(f"{self._name} ended with code {self._process.wait()}{reason}")


def run(
    bench: PeerBench,
    on_comparison: Callable[[Comparison], None],
    on_failure: Callable[[PeerFailed], None] = lambda _failure: None,
) -> None:
    """Run for minutes; `on_comparison` is called with each result.

    `on_failure` is called for a peer that cannot start. Raises PeerFailed if no other can, or if
    a peer ends later.
    """
    with ExitStack() as stack:
        peers = _start_peers(bench, stack, on_failure)
        own = stack.enter_context(engine_meter(bench.engine))
        for phase, size in _settings(bench.engine):
            for one in _compared(phase, size, bench.engine.num_runs, own, peers):
                on_comparison(one)


def _start_peers(
    bench: PeerBench, stack: ExitStack, on_failure: Callable[[PeerFailed], None]
) -> dict[str, PeerMeter]:
    peers: dict[str, PeerMeter] = {}
    failures: list[PeerFailed] = []
    for name, start in _starts(bench):
        log = bench.scratch / f"{name}.log"
        with ExitStack() as ends:
            try:
                peers[name] = _Peer(name, ends.enter_context(start(log)), log)
            except PeerFailed as error:
                failures.append(error)
                continue
            stack.push(ends.pop_all())
    if not peers:
        raise failures[-1]
    for failure in failures:
        on_failure(failure)
    return peers


def _settings(bench: EngineBench) -> Iterator[tuple[str, int]]:
    yield from (("decode", size) for size in bench.batch_sizes)
    yield from (("prefill", size) for size in bench.prompt_lens)


def _compared(
    phase: str, size: int, num_runs: int, own: PeerMeter, peers: Mapping[str, PeerMeter]
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


def _starts(bench: PeerBench) -> Iterator[tuple[str, StartPeer]]:
    cpus = _cpus(bench.engine.num_threads)
    settings = {
        "model": bench.engine.model,
        "max_model_len": longest(bench.engine) + 64,
        "num_threads": len(cpus),
        "num_decode_steps": bench.engine.num_decode_steps,
        "decode_prompt_len": bench.engine.decode_prompt_len,
        "scratch": str(bench.scratch),
        "weights": bench.llamacpp_weights,
    }
    if bench.vllm_venv is not None:
        is_on_cpu = bench.engine.device == "cpu"
        environment = vllm_settings(bench.vllm_venv, cpus, kv_gib=4) if is_on_cpu else PATIENT
        settings |= {
            "max_num_seqs": max(64, *bench.engine.batch_sizes),
            "gpu_share": None if is_on_cpu else GPU_SHARE,
        }
        yield "vllm", partial(_started, bench.vllm_venv, "vllm_worker.py", settings, environment)
    if bench.llamacpp_venv is not None:
        yield "llamacpp", partial(_started, bench.llamacpp_venv, "llamacpp_worker.py", settings, {})
    if bench.openvino_venv is not None:
        yield "openvino", partial(_started, bench.openvino_venv, "openvino_worker.py", settings, {})


def _cpus(num_threads: int | None) -> Sequence[int]:
    """Return one allowed core per thread."""
    cpus = sorted(os.sched_getaffinity(0))
    if num_threads is not None and num_threads > len(cpus):
        raise InvalidConfig(f"{num_threads} threads need as many cores; there are {len(cpus)}")
    return cpus[:num_threads]


@contextmanager
def _started(
    venv: Path, script: str, settings: dict[str, object], environment: dict[str, str], log: Path
) -> Iterator[subprocess.Popen[str]]:
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [str(python_of(venv)), str(ENDS / script), json.dumps(settings)]
    with (
        log.open("w", encoding="utf-8") as file,
        external_process(
            command,
            clean_environment() | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file.fileno(),
        ) as process,
    ):
        yield process


def _last_line(log: Path) -> str:
    """Return the last line of a log after a colon, or nothing."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")
