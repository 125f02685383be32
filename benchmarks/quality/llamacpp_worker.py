"""llama.cpp process of the benchmark `perplexity`: runs in the environment of llama-cpp-python.

It prints the negative log-likelihood of the second halves of all windows.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    windows = settings["windows"]
    num_threads = settings["num_threads"] or len(os.sched_getaffinity(0))
    llama = Llama(settings["model"], len(windows[0]), num_threads)
    print(sum(map(llama.negative_log_likelihood, windows)))


class Llama:
    """A loaded GGUF file and a context for one window."""

    def __init__(self, path: str, window: int, num_threads: int) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        self._api.llama_backend_init()
        params = self._api.llama_model_default_params()
        self._model = self._api.llama_model_load_from_file(path.encode(), params)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {path}; it reads GGUF files only")
        params = self._api.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = window
        params.n_threads = params.n_threads_batch = num_threads
        self._context = self._api.llama_init_from_model(self._model, params)
        if not self._context:
            raise SystemExit(f"llama.cpp cannot make a context for {window} tokens")
        vocabulary = self._api.llama_model_get_vocab(self._model)
        self._vocab_size = self._api.llama_vocab_n_tokens(vocabulary)

    def negative_log_likelihood(self, window: list[int]) -> float:
        """Compute a window, and add up the negative logprobs of its second half."""
        import numpy as np

        first = len(window) // 2 - 1  # its logits are those of the first scored token
        batch = self._api.llama_batch_init(len(window), 0, 1)
        for index, token in enumerate(window):
            batch.token[index], batch.pos[index] = token, index
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
            batch.logits[index] = first <= index < len(window) - 1
        batch.n_tokens = len(window)
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        status = self._api.llama_decode(self._context, batch)
        self._api.llama_batch_free(batch)
        if status:
            raise SystemExit(f"llama_decode failed with status {status}")
        total = 0.0
        for index in range(first, len(window) - 1):
            row = self._api.llama_get_logits_ith(self._context, index)
            logits = np.ctypeslib.as_array(row, (self._vocab_size,)).astype(np.float64)
            most = logits.max()
            total += most + np.log(np.exp(logits - most).sum()) - logits[window[index + 1]]
        return total


if __name__ == "__main__":
    main()
