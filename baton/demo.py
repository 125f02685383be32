"""`baton demo`: runs a few prompts on a cluster of three processes and reports the hand-offs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from baton.checkpoint.hub import open_checkpoint
from baton.client import Answer, Client, Finish, Generation
from baton.cluster import ClusterOptions, LocalCluster
from baton.core.sampling import SamplingParams
from baton.core.units import format_bytes
from baton.demo_model import demo_model
from baton.engine.runner.config import RunnerConfig
from baton.kernels import build_missing_kernels
from baton.telemetry.tracing.store import read_spans
from baton.telemetry.tracing.traces import find_trace, traces_of
from baton.traces.terminal import show_waterfall

PROMPTS = (
    "def read_config(path):\n",
    "class Queue:\n    def __init__(self, maxsize=0):\n",
    "import os\nimport sys\n\n\ndef main():\n",
)
SAMPLING = SamplingParams(max_tokens=64, temperature=0.4, top_p=0.95, seed=7)


def run(model: str, trace_dir: Path) -> None:
    """Run the demo to its end. Raises NamedError."""
    console = Console()
    model = model or demo_model()
    build_missing_kernels(RunnerConfig(model), open_checkpoint(model), lambda: console)
    finishes = _serve(console, model, trace_dir)
    _show_trace(console, trace_dir, finishes[-1].served.trace_id)
    console.print(
        f"The KV went from prefill to decode memory over {finishes[0].served.kv_transport}; "
        "the decode node computed no prompt token. All processes have ended."
        if all(_was_handed_over(finish) for finish in finishes)
        else "[red]Not every prompt was handed over; see the table.[/]"
    )


def _serve(console: Console, model: str, trace_dir: Path) -> list[Finish]:
    traces = ("--trace-dir", str(trace_dir))
    options = ClusterOptions(
        model=model, node_arguments=(*_node_arguments(), *traces), router_arguments=traces
    )
    console.print("[bold]Starting router, 1 prefill node, 1 decode node[/] as processes ...")
    with LocalCluster(options) as cluster, Client(cluster.address) as client:
        pids = ", ".join(f"{child.name} pid {child.process.pid}" for child in cluster.children)
        console.print(f"{pids}; router on {cluster.address}\n")
        finishes = [_run_prompt(console, client, prompt) for prompt in PROMPTS]
        console.print(_table(finishes))
    return finishes


def _show_trace(console: Console, trace_dir: Path, trace_id: str) -> None:
    trace = find_trace(traces_of(read_spans(trace_dir)), trace_id) if trace_id else None
    if trace is None:
        console.print(f"The last request's trace is not in {trace_dir}.", style="red", markup=False)
        return
    console.print("\n[bold]Where the time of the last request went[/]")
    show_waterfall(console, trace)
    console.print(
        f"Show it again: baton trace show {trace_id[:8]}, with --html FILE as an HTML page.\n"
    )


def _run_prompt(console: Console, client: Client, prompt: str) -> Finish:
    console.print(prompt, style="bold cyan", end="", markup=False, highlight=False)
    answer = Answer()
    for chunk in client.stream(prompt, Generation(SAMPLING)):
        console.print(chunk.text, end="", markup=False, highlight=False, soft_wrap=True)
        answer.take(chunk)
    console.print("\n")
    if answer.finish is None:
        raise RuntimeError("the router ended an answer without a finish message")
    return answer.finish


def _table(finishes: Sequence[Finish]) -> Table:
    table = Table(title="What happened")
    for heading in ("prompt tokens", "new tokens", "TTFT ms", "tokens/s", "KV pushed", "over"):
        table.add_column(heading, justify="right")
    table.add_column("prompt tokens computed on decode", justify="right")
    for finish in finishes:
        served = finish.served
        table.add_row(
            str(finish.num_prompt_tokens),
            str(finish.num_completion_tokens),
            f"{finish.first_token_s * 1000:.1f}",
            f"{_tokens_per_s(finish):.0f}",
            format_bytes(served.kv_bytes),
            served.kv_transport,
            str(served.prompt_tokens_computed_on_decode),
        )
    return table


def _tokens_per_s(finish: Finish) -> float:
    """Return the decoding rate, which excludes the first token."""
    elapsed_s = finish.finished_s - finish.first_token_s
    return (finish.num_completion_tokens - 1) / elapsed_s if elapsed_s > 0 else 0.0


def _was_handed_over(finish: Finish) -> bool:
    served = finish.served
    return served.is_prefill_remote and served.kv_bytes > 0


def _node_arguments() -> tuple[str, ...]:
    """Limit memory and threads of a node: three processes share the machine."""
    threads = max(1, (os.cpu_count() or 2) // 2)
    return ("--kv-cache-memory", "64MiB", "--threads", str(threads))
