"""vLLM servers of a chaos run: doubles with a real side channel and KV that Baton computed."""

from __future__ import annotations

from types import TracebackType

from baton.cluster.child import Child, ChildOptions
from baton.fork_server import ForkServer

PROGRAM = "tests.support.vllm_program"
REFUSED_LENGTHS = ("40", "80")  # of prompts: many of a run's, but not those of checks
START_S = 120.0


class VllmServers:
    """Runs the servers within `with`, each in a process."""

    def __init__(self, model: str, count: int) -> None:
        options = ChildOptions(node_program=(PROGRAM,))
        arguments = (model, "--refused-lengths", *REFUSED_LENGTHS)
        self._forks = ForkServer()
        self.children = [Child(f"vllm-{n}", arguments, options, self._forks) for n in range(count)]

    def __enter__(self) -> VllmServers:
        for child in self.children:
            child.await_address(START_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for child in self.children:
            child.stop()
        self._forks.close()

    @property
    def router_arguments(self) -> tuple[str, ...]:
        servers = ",".join(child.http_address for child in self.children)
        return ("--prefill-nodes", servers) if servers else ()

    @property
    def node_arguments(self) -> tuple[str, ...]:
        """Return the options that let decode nodes read from the servers' side channels."""
        sources = ",".join(child.address for child in self.children)
        return ("--kv-sources", sources) if sources else ()
