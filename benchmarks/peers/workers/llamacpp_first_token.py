"""llama.cpp process of the benchmark `startup`: runs in the environment of llama-cpp-python."""

import os
import sys


def main() -> None:
    from llama_cpp import Llama

    model, prompt = sys.argv[1:]
    llama = Llama(model, n_ctx=512, n_threads=len(os.sched_getaffinity(0)), verbose=False)
    print(llama(prompt, max_tokens=1)["choices"][0]["text"], flush=True)


if __name__ == "__main__":
    main()
