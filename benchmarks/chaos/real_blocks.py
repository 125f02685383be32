"""Model whose KV blocks have a real size, and whose weights are few: for two cores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.chaos.cluster_config import ChaosClusterConfig
from tools.make_model import make_model
from tools.model_shapes import SHAPES

# Layers and KV heads are those of Qwen3-0.6B: a block of 16 tokens has 1.75 MiB.
FEW_WEIGHTS = {
    "hidden_size": 256,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "vocab_size": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "max_position_embeddings": 4096,
}
KV_CACHE_MEMORY, HOST_MEMORY, FOLDER_SIZE = "512MiB", "512MiB", "4GiB"
# Second turns are loaded by decode nodes, though other requests are in flight there.
LOCAL_SECOND_TURNS = ("--local-prefill-below", "4096")


def make_folder(folder: Path) -> None:
    """Write the model's folder, with random weights."""
    make_model(folder, {**SHAPES["qwen3-0.6b"].scale(), **FEW_WEIGHTS})


@contextmanager
def with_real_blocks(config: ChaosClusterConfig) -> Iterator[ChaosClusterConfig]:
    """Yield the config with such a model, and with tiers of decode nodes only."""
    with TemporaryDirectory() as folder:
        make_folder(Path(folder))
        yield replace(
            config,
            model=folder,
            node_arguments=(*config.node_arguments, "--kv-cache-memory", KV_CACHE_MEMORY),
            router_arguments=(*config.router_arguments, *LOCAL_SECOND_TURNS),
            kv_host_memory=HOST_MEMORY,
            kv_folder_size=FOLDER_SIZE,
            prefill_has_tiers=False,
        )
