"""Runner settings. Values only, so that option parsing does not import torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Protocol

from baton.checkpoint.options import Mmproj
from baton.core.errors import InvalidConfig
from baton.core.options import BATCHING, KV_CACHE, MACHINE, MODEL, Option, check_options
from baton.core.output import LOGPROBS_MODES, RAW_LOGPROBS
from baton.core.pooling import PoolingKind
from baton.core.units import AUTO, GIB, parse_bytes, parse_kv_memory
from baton.core.user_cache import user_cache_folder
from baton.engine.runner.model.quantization import Quantization
from baton.engine.spec_decode.config import Speculation, parse_speculation

DTYPE_NAMES = ("float32", "bfloat16", "float16")
ACTIVATION_DTYPE_NAMES = ("auto", "bfloat16", "int8")
KERNEL_NAMES = ("auto", "native", "triton", "torch")
KV_DTYPE_NAMES = ("auto", "int8", "fp8", "fp8_e4m3")
POOLING_NAMES = ("auto", "none", *PoolingKind)
QUANTIZE_NAMES = ("none", "int8", "int4")
NOWHERE = ("off", "none")
MAX_RANKS = 64
MAX_THREADS = 1024  # torch aborts the process if it cannot start them
WEIGHT_CACHE_VARIABLE = "BATON_WEIGHT_CACHE_DIR"
DEVICE_NAME = re.compile(r"cpu|cuda(:\d+)?")


def weight_cache_folder(text: str) -> Path | None:
    """Return the folder of packed weights, or None for `none` and `off`; `./none` names one."""
    if text.strip().lower() in NOWHERE:
        return None
    if text:
        return Path(text).expanduser()
    cache = user_cache_folder()
    return None if cache is None else cache / "packed"


MaxNumSeqs = Annotated[int, Option("Maximum number of requests in a batch.", BATCHING, at_least=1)]
MaxNumBatchedTokens = Annotated[int, Option("Maximum number of tokens in a step.", BATCHING)]


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Settings of the model runner.

    The KV cache takes `kv_cache_bytes` if set, else `kv_cache_share` of the memory that is free
    after loading if set, else the automatic size (`engine.runner.kv_budget`).
    """

    model: Annotated[str, Option("Model folder, or a name on the Hugging Face hub.", MODEL)]
    mmproj: Mmproj = ""
    dtype: Annotated[
        str,
        Option("auto, float32, bfloat16 or float16.", MODEL, choices=("auto", *DTYPE_NAMES)),
    ] = "auto"  # as in the model folder
    max_model_len: Annotated[
        int | None,
        Option("Maximum context length: tokens of prompt and answer together.", MODEL, at_least=1),
    ] = None  # the model's maximum context length
    device: Annotated[str, Option("cpu, cuda or cuda:N.", MACHINE)] = "cpu"
    loads_tower: Annotated[
        bool,
        Option(
            "Load the vision tower of the model, if it has one. Decode nodes never do, and a "
            "prefill node needs none beside encode nodes.",
            MODEL,
            name="vision_tower",
            is_setting=True,
        ),
    ] = True
    enable_prompt_embeds: Annotated[
        bool,
        Option(
            "Take embeddings in place of a prompt's tokens (prompt_embeds of completions); for "
            "models of text, on prefill nodes.",
            MODEL,
        ),
    ] = False
    loads_decoder: bool = True  # False: the tower alone, to encode pictures for other nodes
    num_threads: Annotated[  # torch threads of the whole process
        int | None,
        Option(
            "Number of torch threads.", MACHINE, name="threads", at_least=1, at_most=MAX_THREADS
        ),
    ] = None
    tensor_parallel_size: Annotated[
        int,
        Option(
            "Number of processes of the node, each with a part of every layer's weights; --threads "
            "is the number of threads of each.",
            MODEL,
            at_least=1,
            at_most=MAX_RANKS,
        ),
    ] = 1
    enable_expert_parallel: Annotated[
        bool,
        Option(
            "With --tensor-parallel-size: each process has some of the experts of a mixture, not a "
            "part of each.",
            MODEL,
        ),
    ] = False
    kernels: Annotated[
        str,
        Option(
            "auto, native, triton or torch; native kernels compute bfloat16 on the CPU, those in "
            "Triton compute on GPUs.",
            MODEL,
            choices=KERNEL_NAMES,
        ),
    ] = "auto"  # native if available for this dtype and device, else torch
    batch_invariant: Annotated[
        bool,
        Option(
            "Compute each token with the same bits in any batch, or refuse to start. Native "
            "kernels always do; on a GPU, it needs --kernels triton, which then multiplies plain "
            "matrices with slower kernels of its own; the same on all nodes.",
            MODEL,
        ),
    ] = False
    enforce_eager: Annotated[
        bool,
        Option(
            "Launch every operation of a decode step instead of replaying graphs, which GPUs "
            "capture at start.",
            MACHINE,
            is_setting=True,
        ),
    ] = False
    quantize: Annotated[
        str,
        Option("Weight quantization at load: none, int8 or int4.", MODEL, choices=QUANTIZE_NAMES),
    ] = "none"
    quantize_importance: Annotated[
        str,
        Option(
            "File of tools.measure_importance, by which --quantize int4 rounds important columns "
            "more exactly; the same on all nodes.",
            MODEL,
            is_setting=True,
        ),
    ] = ""
    activation_dtype: Annotated[
        str,
        Option(
            "Numbers that weights of 4 to 6 bits multiply: int8, rounded to 8 bits as llama.cpp "
            "does; bfloat16, as the model computes; or auto: int8 on CPUs without AMX. The same on "
            "all nodes. bfloat16 also keeps vision towers from multiplying integers of 13 bits.",
            MODEL,
            choices=ACTIVATION_DTYPE_NAMES,
        ),
    ] = "auto"  # int8: with a scale for each 32 activations of a token
    weight_cache_dir: Annotated[
        Path | None,
        Option(
            "Folder of packed weights, which later starts read; none or off keeps none. Default: "
            "in the user's cache folder.",
            MODEL,
            default="",
            parse=weight_cache_folder,
            variable=WEIGHT_CACHE_VARIABLE,
            is_setting=True,
        ),
    ] = None
    weight_cache_bytes: Annotated[
        int,
        Option(
            "Maximum size of the folder of packed weights; the least recently used are deleted.",
            MODEL,
            name="weight_cache_limit",
            default="32GiB",
            parse=parse_bytes,
            is_setting=True,
        ),
    ] = 32 * GIB
    kv_cache_bytes: Annotated[
        int | None,
        Option(
            "Size of the KV cache, such as 512MiB. auto: half of the CPU's free memory, divided by "
            "--nodes-per-machine, or what gpu-memory-utilization leaves of the GPU's; at most "
            "what full batches need.",
            KV_CACHE,
            name="kv_cache_memory",
            default=AUTO,
            parse=parse_kv_memory,
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        Option(
            "Share of a GPU's memory for weights, the largest step, which is run at start to "
            "measure it, and the KV cache, which gets the rest; divided by --nodes-per-machine.",
            KV_CACHE,
            above=0,
            at_most=1,
            is_setting=True,
        ),
    ] = 0.9
    nodes_per_machine: Annotated[
        int | None,
        Option(
            "Number of nodes that share this machine's memory, or its GPU's; divides the memory "
            "that --kv-cache-memory auto takes. Default: 2 on a CPU, 1 on a GPU; baton up sets it.",
            KV_CACHE,
            at_least=1,
        ),
    ] = None
    block_size: Annotated[
        int,
        Option(
            "Tokens per KV block; the same on all nodes.", KV_CACHE, at_least=1, is_setting=True
        ),
    ] = 16
    kv_cache_dtype: Annotated[
        str,
        Option(
            "Numbers of the KV cache: auto, as the model computes; int8, about half of the bytes "
            "of bfloat16; or fp8 (fp8_e4m3), half of them, with the scales of the checkpoint.",
            KV_CACHE,
            choices=KV_DTYPE_NAMES,
        ),
    ] = "auto"  # see `byte_kv`
    max_num_seqs: MaxNumSeqs = 128
    max_num_batched_tokens: MaxNumBatchedTokens = 2048
    speculation: Annotated[  # the scheduler needs as many lookahead slots
        Speculation | None,
        Option(
            "Speculative decoding: propose up to K tokens and verify them in one step; the output "
            "does not change. ngram:K: those that followed the newest ones earlier in the "
            "request's own text; suffix:K: also in past answers of the same cache salt; draft:K: "
            "by the smaller model of --speculative-model; eagle:K, eagle3:K: by the head of that "
            "folder; mtp:K: by the layer for it in the model's own files, or in that one; auto: by "
            "this layer if the model's files have it, otherwise as suffix:8.",
            BATCHING,
            name="speculative",
            default="",
            parse=parse_speculation,
        ),
    ] = None
    speculative_model: Annotated[
        str,
        Option(
            "What drafts with --speculative: the folder of a head (eagle:K, eagle3:K), the folder "
            "or GGUF file of a smaller model (draft:K), or a GGUF file of the layer (mtp:K); the "
            "same on all nodes.",
            BATCHING,
        ),
    ] = ""
    logprobs_mode: Annotated[
        str,
        Option(
            "raw_logprobs: of the model's logits; processed_logprobs: of the probabilities that "
            "tokens are drawn with; the same on all nodes.",
            BATCHING,
            choices=LOGPROBS_MODES,
            is_setting=True,
        ),
    ] = RAW_LOGPROBS
    logits_processors: Annotated[  # entry points; see engine.runner.sampling.logits_processors
        tuple[str, ...],
        Option(
            "Comma-separated names of installed logits processors; the same on every node.",
            BATCHING,
            default="",
            parse=lambda names: tuple(filter(None, names.split(","))),
        ),
    ] = ()
    pooling: Annotated[
        str,
        Option(
            "Tokens of a text whose hidden states become its embedding: auto, as the model's "
            "folder says (modules.json); last, mean or cls for any model; tokens: each has its "
            "own; none: do not embed.",
            MODEL,
            choices=POOLING_NAMES,
        ),
    ] = "auto"
    max_loras: int = 0  # different LoRA adapters in a step; 0: none
    max_lora_rank: int = 64
    max_cpu_loras: int = 0  # in memory; 0: as many as in a step
    kv_cache_share: float | None = None

    def __post_init__(self) -> None:
        check_options(self)
        share, num_bytes = self.kv_cache_share, self.kv_cache_bytes
        check(share is None or 0 < share < 1, f"kv_cache_share {share}: from 0 to 1")
        check(num_bytes is None or num_bytes >= 1, f"kv_cache_bytes {num_bytes}: at least 1")
        limit = self.weight_cache_bytes
        check(limit >= 0, f"weight-cache-limit {limit}: at least 0")
        is_used = self.quantize == "int4" or not self.quantize_importance
        check(is_used, "quantize-importance is for --quantize int4")
        has_ranks = self.tensor_parallel_size > 1 or not self.enable_expert_parallel
        check(has_ranks, "--enable-expert-parallel is for --tensor-parallel-size above 1")
        uses_torch = self.kernels == "torch" or (self.kernels == "auto" and self.device != "cpu")
        check(
            not (self.batch_invariant and uses_torch),
            "--batch-invariant: plain torch rounds sums by the size of the batch; use --kernels "
            "triton on a GPU, or native on a CPU",
        )
        is_on_gpu = self.kernels == "triton" or self.device != "cpu"
        check(
            not (self.has_fp8_kv and is_on_gpu),
            "--kv-cache-dtype fp8 is for CPUs: kernels of GPUs (--device cuda, --kernels triton) "
            "read int8 and what the model computes in",
        )
        is_device = DEVICE_NAME.fullmatch(self.device) is not None
        check(is_device, f"--device {self.device!r}: cpu, cuda or cuda:N")

    @property
    def has_fp8_kv(self) -> bool:
        return self.kv_cache_dtype.startswith("fp8")

    @property
    def num_adapter_places(self) -> int:
        return max(self.max_loras, self.max_cpu_loras)


class Architecture(Protocol):
    """Configuration of a model. Its text has all that the meaning of the weights depends on."""

    kernel_dtypes: ClassVar[Sequence[str]]  # in which native kernels compute it

    @property
    def dtype(self) -> str:
        """Return the dtype of the files."""
        ...

    @property
    def quantization(self) -> Quantization | None:
        """Return how the files quantize matrices."""
        ...

    @property
    def can_generate(self) -> bool: ...

    @property
    def num_labels(self) -> int:
        """Return the labels of a classifier of texts; 0: it is none."""
        ...


def dtype_name(config: RunnerConfig, model: Architecture) -> str:
    """Return the name of the dtype that the model computes in."""
    if config.dtype != "auto":
        return config.dtype
    # Quantized checkpoints name float16 because GPU kernels use it; CPU kernels use bfloat16.
    if model.quantization is not None and config.device == "cpu":
        return "bfloat16"
    return model.dtype


def fits_kernels(config: RunnerConfig, model: Architecture) -> bool:
    """Return whether the model would compute with the native kernels."""
    is_fitting = config.device == "cpu" and dtype_name(config, model) in model.kernel_dtypes
    return is_fitting and config.kernels in ("auto", "native")


def check(is_good: bool, message: str) -> None:
    if not is_good:
        raise InvalidConfig(message)
