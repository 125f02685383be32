"""Chaos runs with speculative decoding: one after the other, each by another method."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.chaos.benchmark import ChaosBench
from benchmarks.chaos.cluster_config import ChaosClusterConfig

DEMO, EAGLE3 = "models/demo", "models/demo-eagle3"


@dataclass(frozen=True, slots=True)
class DraftMethod:
    """Method, with a model that has what it needs. Drafts are always made, whatever they cost."""

    speculative: str
    kv_cache_memory: str  # for about as many tokens by each method
    speculative_model: str = ""
    mtp_variant: str = ""  # small model of the tests with a layer for MTP; empty: the demo model


METHODS = (
    DraftMethod("suffix:4:fixed", "3MiB"),
    DraftMethod("eagle3:3:fixed", "4MiB", EAGLE3),
    DraftMethod("draft:3:fixed", "6MiB", DEMO),  # the model itself: all its drafts are right
    DraftMethod("mtp:2:fixed", "1MiB", mtp_variant="glm4-moe"),
    DraftMethod("mtp:2:fixed", "2MiB", mtp_variant="qwen3.5"),  # recurrent
)


@contextmanager
def with_each_method(bench: ChaosBench) -> Iterator[list[ChaosBench]]:
    """Yield a run for each method, each with a seed of its own, as long as `bench` together."""
    script = replace(bench.script, duration_s=bench.script.duration_s / len(METHODS))
    with TemporaryDirectory() as folder:
        yield [
            replace(
                bench,
                setting=_with(method, bench.setting, Path(folder)),
                script=replace(script, seed=script.seed + number),
            )
            for number, method in enumerate(METHODS)
        ]


def _with(method: DraftMethod, setting: ChaosClusterConfig, folder: Path) -> ChaosClusterConfig:
    arguments = (
        *setting.node_arguments,
        f"--kv-cache-memory={method.kv_cache_memory}",
        f"--speculative={method.speculative}",
        f"--speculative-model={method.speculative_model}",
    )
    model = _make_mtp_model(method.mtp_variant, folder) if method.mtp_variant else DEMO
    return replace(setting, model=model, node_arguments=arguments)


def _make_mtp_model(name: str, folder: Path) -> str:
    from tests.support.families import FAMILY_VARIANTS
    from tests.support.mtp_heads import make_mtp_folder

    variant = replace(FAMILY_VARIANTS[name], dtype="bfloat16")
    return str(make_mtp_folder(folder / name, variant, num_layers=2))
