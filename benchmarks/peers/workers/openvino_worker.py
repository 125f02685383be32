"""OpenVINO process of the benchmark `peer`: runs in the environment of openvino-genai.

It supports GGUF files. OpenVINO's defaults hold: it also quantizes activations and KV to 8 bits
where that is faster on the processor.
"""

import json
import random
import sys
import time
from typing import Any

NUM_WARM_UP_STEPS = 3


def main() -> None:
    settings = json.loads(sys.argv[1])
    if not settings["model"].endswith(".gguf"):
        raise SystemExit("OpenVINO runs GGUF files here: pass one as --model")
    pipeline = OpenVino(settings)
    drawn = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [drawn.randrange(300, 4000) for _ in range(count)]

    def prefill(length: int) -> float:
        began_s = time.perf_counter()
        pipeline.add(tokens(length), num_new=1)
        pipeline.finish()
        return length / (time.perf_counter() - began_s)

    def decode(batch_size: int) -> float:
        steps = int(settings["num_decode_steps"])
        for _ in range(batch_size):
            pipeline.add(
                tokens(settings["decode_prompt_len"]), num_new=1 + NUM_WARM_UP_STEPS + steps
            )
        for _ in range(1 + NUM_WARM_UP_STEPS):  # the first one computes the prompts
            pipeline.step()
        began_s = time.perf_counter()
        for _ in range(steps):
            pipeline.step()
        elapsed_s = time.perf_counter() - began_s
        pipeline.finish()
        return batch_size * steps / elapsed_s

    measures = {"prefill": prefill, "decode": decode}
    print("BATON ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print("BATON", measures[request["phase"]](request["size"]), flush=True)


class OpenVino:
    """A loaded model that computes all of its requests in each step."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import openvino_genai

        self._api: Any = openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 4  # GiB
        scheduler.max_num_seqs, scheduler.max_num_batched_tokens = 256, 16_384
        scheduler.enable_prefix_caching = False
        self._pipeline: Any = openvino_genai.ContinuousBatchingPipeline(
            settings["model"],
            scheduler,
            "CPU",
            {},
            {"INFERENCE_NUM_THREADS": settings["num_threads"]},
        )
        self._requests: list[Any] = []  # one whose handle is gone is cancelled

    def add(self, prompt: list[int], num_new: int) -> None:
        import numpy as np
        from openvino import Tensor

        config = self._api.GenerationConfig(max_new_tokens=num_new, ignore_eos=True)
        self._requests.append(
            self._pipeline.add_request(len(self._requests), Tensor(np.array([prompt])), config)
        )

    def step(self) -> None:
        self._pipeline.step()

    def finish(self) -> None:
        """Run all requests to their ends."""
        while self._pipeline.has_non_finished_requests():
            self.step()
        self._requests.clear()


if __name__ == "__main__":
    main()
