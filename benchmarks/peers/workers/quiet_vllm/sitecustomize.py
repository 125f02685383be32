"""Three patches that let vLLM's prefill and decode servers share a small machine.

Python runs this file at the start of each of their processes, because its folder is on PYTHONPATH.
Without the patches, waiting threads spin on the cores that the model needs.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

RING_NAP_S = 0.0003


def keep_given_cores() -> None:
    """Keep NixlConnector's worker from moving to the last core of the machine."""

    def ignore(_pid: int, _cpus: object) -> None: ...

    os.sched_setaffinity = ignore


def sleep_while_reading(ring: ModuleType) -> None:
    """Make waiting readers of the shared-memory ring sleep instead of yielding."""

    def nap() -> None:
        time.sleep(RING_NAP_S)

    ring.sched_yield = nap  # type: ignore[attr-defined]


def disable_progress_thread(nixl: ModuleType) -> None:
    """Create NIXL agents without their busy-polling thread; vLLM polls in each step anyway."""
    config: Any = nixl.nixl_agent_config
    original = config.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.enable_pthread = False
        self.num_threads = 0

    config.__init__ = init


PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "vllm.distributed.device_communicators.shm_broadcast": sleep_while_reading,
    "nixl_cu12._api": disable_progress_thread,
    "nixl_cu13._api": disable_progress_thread,
}


class PatchFinder(importlib.abc.MetaPathFinder):
    """Import hook that patches a module after its execution."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = PatchLoader(spec.loader)
        return spec


class PatchLoader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        PATCHES[module.__name__](module)


keep_given_cores()
sys.meta_path.insert(0, PatchFinder())
