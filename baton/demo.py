"""`baton demo`: runs a few prompts on a cluster of three processes and reports the hand-offs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

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
from baton.kv_transfer.transports.ucx_log import LOG_NAME, find_write_transport, ucx_log_environment
from baton.telemetry.names import KV_BYTES, KV_DESCRIPTORS, KV_PUSH
from baton.telemetry.tracing.spans import Attributes
from baton.telemetry.tracing.store import read_spans
from baton.telemetry.tracing.traces import Trace, find_trace, traces_of
from baton.traces.terminal import show_waterfall

PROMPTS = (
    "def read_config(path):\n",
    "class Queue:\n    def __init__(self, maxsize=0):\n",
    "import os\nimport sys\n\n\ndef main():\n",
)
SAMPLING = SamplingParams(max_tokens=64, temperature=0.4, top_p=0.95, seed=7)


@dataclass(frozen=True, slots=True)
class DemoResult:
    """One prompt and its answer."""

    prompt: str
    answer: Answer
    finish: Finish


def run(model: str, trace_dir: Path) -> None:
    """Run the demo to its end. Raises NamedError."""
    console = Console()
    model = model or demo_model()
    build_missing_kernels(RunnerConfig(model), open_checkpoint(model), console)
    with TemporaryDirectory(prefix="baton-demo-") as folder:
        results, log = _serve(console, _options(model, trace_dir, folder), Path(folder))
    _show_trace(console, trace_dir, results[-1], log)
    console.print(
        f"The KV went from prefill to decode memory over {results[0].finish.served.kv_transport}; "
        "the decode node computed no prompt token. All processes have ended."
        if all(_was_handed_over(result.finish) for result in results)
        else "[red]Not every prompt was handed over; see the table.[/]"
    )


def _options(model: str, trace_dir: Path, folder: str) -> ClusterOptions:
    traces = ("--trace-dir", str(trace_dir))
    return ClusterOptions(
        model=model,
        node_arguments=(*_node_arguments(), *traces),
        router_arguments=traces,
        environment=ucx_log_environment(folder),
    )


def _serve(console: Console, options: ClusterOptions, folder: Path) -> tuple[list[DemoResult], str]:
    """Run the prompts. Return their results and the UCX log of the prefill node."""
    console.print("[bold]Starting router, 1 prefill node, 1 decode node[/] as processes ...")
    with LocalCluster(options) as cluster, Client(cluster.address) as client:
        pids = ", ".join(f"{child.name} pid {child.process.pid}" for child in cluster.children)
        console.print(f"{pids}; router on {cluster.address}\n")
        results = [_run_prompt(console, client, prompt) for prompt in PROMPTS]
        console.print(_table(results))
        log = folder / LOG_NAME.format(pid=cluster.prefills[0].process.pid)
    return results, log.read_text(errors="replace") if log.exists() else ""


def _show_trace(console: Console, trace_dir: Path, result: DemoResult, log: str) -> None:
    """Print the waterfall of one request and the transport of its KV."""
    trace_id = result.finish.served.trace_id
    trace = find_trace(traces_of(read_spans(trace_dir)), trace_id) if trace_id else None
    if trace is None:
        console.print(f"The last request's trace is not in {trace_dir}.", style="red", markup=False)
        return
    console.print("\n[bold]Where the time of the last request went[/]")
    show_waterfall(console, trace)
    console.print(
        f"Show it again: baton trace show {trace_id[:8]}, with --html FILE as an HTML page.\n"
    )
    console.print(_kv_transport_line(trace, log), soft_wrap=True)


def _kv_transport_line(trace: Trace, log: str) -> str:
    """Return a sentence on the transport of the KV, according to the log of UCX."""
    pushes = [row.span.attributes for row in trace.rows if row.span.name == KV_PUSH]
    sizes = [_bytes_per_write(push) for push in pushes]
    chosen = find_write_transport(log, sizes[-1]) if sizes else None
    if chosen is None:
        allowed = os.environ.get("UCX_TLS", "all transports")
        return f"UCX did not log the transport of the KV; it could choose from: {allowed}."
    words = f": {chosen.transport_description}" if chosen.transport_description else ""
    return (
        f"According to its log, UCX wrote the KV over [bold]{chosen.transport}[/] "
        f"({chosen.how}, {chosen.place}){words}."
    )


def _bytes_per_write(push: Attributes) -> int:
    num_bytes, num_runs = push.get(KV_BYTES, 0), push.get(KV_DESCRIPTORS, 1)
    if not isinstance(num_bytes, int) or not isinstance(num_runs, int):
        return 0
    return num_bytes // max(1, num_runs)


def _run_prompt(console: Console, client: Client, prompt: str) -> DemoResult:
    console.print(prompt, style="bold cyan", end="", markup=False, highlight=False)
    answer = Answer()
    for chunk in client.stream(prompt, Generation(SAMPLING)):
        console.print(chunk.text, end="", markup=False, highlight=False, soft_wrap=True)
        answer.take(chunk)
    console.print("\n")
    if answer.finish is None:
        raise RuntimeError("the router ended an answer without a finish message")
    return DemoResult(prompt, answer, answer.finish)


def _table(results: list[DemoResult]) -> Table:
    table = Table(title="What happened")
    for heading in ("prompt tokens", "new tokens", "TTFT ms", "tokens/s", "KV pushed", "over"):
        table.add_column(heading, justify="right")
    table.add_column("prompt tokens computed on decode", justify="right")
    for result in results:
        finish, served = result.finish, result.finish.served
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
