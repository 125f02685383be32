"""Options shared by several commands, grouped into panels of `--help`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.writable import file_error, folder_error

MODEL_PANEL = "Model"
KV_PANEL = "KV cache"
BATCH_PANEL = "Batching"
MACHINE_PANEL = "Machine"
NETWORK_PANEL = "Network"
ROUTING_PANEL = "Routing"
FORM_PANEL = "Structured output"
SAMPLING_PANEL = "Sampling"
OUTPUT_PANEL = "Output"

DEFAULT_ADDRESS = "127.0.0.1:50051"

Address = Annotated[str, typer.Option(help="host:port of the router.", rich_help_panel="Network")]

Model = Annotated[
    str,
    typer.Option(
        help="Model folder, or a name on the Hugging Face hub.", rich_help_panel=MODEL_PANEL
    ),
]
ModelOrDemo = Annotated[
    str,
    typer.Option(
        help="Model folder, or a name on the Hugging Face hub. Default: the demo model.",
        rich_help_panel=MODEL_PANEL,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(help="auto, float32, bfloat16 or float16.", rich_help_panel=MODEL_PANEL),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        help="Maximum context length: tokens of prompt and answer together.",
        rich_help_panel=MODEL_PANEL,
    ),
]
ModelName = Annotated[
    str, typer.Option(help="Name that clients use for the model.", rich_help_panel=MODEL_PANEL)
]

Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.", rich_help_panel=MACHINE_PANEL)]
Kernels = Annotated[
    str,
    typer.Option(
        help="auto, native or torch; native kernels compute bfloat16 on the CPU.",
        rich_help_panel=MODEL_PANEL,
    ),
]
Quantize = Annotated[
    str,
    typer.Option(
        help="Weight quantization at load: none, int8 or int4.",
        rich_help_panel=MODEL_PANEL,
    ),
]
LogitsProcessors = Annotated[
    str,
    typer.Option(
        help="Comma-separated names of installed logits processors; the same on every node.",
        rich_help_panel=BATCH_PANEL,
    ),
]
Speculative = Annotated[
    str,
    typer.Option(
        help="Speculative decoding. ngram:K: propose up to K tokens by n-gram lookup in the "
        "request's own text and verify them in one step; the output does not change.",
        rich_help_panel=BATCH_PANEL,
    ),
]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Number of torch threads.", rich_help_panel=MACHINE_PANEL)
]
Cpus = Annotated[
    str,
    typer.Option(
        help="CPU cores to pin the process to, such as 0-3,6.", rich_help_panel=MACHINE_PANEL
    ),
]

KvMemory = Annotated[
    str,
    typer.Option(
        help="Size of the KV cache, such as 512MiB. auto: half of the CPU's or 80 % of the GPU's "
        "free memory, divided by --nodes-per-machine, and at most what full batches need.",
        rich_help_panel=KV_PANEL,
    ),
]
NodesPerMachine = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Number of nodes that share this machine's memory, or its GPU's; divides the memory "
        "that --kv-cache-memory auto takes. Default: 2 on a CPU, 1 on a GPU; baton up sets it.",
        rich_help_panel=KV_PANEL,
    ),
]
BlockSize = Annotated[
    int, typer.Option(help="Tokens per KV block; the same on all nodes.", rich_help_panel=KV_PANEL)
]
PrefixCaching = Annotated[
    bool,
    typer.Option(
        help="Reuse the cached KV of earlier requests with the same prefix.",
        rich_help_panel=KV_PANEL,
    ),
]
Transport = Annotated[
    str, typer.Option(help="KV transport: nixl or ucxx.", rich_help_panel=KV_PANEL)
]
KvTls = Annotated[
    str,
    typer.Option(
        help="UCX_TLS of the KV transport, such as tcp or ^cma. Default: UCX chooses.",
        rich_help_panel=KV_PANEL,
    ),
]
KvNetDevice = Annotated[
    str,
    typer.Option(
        help="Network device for UCX, such as lo or eth0. Default: lo if --host is a loopback "
        "address, otherwise UCX chooses.",
        rich_help_panel=KV_PANEL,
    ),
]
KvVerify = Annotated[
    bool,
    typer.Option(
        help="Verify transferred KV by digest; on a GPU, both sides copy it to the host for that.",
        rich_help_panel=KV_PANEL,
    ),
]
KvLease = Annotated[
    float,
    typer.Option(
        help="Seconds that a prefill node may write KV without a message from the decode node.",
        rich_help_panel=KV_PANEL,
    ),
]
KvSilence = Annotated[
    float,
    typer.Option(
        help="Seconds without an answer after which a peer is given up. Nodes in a long forward "
        "pass keep sending heartbeats, up to --stuck-after-s.",
        rich_help_panel=KV_PANEL,
    ),
]
KvLoadFailure = Annotated[
    str,
    typer.Option(
        help="Action of a decode node when a request's KV does not arrive. recompute: compute the "
        "prompt locally; fail: end the request, and the router retries it on another node.",
        rich_help_panel=KV_PANEL,
    ),
]
RemoteHeadroom = Annotated[
    int,
    typer.Option(
        min=0,
        help="KV blocks that a decode node keeps free for each request that holds blocks, when "
        "it grants blocks to prefill nodes; with 0 it grants more and preempts more often.",
        rich_help_panel=KV_PANEL,
    ),
]
Push = Annotated[
    str,
    typer.Option(
        help="When prefill nodes push KV: after each layer or after each chunk (layer, chunk).",
        rich_help_panel=KV_PANEL,
    ),
]

MaxNumSeqs = Annotated[
    int, typer.Option(help="Maximum number of requests in a batch.", rich_help_panel=BATCH_PANEL)
]
MaxTokens = Annotated[
    int, typer.Option(help="Maximum number of tokens in a step.", rich_help_panel=BATCH_PANEL)
]
SchedulingPolicy = Annotated[
    str,
    typer.Option(
        help="Order of waiting requests: priority or fcfs. priority orders by the request's "
        "priority (lower first), then by arrival; a waiting request may preempt running ones of "
        "lower priority, each at most once. fcfs orders by arrival alone.",
        rich_help_panel=BATCH_PANEL,
    ),
]
LongPrefill = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Maximum tokens of one prompt in a step while short prompts arrive, so that they are "
        "not delayed by long ones; 0: no limit. Default: 512, or 0 with --no-chunked-prefill.",
        rich_help_panel=BATCH_PANEL,
    ),
]
MaxPartialPrefills = Annotated[
    int,
    typer.Option(
        min=0,
        help="Maximum number of partially computed prompts; 0: no limit.",
        rich_help_panel=BATCH_PANEL,
    ),
]
MaxLongPartialPrefills = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Maximum number of partially computed prompts longer than "
        "--long-prefill-token-threshold, so that shorter ones overtake them; 0: no limit. "
        "Default: 1 if there is a threshold.",
        rich_help_panel=BATCH_PANEL,
    ),
]
ChunkedPrefill = Annotated[
    bool,
    typer.Option(
        help="Compute a prompt in chunks over several steps. Without it, a prompt longer than "
        "--max-num-batched-tokens is refused.",
        rich_help_panel=BATCH_PANEL,
    ),
]

TargetStep = Annotated[
    float,
    typer.Option(
        min=0,
        help="Target duration of a step while requests decode, in milliseconds: prompts get as "
        "many tokens as fit into it, estimated from earlier steps; 0: no target.",
        rich_help_panel=BATCH_PANEL,
    ),
]

Host = Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=NETWORK_PANEL)]
Port = Annotated[
    int,
    typer.Option(
        min=0,
        max=65535,
        help="Port to listen on; 0 takes a free port.",
        rich_help_panel=NETWORK_PANEL,
    ),
]
HttpPort = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        help="Port of the OpenAI-compatible HTTP API; 0 takes a free port. Default: no HTTP.",
        rich_help_panel=NETWORK_PANEL,
    ),
]
HttpHost = Annotated[
    str,
    typer.Option(
        help="Address to serve HTTP on. Default: that of --host.", rich_help_panel=NETWORK_PANEL
    ),
]
ToolParser = Annotated[
    str,
    typer.Option(
        help="Parser of tool calls for the OpenAI API: hermes (also for Qwen) or llama3_json. "
        "Default: tool calls stay text.",
        rich_help_panel=MODEL_PANEL,
    ),
]
ReasoningParser = Annotated[
    str,
    typer.Option(
        help="Parser of reasoning for the OpenAI API: qwen3, or deepseek_r1 if the chat template "
        "opens the reasoning. Default: reasoning stays text.",
        rich_help_panel=MODEL_PANEL,
    ),
]
NodePatience = Annotated[
    float,
    typer.Option(
        help="Seconds that a request waits for a decode node if there is none; 0: fail at once.",
        rich_help_panel=NETWORK_PANEL,
    ),
]
StuckAfter = Annotated[
    float,
    typer.Option(
        help="Seconds without a finished step or layer after which the node is not ready.",
        rich_help_panel=NETWORK_PANEL,
    ),
]
DrainTimeout = Annotated[
    float,
    typer.Option(
        min=0,
        help="Seconds to finish running requests after SIGTERM; the process then ends at once.",
        rich_help_panel=NETWORK_PANEL,
    ),
]
NodeName = Annotated[
    str,
    typer.Option(help="Name of the node. Default: a random name.", rich_help_panel=NETWORK_PANEL),
]
Nodes = Annotated[
    str,
    typer.Option(
        help="Comma-separated node addresses: host:port, dns:///name:port (each address behind "
        "the name is a node) or file:///path (a list of host:port lines).",
        rich_help_panel=NETWORK_PANEL,
    ),
]
FindEvery = Annotated[
    float,
    typer.Option(
        help="Seconds between two resolutions of names and reads of lists.",
        rich_help_panel=NETWORK_PANEL,
    ),
]
ParentPid = Annotated[int, typer.Option(hidden=True, help="End when this process ends.")]

Policy = Annotated[
    str,
    typer.Option(
        help="Routing policy: prefix_aware, least_loaded, power_of_two or round_robin.",
        rich_help_panel=ROUTING_PANEL,
    ),
]
LocalPrefill = Annotated[
    int,
    typer.Option(
        help="Compute the uncached part of a prompt on the decode node, in small chunks between "
        "decode steps, if it has fewer tokens than this and the prefill node would have to "
        "compute at least twice as many; 0: never.",
        rich_help_panel=ROUTING_PANEL,
    ),
]
MaxInFlight = Annotated[
    int | None,
    typer.Option(
        help="Maximum number of requests in flight on the nodes. Default: as many as the decode "
        "nodes' batches hold.",
        rich_help_panel=ROUTING_PANEL,
    ),
]
MaxQueue = Annotated[
    int,
    typer.Option(
        help="Maximum number of queued requests; more are refused (QUEUE_FULL).",
        rich_help_panel=ROUTING_PANEL,
    ),
]

LogFormat = Annotated[
    str,
    typer.Option(
        help="auto, text or json; auto: text on a terminal, JSON elsewhere.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
LogLevel = Annotated[
    str,
    typer.Option(
        help="debug, info or warning; debug also logs each successful request.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]


def check_writable_file(path: Path | None) -> Path | None:
    """Reject a file that cannot be written, before the work whose result goes there."""
    trouble = None if path is None else file_error(path)
    if trouble is not None:
        raise typer.BadParameter(trouble)
    return path


def check_creatable_folder(folder: Path | None) -> Path | None:
    """Reject a folder that cannot be created, with its parents, when it is first written to."""
    trouble = None if folder is None else folder_error(folder)
    if trouble is not None:
        raise typer.BadParameter(trouble)
    return folder


JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        help="Also write the figures to this JSON file.",
        callback=check_writable_file,
        rich_help_panel=OUTPUT_PANEL,
    ),
]
