"""vLLM process of the benchmark `peer`: runs in vLLM's environment and does not import Baton.

It reads one JSON object per line, {"phase": "decode", "size": 4}, and prints tokens per second.
"""

import json
import random
import sys
import time

NUM_WARM_UP_STEPS = 3


def main() -> None:
    settings = json.loads(sys.argv[1])
    from vllm import LLM, SamplingParams

    # A CPU's share is not set.
    share = settings["gpu_share"]
    llm = LLM(
        model=settings["model"],
        dtype="bfloat16",
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"],
        max_num_batched_tokens=max(4096, settings["max_model_len"]),
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        **({} if share is None else {"gpu_memory_utilization": share}),
    )
    drawn = random.Random(0)

    def prompt(length: int) -> dict[str, list[int]]:
        return {"prompt_token_ids": [drawn.randrange(5, 4000) for _ in range(length)]}

    def sampling(max_tokens: int) -> SamplingParams:
        return SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )

    def prefill(length: int) -> float:
        prompts = [prompt(length)]
        began_s = time.perf_counter()
        llm.generate(prompts, sampling(1), use_tqdm=False)
        return length / (time.perf_counter() - began_s)

    def decode(batch_size: int) -> float:
        engine = llm.llm_engine
        max_tokens = settings["num_decode_steps"] + NUM_WARM_UP_STEPS + 1
        for _ in range(batch_size):
            name = f"{drawn.getrandbits(64):x}"
            engine.add_request(name, prompt(settings["decode_prompt_len"]), sampling(max_tokens))
        ends_s = []
        while engine.has_unfinished_requests():
            if len(engine.step()) == batch_size:
                ends_s.append(time.perf_counter())
        taken = ends_s[NUM_WARM_UP_STEPS:]
        return batch_size * (len(taken) - 1) / (taken[-1] - taken[0])

    measures = {"prefill": prefill, "decode": decode}
    print("BATON ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print("BATON", measures[request["phase"]](request["size"]), flush=True)


if __name__ == "__main__":  # the processes that vLLM starts import this file
    main()
