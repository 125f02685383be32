"""Time to first token of a long prompt: computed, and loaded from a tier or pulled from a peer."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from baton.bench.load import FIRST_PLAIN_TOKEN
from baton.client import Client, Finish, Generation
from baton.cluster import ClusterOptions, LocalCluster
from baton.core.errors import InvalidConfig
from baton.core.sampling import SamplingParams

HOST, FILE, PEER = "host", "file", "peer"


@dataclass(frozen=True, slots=True)
class TiersBench:
    cluster: ClusterOptions
    host_memory: str  # of the host tier, or of the peer's KV cache: two prompts or more
    small_host_memory: str  # in front of files: a part of a prompt
    num_tokens: int = 8192
    rounds: int = 3


@dataclass(frozen=True, slots=True)
class TierRow:
    """Medians of the rounds of one tier. Each round computes a prompt and then loads it."""

    tier: str
    computed_s: float  # to the first token
    loaded_s: float
    gain: float  # median of the ratios
    loaded_tokens: int
    gains: tuple[float, ...]


def run(bench: TiersBench) -> Iterator[TierRow]:
    """Measure one source after the other, each in a cluster of its own."""
    for tier in (HOST, FILE, PEER):
        yield _measure(bench, tier)


def _measure(bench: TiersBench, tier: str) -> TierRow:
    chance = random.Random(tier)
    computed: list[float] = []
    loaded: list[float] = []
    num_loaded: list[int] = []
    with (
        _cluster(bench, tier) as (cluster, folder),
        Client(cluster.address, timeout_s=600) as client,
    ):
        vocabulary = range(FIRST_PLAIN_TOKEN, client.model().vocab_size)
        for _ in range(bench.rounds):
            prompt, other = (chance.choices(vocabulary, k=bench.num_tokens) for _ in range(2))
            computed.append(_generate(client, prompt).first_token_s)
            _generate(client, other)  # evicts the prompt from the KV cache
            _drop_from_page_cache(folder)
            finish = _generate(client, prompt)
            loaded.append(finish.first_token_s)
            num_loaded.append(finish.served.prompt_tokens_loaded.get(tier, 0))
            if not num_loaded[-1]:
                raise InvalidConfig(
                    f"nothing was loaded from the {tier} tier; choose a smaller --kv-cache-memory, "
                    "so that one prompt evicts another, or larger tiers"
                )
    gains = tuple(slow / fast for slow, fast in zip(computed, loaded, strict=True))
    return TierRow(tier, median(computed), median(loaded), median(gains), min(num_loaded), gains)


@contextmanager
def _cluster(bench: TiersBench, tier: str) -> Iterator[tuple[LocalCluster, Path]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        host = ("--kv-host-memory", bench.host_memory)
        files = ("--kv-folder", name, "--kv-folder-size", "64GiB")
        options = ClusterOptions(
            bench.cluster.model,
            node_arguments=bench.cluster.node_arguments,
            prefill_arguments={
                HOST: host,
                FILE: ("--kv-host-memory", bench.small_host_memory, *files),
                PEER: (),
            }[tier],
            # The decode node keeps what it received, and the prefill node pulls it back.
            decode_arguments=("--kv-cache-memory", bench.host_memory) if tier == PEER else (),
            router_arguments=("--trace-dir", "off", "--local-prefill-below", "0"),
        )
        with LocalCluster(options) as cluster:
            yield cluster, folder


def _generate(client: Client, prompt: Sequence[int]) -> Finish:
    sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    finish = client.generate(prompt, Generation(sampling)).finish
    if finish is None:
        raise RuntimeError("the answer has no end")
    return finish


def _drop_from_page_cache(folder: Path) -> None:
    """Write files to the disk and drop them from the page cache, so that they are read from it."""
    for path in folder.rglob("*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
