"""Program: loads a GGUF file with a cache of packed weights.

Logs to standard error. Prints whether they were read, and what the model computes, as JSON.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from baton.engine.runner.load import RunnerConfig, load_runner
from baton.engine.runner.weights import packing_key
from tests.support.models import prompt_of
from tests.support.runner_drivers import Driver, drives_of


def main() -> None:
    model, folder = sys.argv[1:]
    packing_key.MIN_AGE_S, packing_key.MIN_CACHED_BYTES = -1.0, 0
    logging.basicConfig(level=logging.INFO)
    config = RunnerConfig(
        model, dtype="bfloat16", kv_cache_bytes=1 << 22, weight_cache_dir=Path(folder)
    )
    drive = drives_of([prompt_of(20)], num_tokens=8)[0]
    with load_runner(config) as runner:
        Driver(runner, num_blocks=runner.kv_memory.num_blocks, block_size=16).run(drive)
    print(json.dumps(drive.outputs))


if __name__ == "__main__":
    main()
