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
from tests.support.fork_server import SERVERS, use_servers

DISK_BYTES = 96 << 10
NUM_PROMPTS, VOCAB_SIZE = 12, 320
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
    return [tuple(draw.choices(range(3, VOCAB_SIZE), k=120)) for _ in range(NUM_PROMPTS)]


def main() -> None:
    model, folder = sys.argv[1:]
    mount("-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", folder)
    use_servers(setattr)
    with cluster_of(model, folder) as cluster, Client(cluster.address) as client:
        full = answer_all_prompts(cluster, client)
        mount("-o", "remount,ro", folder)
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


def cluster_of(model: str, folder: str) -> LocalCluster:
    tiers = ("--kv-host-memory", "64KiB", "--kv-folder", folder)
    return LocalCluster(
        ClusterOptions(
            model,
            node_arguments=("--kv-cache-memory", "512KiB", "--threads", "1"),
            prefill_arguments=tiers,
            router_arguments=("--local-prefill-below", "0"),
        )
    )


def mount(*arguments: str) -> None:
    subprocess.run(("mount", *arguments), check=True)


if __name__ == "__main__":
    main()
