"""`python -m tests.support.vllm_program MODEL`: vLLM server whose prompts Baton's runner computes.

It serves until its parent ends, and refuses prompts of some lengths. It announces its HTTP API as
nodes do, and then its side channel.
"""

from __future__ import annotations

import argparse
import signal

from baton.engine.runner.load import RunnerConfig, load_runner
from baton.rpc.process_end import end_with_parent
from baton.rpc.server import READY_PREFIX
from tests.support.fake_vllm import HOST, FakeGeometry, FakeVllm
from tests.support.fake_vllm_server import FakeVllmServer

NUM_BLOCKS = 4096
KV_CACHE_BYTES = 1 << 22


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--refused-lengths", type=int, nargs=2, default=(0, 0))
    parser.add_argument("--parent-pid", type=int, required=True)
    given = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    end_with_parent(given.parent_pid)
    config = RunnerConfig(given.model, dtype="float32", kv_cache_bytes=KV_CACHE_BYTES)
    with load_runner(config) as runner:
        geometry = FakeGeometry(runner.kv_memory.blocks, given.model, NUM_BLOCKS)
        with (
            FakeVllm(geometry) as peer,
            FakeVllmServer(peer, runner, given.model) as api,
        ):
            api.is_healthy, api.refused_lengths = True, range(*given.refused_lengths)
            print(f"{READY_PREFIX} http {api.address}", flush=True)
            print(f"{READY_PREFIX} vllm vllm://{HOST}:{peer.port}?packing=vec", flush=True)
            signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main()
