"""`python -m tests.support.kv_event_process PORT REPLAY_PORT MAX_DESCRIPTORS`: publishes KV events.

It is a process of its own, so that its memory, descriptors and end can be observed.
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from baton.engine.events import BlockStored
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.node.kv.events.config import KvEventsConfig
from baton.node.kv.events.messages import CacheFacts
from baton.node.kv.events.publisher import KvEventPublisher
from tests.support.child_programs import running_program
from tests.support.ports import free_port

NUM_MESSAGES, BLOCK_SIZE = 2000, 2000
TOPIC = "kv@node@model"
FACTS = CacheFacts(BLOCK_SIZE, lambda _: BlockHash(b"u" * 16), "full_attention")
READY = "ready"
PAGE_BYTES = resource.getpagesize()


@dataclass(slots=True)
class KvEventProcess:
    endpoint: str
    replay_endpoint: str
    program: subprocess.Popen[str]
    start_rss_bytes: int = 0

    @property
    def growth_bytes(self) -> int:
        return self.rss_bytes - self.start_rss_bytes

    @property
    def rss_bytes(self) -> int:
        pages = Path(f"/proc/{self.program.pid}/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * PAGE_BYTES


@contextmanager
def kv_event_process(max_descriptors: int = 1024) -> Iterator[KvEventProcess]:
    """Run a publisher with `NUM_MESSAGES` messages of about 6 KB to replay."""
    ports = str(free_port()), str(free_port())
    command = (sys.executable, "-m", __spec__.name, *ports, str(max_descriptors))
    with running_program(command, is_forked=False) as program:
        assert program.stdout is not None
        assert program.stdout.readline().strip() == READY
        endpoint, replay_endpoint = (f"tcp://127.0.0.1:{port}" for port in ports)
        yield KvEventProcess(endpoint, replay_endpoint, program)


def main() -> None:
    port, replay_port, max_descriptors = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_descriptors, max_descriptors))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    config = KvEventsConfig(f"tcp://*:{port}", f"tcp://*:{replay_port}", TOPIC)
    with KvEventPublisher(config, FACTS) as publisher:
        for number in range(NUM_MESSAGES):
            name = BlockHash(number.to_bytes(16, "big"))
            tokens = (100_000 + number,) * BLOCK_SIZE
            publisher.publish([BlockStored((name,), None, tokens, BLOCK_SIZE)])
        print(READY, flush=True)
        signal.sigwait([signal.SIGTERM])


if __name__ == "__main__":
    main()
