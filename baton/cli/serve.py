"""`baton serve router|prefill|decode`: one process of a cluster."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from baton.units import parse_bytes
from engine.errors import InvalidConfig
from serving.parent import end_with_parent

if TYPE_CHECKING:
    from serving.node_options import NodeOptions

CPU_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

serve = typer.Typer(help="Run one process of a cluster.", no_args_is_help=True)

Model = Annotated[str, typer.Option(help="Model folder, or a name on the Hugging Face hub.")]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(help="Port to listen on; 0 takes any that is free.")]
KvMemory = Annotated[str, typer.Option(help="Size of the KV cache, such as 512MiB.")]
BlockSize = Annotated[int, typer.Option(help="Tokens in a KV block; alike on all nodes.")]
MaxNumSeqs = Annotated[int, typer.Option(help="Most requests in one batch.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens in one step.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Most tokens of prompt and answer.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
Threads = Annotated[int | None, typer.Option(help="Threads of torch.")]
Cpus = Annotated[str, typer.Option(help="CPU cores to stay on, such as 0-3,6.")]
Transport = Annotated[str, typer.Option(help="What carries KV: nixl or ucxx.")]
KvTls = Annotated[
    str, typer.Option(help="What UCX may use, such as tcp or ^cma; left out, it chooses.")
]
KvNetDevice = Annotated[
    str, typer.Option(help="Network device for UCX, such as lo or eth0; left out, it chooses.")
]
KvVerify = Annotated[bool, typer.Option(help="Digest KV that is sent and check what landed.")]
Push = Annotated[str, typer.Option(help="What prefill nodes send: each chunk, or each layer.")]
NodeName = Annotated[str, typer.Option(help="Name of the node; drawn when left out.")]
PrefixCaching = Annotated[bool, typer.Option(help="Keep the KV of prompts for later ones.")]
Addresses = Annotated[str, typer.Option(help="host:port of each, with commas between.")]
ParentPid = Annotated[int, typer.Option(hidden=True, help="End with this process.")]
Policy = Annotated[
    str,
    typer.Option(
        help="How nodes are chosen: prefix_aware, least_loaded, power_of_two or round_robin."
    ),
]
LocalPrefill = Annotated[
    int, typer.Option(help="Decode computes a prompt that lacks fewer tokens there; 0 is off.")
]
MaxInFlight = Annotated[int, typer.Option(help="Most requests that the nodes work on at once.")]
MaxQueue = Annotated[
    int, typer.Option(help="Most requests that wait for their turn; more are refused.")
]
ModelName = Annotated[str, typer.Option(help="Name that clients use for the model.")]


def _node_command(run: Callable[[NodeOptions], None]) -> Callable[..., None]:
    """Both kinds of node take the same options."""

    def command(
        model: Model,
        host: Host = "127.0.0.1",
        port: Port = 0,
        kv_cache_memory: KvMemory = "256MiB",
        block_size: BlockSize = 16,
        max_num_seqs: MaxNumSeqs = 128,
        max_num_batched_tokens: MaxTokens = 2048,
        max_model_len: MaxModelLen = None,
        dtype: Dtype = "auto",
        device: Device = "cpu",
        threads: Threads = None,
        cpus: Cpus = "",
        kv_transport: Transport = "nixl",
        kv_tls: KvTls = "",
        kv_net_device: KvNetDevice = "",
        kv_verify: KvVerify = True,
        push: Push = "chunk",
        node_id: NodeName = "",
        served_model_name: ModelName = "",
        prefix_caching: PrefixCaching = True,
        parent_pid: ParentPid = 0,
    ) -> None:
        from engine.runner.settings import RunnerConfig
        from engine.scheduler_config import SchedulerConfig
        from serving.node_options import NodeOptions

        options = NodeOptions(
            runner=RunnerConfig(
                model=model,
                dtype=dtype,
                device=device,
                block_size=block_size,
                kv_cache_bytes=parse_bytes(kv_cache_memory),
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                num_threads=threads,
            ),
            scheduling=SchedulerConfig(
                max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
            ),
            host=host,
            port=port,
            node_id=node_id,
            model_name=served_model_name,
            kv_transport=kv_transport,
            kv_tls=kv_tls,
            kv_net_device=kv_net_device,
            kv_verify=kv_verify,
            push=push,
            enable_prefix_caching=prefix_caching,
            cpus=parse_cpus(cpus),
        )
        _begin(parent_pid)
        run(options)

    return command


def _run_prefill(options: NodeOptions) -> None:
    from prefill_node.__main__ import main

    main(options)


def _run_decode(options: NodeOptions) -> None:
    from decode_node.__main__ import main

    main(options)


serve.command(
    "prefill", help="Run a prefill node: it computes prompts and pushes their KV to decode nodes."
)(_node_command(_run_prefill))
serve.command("decode", help="Run a decode node: it takes KV from prefill nodes, writes answers.")(
    _node_command(_run_decode)
)


@serve.command()
def router(
    decode_nodes: Addresses,
    prefill_nodes: Annotated[
        str, typer.Option(help="host:port of each, with commas between.")
    ] = "",
    host: Host = "127.0.0.1",
    port: Port = 50051,
    model: Annotated[str, typer.Option(help="Model whose tokenizer to use.")] = "",
    policy: Policy = "prefix_aware",
    local_prefill_below: LocalPrefill = 0,
    max_in_flight: MaxInFlight = 1024,
    max_queue: MaxQueue = 1024,
    parent_pid: ParentPid = 0,
) -> None:
    """Run the router: the door for clients."""
    from router.__main__ import RouterOptions, main
    from router.line import LineConfig
    from router.policy import Routing, policy_named

    options = RouterOptions(
        decode_nodes=_addresses(decode_nodes),
        prefill_nodes=_addresses(prefill_nodes),
        host=host,
        port=port,
        model=model,
        routing=Routing(policy_named(policy), local_prefill_below),
        line=LineConfig(max_in_flight, max_queue),
    )
    _begin(parent_pid)
    main(options)


def _begin(parent_pid: int) -> None:
    if parent_pid:
        end_with_parent(parent_pid)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format=LOG_FORMAT,
    )


def parse_cpus(written: str) -> tuple[int, ...]:
    """0-3,6 names five cores."""
    cpus: list[int] = []
    for part in filter(None, written.split(",")):
        match = CPU_RANGE.fullmatch(part.strip())
        if match is None:
            raise InvalidConfig(f"--cpus {written!r}: write it like 0-3,6")
        cpus.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(cpus)


def _addresses(written: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in written.split(",") if part.strip())
