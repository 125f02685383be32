"""llama.cpp process of the benchmark `peer`: runs in the environment of llama-cpp-python.

It supports Qwen3 folders with tied embeddings, and converts the weights to GGUF once.
"""

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUM_WARM_UP_STEPS = 3
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
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def main() -> None:
    settings = json.loads(sys.argv[1])
    path = Path(settings["scratch"]) / f"model-{settings['weights']}.gguf"
    if not path.exists():
        write_gguf(Path(settings["model"]), path, settings["weights"])
    decode_tokens, clear = loaded(path, settings["max_model_len"], settings["num_threads"])
    drawn = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [drawn.randrange(300, 4000) for _ in range(count)]

    def prefill(length: int) -> float:
        clear()
        prompt = tokens(length)
        began_s = time.perf_counter()
        decode_tokens(prompt)
        return length / (time.perf_counter() - began_s)

    def decode(batch_size: int) -> float:
        if batch_size != 1:
            raise SystemExit("llama.cpp is measured with one sequence at a time")
        clear()
        decode_tokens(tokens(settings["decode_prompt_len"]))
        for _ in range(NUM_WARM_UP_STEPS):
            decode_tokens(tokens(1))
        steps = int(settings["num_decode_steps"])
        began_s = time.perf_counter()
        for _ in range(steps):
            decode_tokens(tokens(1))
        return steps / (time.perf_counter() - began_s)

    measures = {"prefill": prefill, "decode": decode}
    print("BATON ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print("BATON", measures[request["phase"]](request["size"]), flush=True)


def loaded(
    path: Path, max_len: int, num_threads: int
) -> tuple[Callable[[list[int]], None], Callable[[], None]]:
    import llama_cpp

    llama_cpp.llama_backend_init()
    settings = llama_cpp.llama_model_default_params()
    settings.use_mmap = False
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch = max_len, 2048, 512
    settings.n_threads = settings.n_threads_batch = num_threads
    context = llama_cpp.llama_init_from_model(model, settings)

    def decode_tokens(tokens: list[int]) -> None:
        ids = (llama_cpp.llama_token * len(tokens))(*tokens)
        status = llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(ids, len(tokens)))
        if status:
            raise SystemExit(f"llama_decode failed with status {status}")
        llama_cpp.llama_synchronize(context)

    def clear() -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)

    return decode_tokens, clear


def write_gguf(folder: Path, path: Path, weights: str) -> None:
    import gguf
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "qwen3" or not config["tie_word_embeddings"]:
        raise SystemExit("only Qwen3 folders with tied embeddings can be converted to GGUF")
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "qwen3")
    write_shape(writer, config)
    write_vocabulary(writer, config["vocab_size"])
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in list(file.keys()):
            target = gguf_name(name)
            if target is not None:
                write_tensor(writer, target, file.get_tensor(name), weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
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


def write_tensor(writer: Any, name: str, tensor: Any, weights: str) -> None:
    import gguf
    import torch

    kinds = gguf.GGMLQuantizationType
    if tensor.dim() == 1:
        writer.add_tensor(name, tensor.float().numpy())
    elif weights == "bf16":
        words = tensor.contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, words, raw_dtype=kinds.BF16)
    else:
        packed = gguf.quants.quantize(tensor.float().numpy(), kinds.Q8_0)
        writer.add_tensor(name, packed, raw_dtype=kinds.Q8_0)


def gguf_name(name: str) -> str | None:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    if name.startswith("lm_head"):
        return None
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{TENSORS[rest.removesuffix('.weight')]}.weight"


def write_vocabulary(writer: Any, size: int) -> None:
    """Write a dummy vocabulary, which llama.cpp requires."""
    tokens = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % byte for byte in range(256))]
    num_known = len(tokens)
    tokens += [b"t%d" % place for place in range(size - num_known)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (size - num_known)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


if __name__ == "__main__":
    main()
