"""Peer benchmark: Baton and other engines alternately, on the same model folder and load.

Each peer runs in its own virtual environment, as a process that loads the model once and then
measures on request. The processes that do not measure are frozen.
"""

from __future__ import annotations

import os
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from baton.core.errors import InvalidConfig
from benchmarks.engine.throughput import EngineBench, engine_meter, longest
from benchmarks.peers.peer_process import PeerFailed, PeerProcess, start_peer
from benchmarks.peers.settings import GPU_SHARE, PATIENT, vllm_settings

WORKERS = Path(__file__).resolve().parent / "workers"
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


class _Peer(PeerProcess):
    def prefill(self, prompt_len: int) -> float:
        return float(self.request(phase="prefill", size=prompt_len))

    def decode(self, batch_size: int) -> float:
        return float(self.request(phase="decode", size=batch_size))


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
        yield (
            "vllm",
            partial(start_peer, bench.vllm_venv, WORKERS / "vllm_worker.py", settings, environment),
        )
    if bench.llamacpp_venv is not None:
        yield (
            "llamacpp",
            partial(start_peer, bench.llamacpp_venv, WORKERS / "llamacpp_worker.py", settings, {}),
        )
    if bench.openvino_venv is not None:
        yield (
            "openvino",
            partial(start_peer, bench.openvino_venv, WORKERS / "openvino_worker.py", settings, {}),
        )


def _cpus(num_threads: int | None) -> Sequence[int]:
    """Return one allowed core per thread."""
    cpus = sorted(os.sched_getaffinity(0))
    if num_threads is not None and num_threads > len(cpus):
        raise InvalidConfig(f"{num_threads} threads need as many cores; there are {len(cpus)}")
    return cpus[:num_threads]
