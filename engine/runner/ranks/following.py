"""Process of a rank that computes what the first one sends."""

from __future__ import annotations

import logging
import os
import sys

import torch

from baton.engine.errors import RunnerLost
from baton.engine.runner.device.cuda import open_device
from baton.engine.runner.device.step_inputs import make_inputs
from baton.engine.runner.kernels.build import best_variant, cpu_features, library
from baton.engine.runner.kernels.calls import Kernels
from baton.engine.runner.kernels.choose import choose_parts
from baton.engine.runner.load import (
    LoadedWeights,
    OpenedModel,
    choose_max_model_len,
    load_weights,
    open_model,
    plan_memory,
)
from baton.engine.runner.model.decoder import Decoder
from baton.engine.runner.model.rope import Ropes
from baton.engine.runner.passes.forward_passes import ForwardPasses
from baton.engine.runner.ranks.first_rank import FirstRank
from baton.engine.runner.ranks.links import RankLinks, links_bytes
from baton.engine.runner.ranks.messages import ComputePass, MultiplyHead
from baton.engine.runner.ranks.processes import Setup
from baton.engine.runner.ranks.sharded_source import shard_of, sharded_source
from baton.engine.runner.ranks.shared_memory import map_shared_memory

log = logging.getLogger(__name__)


def main() -> None:
    first = FirstRank.of_command_line()
    setup, links_fd = first.receive_setup()
    with first.carrying_out():
        follower = _load(setup, links_fd)
    begin, kv_fd = first.receive_begin()
    with first.carrying_out():
        follower.begin(begin.num_blocks, kv_fd)
    follower.run()


class Follower:
    """A rank's decoder, and its part of the KV cache."""

    def __init__(self, opened: OpenedModel, weights: LoadedWeights, links: RankLinks) -> None:
        self._opened = opened
        self._weights = weights
        self._links = links
        self._passes: ForwardPasses | None = None

    def begin(self, num_blocks: int, kv_fd: int) -> None:
        config, _, _, dtype, device, kernels, *_ = self._opened
        shape, state, _ = plan_memory(config, self._opened.cached_layers, dtype)
        kv = shape.over(map_shared_memory(kv_fd, num_blocks * shape.block_bytes))
        os.close(kv_fd)
        decoder = self._weights.decoder
        longest = self._opened.model.max_context_len()
        self._passes = ForwardPasses(
            decoder,
            Ropes(decoder.config, device.place, dtype),
            kernels.make_attention(kv, self._weights.attention),
            None if state is None else kernels.make_linear_attention(kv, state),
            choose_max_model_len(config, longest),
        )

    def run(self) -> None:
        """Compute until the first rank ends."""
        with torch.inference_mode():
            while True:
                try:
                    self._compute(self._links.receive())
                except RunnerLost:
                    return
                except Exception:
                    log.exception("a pass failed")
                    sys.exit(1)

    def _compute(self, message: object) -> None:
        decoder, passes = self._weights.decoder, self._passes
        assert passes is not None
        match message:
            case ComputePass(step, media, grid, needs_all):
                inputs = make_inputs(self._opened.device)
                inputs.begin()
                launch = passes.prepare(step, inputs, None, None, media, grid, needs_all=needs_all)
                inputs.send()
                launch()
                self._links.meet()
            case MultiplyHead(num_rows):
                assert isinstance(decoder, Decoder)
                shape = num_rows, decoder.config.hidden_size
                decoder.head(self._links.broadcast(torch.empty(shape, dtype=self._opened.dtype)))


def _load(setup: Setup, links_fd: int) -> Follower:
    config = setup.config
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    shard = shard_of(config, setup.rank)
    kernels = Kernels(library(best_variant(cpu_features())), torch.get_num_threads())
    memory = map_shared_memory(links_fd, links_bytes(kernels, shard.size))
    os.close(links_fd)
    links = RankLinks(kernels, memory, shard)
    source = sharded_source(links, lambda: None)
    opened = open_model(config, open_device, choose_parts, source)
    return Follower(opened, load_weights(opened, source), links)


if __name__ == "__main__":
    main()
