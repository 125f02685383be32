"""Compare greedy tokens of the demo model on a GPU with those of torch on the CPU.

`python -m tools.compare_devices --device cuda` exits with 1 if any setting gives other tokens. In
float32 all should be equal. In bfloat16 tokens can differ in near ties, and are only counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from baton.core.errors import NamedError
from baton.core.sampling import SamplingParams
from baton.llm import LLM

MODEL = str(Path(__file__).resolve().parents[1] / "models" / "demo")
NUM_PROMPTS, PROMPT_STEP, NUM_TOKENS = 8, 37, 32


@dataclass(frozen=True, slots=True)
class Setting:
    kernels: str
    dtype: str = "float32"
    kv_cache_dtype: str = "auto"
    enforce_eager: bool = False

    def __str__(self) -> str:
        eager = ", eager" if self.enforce_eager else ""
        return f"{self.kernels}, {self.dtype}, KV {self.kv_cache_dtype}{eager}"


def settings(kernels: list[str]) -> Iterator[Setting]:
    for name in kernels:
        yield Setting(name)
        yield Setting(name, enforce_eager=True)
        yield Setting(name, kv_cache_dtype="int8")
        yield Setting(name, dtype="bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kernels", default="torch,triton", help="comma-separated")
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="of each answer")
    options = parser.parse_args()
    num_wrong = 0
    for setting in settings(options.kernels.split(",")):
        expected = tokens_of(
            Setting("torch", setting.dtype, setting.kv_cache_dtype), options.tokens
        )
        try:
            found = tokens_of(setting, options.tokens, options.device)
        except (NamedError, RuntimeError) as error:
            print(f"{setting}: failed: {type(error).__name__}: {error}", flush=True)
            num_wrong += 1
            continue
        num_equal = sum(one == other for one, other in zip(found, expected, strict=True))
        print(f"{setting}: {num_equal} of {len(expected)} answers are equal", flush=True)
        num_wrong += setting.dtype == "float32" and num_equal < len(expected)
    sys.exit(min(1, num_wrong))


def tokens_of(setting: Setting, num_tokens: int, device: str = "cpu") -> list[list[int]]:
    """Return the answers to prompts of different lengths, in one batch."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    prompts = [
        [300 + (place * (number + 3)) % 1500 for place in range(1 + number * PROMPT_STEP)]
        for number in range(NUM_PROMPTS)
    ]
    with LLM(
        MODEL,
        device=device,
        dtype=setting.dtype,
        kernels=setting.kernels,
        kv_cache_dtype=setting.kv_cache_dtype,
        kv_cache_memory="64MiB",
        enforce_eager=setting.enforce_eager,
        show_progress=False,
    ) as llm:
        return [list(answer.token_ids) for answer in llm.generate(prompts, sampling)]


if __name__ == "__main__":
    main()
