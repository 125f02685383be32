"""llama.cpp process of the benchmark `vision`: runs in the environment of llama-cpp-python.

libmtmd encodes one picture on request. It prints CPU and elapsed seconds, and writes the encoding.
"""

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    settings = json.loads(sys.argv[1])
    tower = Tower(settings)
    tower.encode()
    Path(settings["encoding"]).write_bytes(tower.encoding())
    print("BATON ready", flush=True)
    for _ in sys.stdin:
        cpu_s, elapsed_s = time.process_time(), time.perf_counter()
        tower.encode()
        spent = [time.process_time() - cpu_s, time.perf_counter() - elapsed_s]
        print("BATON", json.dumps(spent), flush=True)


class Tower:
    """A loaded tower, and a picture that is scaled and cut for it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import llama_cpp

        try:
            from llama_cpp import mtmd_cpp
        except (FileNotFoundError, RuntimeError) as error:
            raise SystemExit(f"this llama-cpp-python has no libmtmd: {error}") from None
        self._llama: Any = llama_cpp
        self._api: Any = mtmd_cpp
        self._llama.llama_backend_init()
        model_params = self._llama.llama_model_default_params()
        model_path = settings["model"].encode()
        self._model = self._llama.llama_model_load_from_file(model_path, model_params)
        if not self._model:
            raise SystemExit("llama.cpp cannot load the text model")
        params = self._api.mtmd_context_params_default()
        params.use_gpu, params.n_threads = False, settings["num_threads"]
        mmproj = settings["mmproj"].encode()
        self._context = self._api.mtmd_init_from_file(mmproj, self._model, params)
        if not self._context:
            raise SystemExit("llama.cpp cannot load the vision tower")
        self._chunk = self._last_image(settings)

    def encode(self) -> None:
        status = self._api.mtmd_encode_chunk(self._context, self._chunk)
        if status:
            raise SystemExit(f"mtmd_encode_chunk failed with status {status}")

    def encoding(self) -> bytes:
        """Return the rows of the last encoding, in float32."""
        row = self._llama.llama_model_n_embd_inp(self._model)
        count = self._api.mtmd_input_chunk_get_n_tokens(self._chunk) * row
        return ctypes.string_at(self._api.mtmd_get_output_embd(self._context), 4 * count)

    def _last_image(self, settings: dict[str, Any]) -> Any:
        """Return the picture as it is. Idefics3's overview precedes it."""
        api, rgb = self._api, Path(settings["rgb"]).read_bytes()
        pixels = (ctypes.c_uint8 * len(rgb)).from_buffer_copy(rgb)
        bitmap = api.mtmd_bitmap_init(settings["width"], settings["height"], pixels)
        mark = api.mtmd_default_marker()
        text = api.mtmd_input_text(mark, len(mark), False, True)
        chunks = api.mtmd_input_chunks_init()
        bitmaps = (api.mtmd_bitmap_p_ctypes * 1)(bitmap)
        if api.mtmd_tokenize(self._context, chunks, ctypes.byref(text), bitmaps, 1):
            raise SystemExit("libmtmd cannot read the picture")
        found = [
            api.mtmd_input_chunks_get(chunks, index)
            for index in range(api.mtmd_input_chunks_size(chunks))
        ]
        is_image = api.MTMD_INPUT_CHUNK_TYPE_IMAGE
        return [each for each in found if api.mtmd_input_chunk_get_type(each) == is_image][-1]


if __name__ == "__main__":
    main()
