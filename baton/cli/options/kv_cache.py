"""Options of KV cache and KV transfer."""

from __future__ import annotations

from typing import Annotated

import typer

KV_PANEL = "KV cache"

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
KvDtype = Annotated[
    str,
    typer.Option(
        help="Numbers of the KV cache: auto, as the model computes; or int8, about half of the "
        "bytes of bfloat16.",
        rich_help_panel=KV_PANEL,
    ),
]
KvStaging = Annotated[
    str,
    typer.Option(
        help="Memory in which a decode node takes the KV of prefill nodes with another "
        "--block-size, or without --kv-cache-dtype int8, to convert it; 0: such nodes are refused.",
        rich_help_panel=KV_PANEL,
    ),
]
KvHostMemory = Annotated[
    str,
    typer.Option(
        help="Host memory for KV that was evicted from the KV cache, such as 4GiB; prompts with "
        "the same prefix load it instead of computing it. 0: none.",
        rich_help_panel=KV_PANEL,
    ),
]
KvFolder = Annotated[
    str,
    typer.Option(
        help="Folder for KV in files, below --kv-host-memory. It survives restarts, and nodes of "
        "the same model can share it. Default: none.",
        rich_help_panel=KV_PANEL,
    ),
]
KvFolderSize = Annotated[
    str,
    typer.Option(
        help="Limit of the files in --kv-folder, of all models and versions together; unused "
        "versions are deleted first, then the least recently used files.",
        rich_help_panel=KV_PANEL,
    ),
]
KvObjectStore = Annotated[
    str,
    typer.Option(
        help="Bucket for KV in an S3-compatible store, below --kv-host-memory and --kv-folder: "
        "s3://bucket/prefix. AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY say where it is. Needs pip install 'baton[s3]'. Default: none.",
        rich_help_panel=KV_PANEL,
    ),
]
KvObjectStoreSize = Annotated[
    str,
    typer.Option(
        help="Limit of the objects of one model in --kv-object-store; the least recently used "
        "ones are deleted.",
        rich_help_panel=KV_PANEL,
    ),
]
KvTierAdmission = Annotated[
    str,
    typer.Option(
        help="Blocks that are written to --kv-folder. all: each one; reuse: at their second use, "
        "or at once for requests with a session or a retention, which spares the disk.",
        rich_help_panel=KV_PANEL,
    ),
]
KvTenantShare = Annotated[
    float,
    typer.Option(
        help="Share of --kv-host-memory and of --kv-folder-size that the KV of one tenant (a cache "
        "salt, or the owner of a token and all its salts) can take. 1: no limit.",
        rich_help_panel=KV_PANEL,
    ),
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
