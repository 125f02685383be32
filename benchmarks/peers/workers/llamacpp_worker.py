"""llama.cpp process of the benchmark `peer`: runs in the environment of llama-cpp-python.

It supports GGUF files, and folders of Qwen3 and Qwen3-MoE with one weight file. The weights of a
folder are converted to GGUF in bf16 once, and llama.cpp quantizes them if so requested.
"""

import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NUM_WARM_UP_STEPS = 3
ARCHITECTURES = {"qwen3": "qwen3", "qwen3_moe": "qwen3moe"}  # by model_type
FILE_TYPES = {"q8_0": 7, "q4_0": 2, "q4_k_m": 15}  # of llama_ftype
TENSORS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
# Tensors outside of the layers.
ENDS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
FLOAT32 = ("norm.weight", "ffn_gate_inp.weight")  # as llama.cpp's own conversion


def main() -> None:
    settings = json.loads(sys.argv[1])
    llama = Llama(gguf_file(settings), settings)
    drawn = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [drawn.randrange(300, 4000) for _ in range(count)]

    def prefill(length: int) -> float:
        llama.begin(1)
        prompt = tokens(length)
        began_s = time.perf_counter()
        llama.compute([prompt])
        return length / (time.perf_counter() - began_s)

    def decode(batch_size: int) -> float:
        llama.begin(batch_size)
        llama.compute([tokens(settings["decode_prompt_len"]) for _ in range(batch_size)])
        for _ in range(NUM_WARM_UP_STEPS):
            llama.compute([tokens(1) for _ in range(batch_size)])
        steps = int(settings["num_decode_steps"])
        began_s = time.perf_counter()
        for _ in range(steps):
            llama.compute([tokens(1) for _ in range(batch_size)])
        return batch_size * steps / (time.perf_counter() - began_s)

    measures = {"prefill": prefill, "decode": decode}
    print("BATON ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print("BATON", measures[request["phase"]](request["size"]), flush=True)


class Llama:
    """A loaded model, and a context for a number of sequences."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        self._api.llama_backend_init()
        params = self._api.llama_model_default_params()
        params.use_mmap = False
        self._model = self._api.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {path.name}")
        self._settings = settings
        self._context: Any = None
        self._num_sequences = 0
        self._num_computed = 0  # tokens of each sequence

    def begin(self, num_sequences: int) -> None:
        """Begin empty sequences."""
        if num_sequences != self._num_sequences:
            self._make_context(num_sequences)
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        self._num_computed = 0

    def compute(self, new_tokens: list[list[int]]) -> None:
        """Compute new tokens of each sequence, as many of each, and the logits of the last one."""
        num_new = len(new_tokens[0])
        batch = self._api.llama_batch_init(num_new * len(new_tokens), 0, 1)
        for sequence, tokens in enumerate(new_tokens):
            for offset, token in enumerate(tokens):
                index = sequence * num_new + offset
                batch.token[index] = token
                batch.pos[index] = self._num_computed + offset
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = sequence
                batch.logits[index] = offset == num_new - 1
        batch.n_tokens = num_new * len(new_tokens)
        status = self._api.llama_decode(self._context, batch)
        if status:
            raise SystemExit(f"llama_decode failed with status {status}")
        self._api.llama_synchronize(self._context)
        self._api.llama_batch_free(batch)
        self._num_computed += num_new

    def _make_context(self, num_sequences: int) -> None:
        settings = self._settings
        max_len = settings["max_model_len"]
        if num_sequences > 1:
            decoded = NUM_WARM_UP_STEPS + settings["num_decode_steps"]
            max_len = settings["decode_prompt_len"] + decoded + 1
        if self._context is not None:
            self._api.llama_free(self._context)
        params = self._api.llama_context_default_params()
        params.n_ctx = num_sequences * (-(-max_len // 256) * 256)
        params.n_seq_max = num_sequences
        params.n_batch, params.n_ubatch = 4096, 512
        params.n_threads = params.n_threads_batch = settings["num_threads"]
        self._context = self._api.llama_init_from_model(self._model, params)
        if not self._context:
            raise SystemExit(f"llama.cpp cannot make a context for {num_sequences} sequences")
        self._num_sequences = num_sequences


def gguf_file(settings: dict[str, Any]) -> Path:
    """Return the model's file. A folder is converted if that was not done before."""
    if Path(settings["model"]).is_file():
        return Path(settings["model"])
    scratch, weights = Path(settings["scratch"]), settings["weights"]
    plain, path = (scratch / f"model-{kind}.gguf" for kind in ("bf16", weights))
    if not plain.exists():
        write_gguf(Path(settings["model"]), plain)
    if not path.exists():
        quantize(plain, path, weights, settings["num_threads"])
    return path


def quantize(plain: Path, path: Path, weights: str, num_threads: int) -> None:
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = FILE_TYPES[weights], num_threads
    names = (str(each).encode() for each in (plain, path))
    if llama_cpp.llama_model_quantize(*names, params):
        raise SystemExit(f"llama.cpp cannot quantize the weights to {weights}")


def write_gguf(folder: Path, path: Path) -> None:
    """Write a folder as GGUF in bf16, tensor by tensor."""
    import gguf
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES.get(config["model_type"])
    if architecture is None:
        supported = ", ".join(ARCHITECTURES)
        raise SystemExit(f"only {supported} can be converted to GGUF, not {config['model_type']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    write_shape(writer, config)
    write_vocabulary(writer, config["vocab_size"])
    with safe_open(folder / "model.safetensors", "pt") as file:
        sources = gguf_sources(list(file.keys()), config["tie_word_embeddings"])
        for name, parts in sources.items():
            add_tensor_info(writer, name, [len(parts), *file.get_slice(parts[0]).get_shape()])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, parts in sources.items():
            writer.write_tensor_data(gguf_values(name, map(file.get_tensor, parts)))
    writer.close()


def write_shape(writer: Any, config: dict[str, Any]) -> None:
    writer.add_name("peer")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(4096)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def gguf_sources(names: list[str], ties_embeddings: bool) -> dict[str, list[str]]:
    """Return the tensors of each one in GGUF: several for the matrices of experts, in order."""
    sources: dict[str, dict[int, str]] = {}
    for name in names:
        if name == "lm_head.weight" and ties_embeddings:
            continue
        target, expert = gguf_name(name)
        sources.setdefault(target, {})[expert] = name
    return {target: [parts[at] for at in sorted(parts)] for target, parts in sources.items()}


def gguf_name(name: str) -> tuple[str, int]:
    """Return the name in GGUF, and the number of the expert or 0."""
    if name in ENDS:
        return ENDS[name], 0
    _, _, layer, rest = name.removesuffix(".weight").split(".", 3)
    expert = 0
    if rest.startswith("mlp.experts."):
        _, _, number, matrix = rest.split(".")
        rest, expert = f"mlp.experts.{matrix}", int(number)
    return f"blk.{layer}.{TENSORS[rest]}.weight", expert


def add_tensor_info(writer: Any, name: str, shape: list[int]) -> None:
    """Announce a tensor. `shape` begins with the number of its parts."""
    import gguf
    import numpy as np

    stacked = shape if "_exps." in name else shape[1:]
    count = int(np.prod(stacked))
    if name.endswith(FLOAT32):
        writer.add_tensor_info(name, stacked, np.dtype(np.float32), 4 * count)
        return
    kind = gguf.GGMLQuantizationType.BF16
    writer.add_tensor_info(name, stacked, np.dtype(np.uint16), 2 * count, kind)


def gguf_values(name: str, parts: Iterator[Any]) -> Any:
    """Return the bytes of a tensor as numpy array."""
    import torch

    tensors = list(parts)
    tensor = torch.stack(tensors) if "_exps." in name else tensors[0]
    if name.endswith(FLOAT32):
        return tensor.float().numpy()
    return tensor.to(torch.bfloat16).contiguous().view(torch.uint16).numpy()


def write_vocabulary(writer: Any, size: int) -> None:
    """Write a dummy vocabulary of bytes and one merge, which llama.cpp and OpenVINO require."""
    unprinted = [byte for byte in range(256) if not (33 <= byte <= 126 or 161 <= byte != 173)]
    letters = [chr(256 + unprinted.index(n)) if n in unprinted else chr(n) for n in range(256)]
    names = [*letters, *(f"t{place}" for place in range(size - 257)), "<end>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(names)
    writer.add_token_types([*[1] * (size - 1), 3])
    writer.add_token_merges(["t 0"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add(size - 1)


if __name__ == "__main__":
    main()
