"""Reader of KV from vLLM servers as a part of a node, made for its model and KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from mmap import mmap

from baton.core.errors import InvalidConfig
from baton.engine.runner.device.host_memory import huge_page_memory
from baton.engine.runner.loaded_runner import CachingRunner, LoadedRunner, has_kv_cache
from baton.kv_transfer.errors import TransportMissing
from baton.kv_transfer.pairs import Identity
from baton.kv_transfer.transports.base import UcxConfig
from baton.kv_transfer.transports.nixl import import_nixl
from baton.node.options import NodeOptions
from baton.node.part import NodePart


def make_reader(
    options: NodeOptions, _identity: Identity, runner: LoadedRunner, wake: Callable[[], None]
) -> NodePart | None:
    """Return the reader; None without --kv-sources. Raises InvalidConfig."""
    if not options.kv_sources.is_on:
        return None
    # Imported late: most nodes read no such KV.
    from baton.node.kv.foreign.connection import ReadSettings
    from baton.node.kv.foreign.reader import VllmReader

    if (
        not has_kv_cache(runner)
        or not runner.kv_memory.blocks.is_uniform
        or runner.kv_memory.blocks.num_tensors != 2
    ):
        raise InvalidConfig(
            "--kv-sources needs a model whose layers all attend to all tokens, without latent "
            "attention and recurrent layers: leave the option out"
        )
    layout, model, blocks = runner.kv_memory.blocks, options.runner.model, runner.blocks
    ucx = UcxConfig(options.kv_tls, options.kv_device)
    reader = VllmReader(
        [replace(each, model=each.model or model) for each in options.kv_sources.servers],
        ReadSettings(layout, ucx, *_staging(runner)),
        lambda read: blocks.convert(read.bay.memory, read.staged_for(layout)),
        wake,
    )
    return NodePart(reader, driver=reader, foreign=reader, read_gauges=reader.gauges)


def check_libraries(options: NodeOptions) -> None:
    """Raise TransportMissing unless the libraries that --kv-sources needs are installed."""
    if not options.kv_sources.is_on:
        return
    if find_spec("zmq") is None:
        raise TransportMissing("--kv-sources needs pyzmq: pip install 'baton[vllm]'")
    import_nixl()


def _staging(runner: CachingRunner) -> tuple[Callable[[int], mmap], Callable[[mmap], None]]:
    """Return how staging memory is allocated and released; without references it is freed."""
    if runner.kv_memory.device == "cpu":
        return huge_page_memory, lambda _: None

    def allocate(num_bytes: int) -> mmap:
        memory = huge_page_memory(num_bytes)
        runner.blocks.pin(memory)
        return memory

    return allocate, runner.blocks.unpin
