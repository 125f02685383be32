"""Program: a cluster whose KV folder is on a disk that fills up, and then is read-only.

Runs in a mount namespace of its own: `unshare -rm python -m tests.support.small_disk`. Prints what
it saw as JSON.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import asdict, dataclass

from baton.client import Client, Generation
from baton.cluster import ClusterOptions, LocalCluster
from baton.core.sampling import SamplingParams
from baton.kv_transfer.external_kv import FILE
from baton.rpc.node_info import NodeLoad
from tests.support.fork_server import SERVERS, use_servers
from tests.support.nodes import await_load
from tests.support.waits import await_value

DISK_BYTES = 96 << 10
NUM_PROMPTS, PROMPT_LEN, BLOCK_SIZE, VOCAB_SIZE = 12, 120, 16, 320
SAMPLING = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
NO_STORES = "no KV is stored in the file tier"


@dataclass(frozen=True, slots=True)
class Seen:
    """Answers by prompt, and what the prefill node has logged and loaded until then."""

    answers: list[list[int]]
    num_warnings: int
    num_loaded_tokens: int  # from files


def prompts() -> list[tuple[int, ...]]:
    draw = random.Random(500)
    return [tuple(draw.choices(range(3, VOCAB_SIZE), k=PROMPT_LEN)) for _ in range(NUM_PROMPTS)]


def main() -> None:
    model, folder = sys.argv[1:]
    if mount("-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", folder):
        sys.exit("the disk cannot be mounted")
    use_servers(setattr)
    with cluster_of(model, folder) as cluster, Client(cluster.address) as client:
        full = answer_all_prompts(cluster, client)
        await_load(cluster.prefills[0].address, has_stored_all)
        await_value(lambda: mount("-o", "remount,ro", folder), lambda code: not code)
        read_only = answer_all_prompts(cluster, client)
    SERVERS.close()
    print(json.dumps([asdict(full), asdict(read_only)]))


def answer_all_prompts(cluster: LocalCluster, client: Client) -> Seen:
    answers, num_loaded = [], 0
    for prompt in prompts():
        answer = client.generate(prompt, Generation(SAMPLING))
        answers.append(answer.token_ids)
        if answer.finish is not None:
            num_loaded += answer.finish.served.prompt_tokens_loaded.get("file", 0)
    return Seen(answers, cluster.prefills[0].log.count(NO_STORES), num_loaded)


def has_stored_all(load: NodeLoad) -> bool:
    [files] = [tier for tier in load.totals.tiers if tier.name == FILE]
    return files.num_stored_blocks == NUM_PROMPTS * (PROMPT_LEN // BLOCK_SIZE)


def cluster_of(model: str, folder: str) -> LocalCluster:
    # With steps of 16 tokens a prompt takes long enough to be loaded also on a busy machine.
    slow = ("--max-num-batched-tokens", "16", "--max-num-seqs", "16")
    tiers = ("--kv-host-memory", "64KiB", "--kv-folder", folder)
    return LocalCluster(
        ClusterOptions(
            model,
            node_arguments=("--kv-cache-memory", "512KiB", "--threads", "1"),
            prefill_arguments=(*tiers, *slow),
            router_arguments=("--local-prefill-below", "0"),
        )
    )


def mount(*arguments: str) -> int:
    """Return the exit code: a disk is busy while a file on it is open to be written."""
    return subprocess.run(("mount", *arguments)).returncode


if __name__ == "__main__":
    main()
