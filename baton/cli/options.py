"""Options that several commands share, each in its panel of `--help`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.writable import file_trouble, folder_trouble

MODEL_PANEL = "Model"
KV_PANEL = "KV cache"
BATCH_PANEL = "Batching"
MACHINE_PANEL = "Machine"
NETWORK_PANEL = "Network"
ROUTING_PANEL = "Routing"
FORM_PANEL = "The form of the answer"
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
        help="Model folder, or a name on the Hugging Face hub; the demo model if left out.",
        rich_help_panel=MODEL_PANEL,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(help="auto, float32, bfloat16 or float16.", rich_help_panel=MODEL_PANEL),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(help="Most tokens of prompt and answer.", rich_help_panel=MODEL_PANEL),
]
ModelName = Annotated[
    str, typer.Option(help="Name that clients use for the model.", rich_help_panel=MODEL_PANEL)
]

Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.", rich_help_panel=MACHINE_PANEL)]
Kernels = Annotated[
    str,
    typer.Option(
        help="auto, native or torch: native ones compute bfloat16 on the CPU.",
        rich_help_panel=MODEL_PANEL,
    ),
]
Quantize = Annotated[
    str,
    typer.Option(
        help="none, int8 or int4: what the weights become as they are loaded.",
        rich_help_panel=MODEL_PANEL,
    ),
]
LogitsProcessors = Annotated[
    str,
    typer.Option(
        help="Names of installed logits processors, with commas; the same on every node.",
        rich_help_panel=BATCH_PANEL,
    ),
]
Speculative = Annotated[
    str,
    typer.Option(
        help="ngram:K: decode nodes propose up to K tokens at once from what was there before, and "
        "confirm them in one step; the answers stay what they are.",
        rich_help_panel=BATCH_PANEL,
    ),
]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Threads of torch.", rich_help_panel=MACHINE_PANEL)
]
Cpus = Annotated[
    str,
    typer.Option(help="CPU cores to stay on, such as 0-3,6.", rich_help_panel=MACHINE_PANEL),
]

KvMemory = Annotated[
    str,
    typer.Option(
        help="Size of the KV cache, such as 512MiB; auto: half of the CPU's or 80 % of the GPU's "
        "free memory, divided by --nodes-per-machine, and never more than full batches need.",
        rich_help_panel=KV_PANEL,
    ),
]
NodesPerMachine = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Nodes that share this machine's memory, or the GPU's: each takes its part for "
        "--kv-cache-memory auto; left out, 2 on a CPU and 1 on a GPU; baton up counts its nodes.",
        rich_help_panel=KV_PANEL,
    ),
]
BlockSize = Annotated[
    int, typer.Option(help="Tokens in a KV block; alike on all nodes.", rich_help_panel=KV_PANEL)
]
PrefixCaching = Annotated[
    bool, typer.Option(help="Keep the KV of prompts for later ones.", rich_help_panel=KV_PANEL)
]
Transport = Annotated[
    str, typer.Option(help="What carries KV: nixl or ucxx.", rich_help_panel=KV_PANEL)
]
KvTls = Annotated[
    str,
    typer.Option(
        help="What UCX may use, such as tcp or ^cma; left out, it chooses.",
        rich_help_panel=KV_PANEL,
    ),
]
KvNetDevice = Annotated[
    str,
    typer.Option(
        help="Network device for UCX, such as lo or eth0; left out, lo if --host is a loopback "
        "address, else what UCX chooses.",
        rich_help_panel=KV_PANEL,
    ),
]
KvVerify = Annotated[
    bool,
    typer.Option(
        help="Digest KV that is sent and check what landed; on a GPU, both copy it to the host.",
        rich_help_panel=KV_PANEL,
    ),
]
KvLease = Annotated[
    float,
    typer.Option(
        help="How long a prefill node may write without hearing of the decode node.",
        rich_help_panel=KV_PANEL,
    ),
]
KvSilence = Annotated[
    float,
    typer.Option(
        help="A peer that says nothing for so long while asked is given up. Nodes in a long pass "
        "go on saying that they live, up to --stuck-after-s.",
        rich_help_panel=KV_PANEL,
    ),
]
KvLoadFailure = Annotated[
    str,
    typer.Option(
        help="recompute or fail: what a decode node does with a request whose KV did not arrive. "
        "recompute computes the prompt there; fail ends it, and the router tries it elsewhere.",
        rich_help_panel=KV_PANEL,
    ),
]
RemoteHeadroom = Annotated[
    int,
    typer.Option(
        min=0,
        help="KV blocks that a decode node keeps free, when it grants blocks to a prefill node, "
        "for each request that holds blocks and must grow; 0 grants more and preempts more.",
        rich_help_panel=KV_PANEL,
    ),
]
Push = Annotated[
    str,
    typer.Option(
        help="What prefill nodes push as soon as it is computed: layer or chunk.",
        rich_help_panel=KV_PANEL,
    ),
]

MaxNumSeqs = Annotated[
    int, typer.Option(help="Most requests in one batch.", rich_help_panel=BATCH_PANEL)
]
MaxTokens = Annotated[
    int, typer.Option(help="Most tokens in one step.", rich_help_panel=BATCH_PANEL)
]
SchedulingPolicy = Annotated[
    str,
    typer.Option(
        help="priority or fcfs: the order of waiting requests. priority is by the requests' own "
        "priority (lower first), then by arrival, and lets an urgent request preempt running ones "
        "of lower priority, each once; fcfs is by arrival alone.",
        rich_help_panel=BATCH_PANEL,
    ),
]
LongPrefill = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Most tokens of one prompt in one step while short prompts come, so that they go "
        "along with long ones; 0 is no limit. Left out, 512, or 0 with --no-chunked-prefill.",
        rich_help_panel=BATCH_PANEL,
    ),
]
MaxPartialPrefills = Annotated[
    int,
    typer.Option(
        min=0,
        help="Most prompts that are part computed after a step; 0 is no limit.",
        rich_help_panel=BATCH_PANEL,
    ),
]
MaxLongPartialPrefills = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Of these, most that are longer than --long-prefill-token-threshold, so that shorter "
        "ones pass them; 0 is no limit. Left out, 1 where there is a threshold.",
        rich_help_panel=BATCH_PANEL,
    ),
]
ChunkedPrefill = Annotated[
    bool,
    typer.Option(
        help="Compute a prompt in chunks over several steps. Without it, a prompt that is longer "
        "than --max-num-batched-tokens is refused.",
        rich_help_panel=BATCH_PANEL,
    ),
]

TargetStep = Annotated[
    float,
    typer.Option(
        min=0,
        help="Prompts get as many tokens of a step as let it end in about this time while other "
        "requests decode, as measured from the steps before; 0 is as many as fit.",
        rich_help_panel=BATCH_PANEL,
    ),
]

Host = Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=NETWORK_PANEL)]
Port = Annotated[
    int,
    typer.Option(
        min=0,
        max=65535,
        help="Port to listen on; 0 takes any that is free.",
        rich_help_panel=NETWORK_PANEL,
    ),
]
HttpPort = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        help="Port of OpenAI's API over HTTP; 0 takes any that is free, none is taken if left out.",
        rich_help_panel=NETWORK_PANEL,
    ),
]
HttpHost = Annotated[
    str,
    typer.Option(
        help="Address to serve HTTP on; as --host if left out.", rich_help_panel=NETWORK_PANEL
    ),
]
ToolParser = Annotated[
    str,
    typer.Option(
        help="How the model writes tool calls, for OpenAI's API: hermes (Qwen, too) or "
        "llama3_json; they stay text if left out.",
        rich_help_panel=MODEL_PANEL,
    ),
]
ReasoningParser = Annotated[
    str,
    typer.Option(
        help="How the model sets its reasoning apart, for OpenAI's API: qwen3, or deepseek_r1 "
        "where its template begins it; it stays text if left out.",
        rich_help_panel=MODEL_PANEL,
    ),
]
NodePatience = Annotated[
    float,
    typer.Option(
        help="How long a request waits for a decode node when none is there; 0 is off.",
        rich_help_panel=NETWORK_PANEL,
    ),
]
StuckAfter = Annotated[
    float,
    typer.Option(
        help="Not ready when the engine has finished no step and no layer for so long.",
        rich_help_panel=NETWORK_PANEL,
    ),
]
DrainTimeout = Annotated[
    float,
    typer.Option(
        min=0,
        help="Seconds to finish what it has when told to end; then it ends at once.",
        rich_help_panel=NETWORK_PANEL,
    ),
]
NodeName = Annotated[
    str, typer.Option(help="Name of the node; drawn when left out.", rich_help_panel=NETWORK_PANEL)
]
Nodes = Annotated[
    str,
    typer.Option(
        help="host:port, dns:///name:port (each address behind the name is a node) or "
        "file:///path (a list of host:port lines), with commas between.",
        rich_help_panel=NETWORK_PANEL,
    ),
]
FindEvery = Annotated[
    float,
    typer.Option(
        help="Seconds until names are resolved and lists are read again.",
        rich_help_panel=NETWORK_PANEL,
    ),
]
ParentPid = Annotated[int, typer.Option(hidden=True, help="End with this process.")]

Policy = Annotated[
    str,
    typer.Option(
        help="How nodes are chosen: prefix_aware, least_loaded, power_of_two or round_robin.",
        rich_help_panel=ROUTING_PANEL,
    ),
]
LocalPrefill = Annotated[
    int,
    typer.Option(
        help="Decode computes what it lacks of a prompt, in small parts between its answers, if "
        "that is fewer tokens than this and prefill would compute twice as many; 0 is off.",
        rich_help_panel=ROUTING_PANEL,
    ),
]
MaxInFlight = Annotated[
    int | None,
    typer.Option(
        help="Most requests that the nodes work on at once; left out, as many as the decode nodes' "
        "batches hold.",
        rich_help_panel=ROUTING_PANEL,
    ),
]
MaxQueue = Annotated[
    int,
    typer.Option(
        help="Most requests that wait for their turn; more are refused.",
        rich_help_panel=ROUTING_PANEL,
    ),
]

LogFormat = Annotated[
    str,
    typer.Option(
        help="auto, text or json: auto is text on a terminal and JSON elsewhere.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
LogLevel = Annotated[
    str,
    typer.Option(
        help="debug, info or warning; debug tells of each request that ended well, too.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]


def can_be_written(path: Path | None) -> Path | None:
    """Told before the work whose outcome goes there."""
    trouble = None if path is None else file_trouble(path)
    if trouble is not None:
        raise typer.BadParameter(trouble)
    return path


def can_be_made(folder: Path | None) -> Path | None:
    """The same for a folder, which is made with those above it when there is something to write."""
    trouble = None if folder is None else folder_trouble(folder)
    if trouble is not None:
        raise typer.BadParameter(trouble)
    return folder


JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        help="Write the figures here, too.",
        callback=can_be_written,
        rich_help_panel=OUTPUT_PANEL,
    ),
]
