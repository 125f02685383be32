"""The command line of the benchmarks. Each is a module; heavy imports happen on use."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from baton.cli.command import (
    ENVIRONMENT_PREFIX,
    CommandGroup,
    ConfigFile,
    unwrap,
    use_command_class,
)
from baton.cli.examples import examples
from baton.cli.program import prepare, run_program
from baton.rpc.process_end import exit_on_sigterm
from benchmarks.cli.adapters import adapters
from benchmarks.cli.chaos import chaos
from benchmarks.cli.chart import chart
from benchmarks.cli.embeddings import embeddings
from benchmarks.cli.engine import engine
from benchmarks.cli.forms import forms
from benchmarks.cli.frontier import frontier
from benchmarks.cli.handover import handover
from benchmarks.cli.index import index
from benchmarks.cli.interference import interference
from benchmarks.cli.kv import kv
from benchmarks.cli.memory import memory
from benchmarks.cli.options import options
from benchmarks.cli.overload import overload
from benchmarks.cli.peer import peer
from benchmarks.cli.perplexity import perplexity
from benchmarks.cli.pictures import pictures
from benchmarks.cli.policies import policies
from benchmarks.cli.ranks import ranks
from benchmarks.cli.replay import replay
from benchmarks.cli.reuse import reuse
from benchmarks.cli.router import router
from benchmarks.cli.scheduler import scheduler
from benchmarks.cli.speculation import speculation
from benchmarks.cli.startup import startup
from benchmarks.cli.tiers import tiers
from benchmarks.cli.trace import trace
from benchmarks.cli.vision import vision

PROGRAM = "python -m benchmarks"
# BATON_BENCH_CHAOS_SEED is --seed of the benchmark chaos.
VARIABLE_PREFIX = f"{ENVIRONMENT_PREFIX}_BENCH"
EXAMPLES: dict[Callable[..., None], tuple[str, ...]] = {
    scheduler: ("scheduler --running 256,1024",),
    engine: ("engine --model models/demo --batches 1,8 --json engine.json",),
    kv: ("kv --paths nixl,nixl:tcp --sizes 8MiB,64MiB",),
    replay: (
        "replay mooncake.jsonl.gz --block-tokens 16 --time-scale 0.1 --plot reuse.png",
        "replay sessions.tar.gz --use-answers --json replay.json",
    ),
    speculation: ("speculation --speculative suffix:6",),
    adapters: ("adapters --model ~/models/Qwen3-0.6B --batch 32 --adapters 8 --rank 16",),
    embeddings: (
        "embeddings --model ~/models/all-MiniLM-L6-v2 --json embeddings.json",
        "embeddings --shape qwen3-0.6b --layers 4 --dtype bfloat16 --peers sentence-transformers",
    ),
    vision: ("vision --rounds 9", "vision --shape qwen2.5-vl --layers 8"),
    pictures: ("pictures --rounds 5 --json pictures.json",),
    forms: ("forms --model models/demo --runs 20",),
    index: ("index --nodes 64",),
    router: ("router --streams 64 --json router.json",),
    policies: ("policies --nodes 100 --plot policies.png",),
    ranks: ("ranks --model ~/models/Qwen3-0.6B --size 2 --threads 1",),
    reuse: ("reuse --requests 500", "reuse --trace mooncake.jsonl.gz --json reuse.json"),
    trace: ("trace --rounds 9 --json trace.json",),
    options: ('options --with "--async-scheduling" --rounds 40',),
    overload: ("overload --model models/demo --factor 3",),
    memory: ("memory --requests 100000 --clients 64",),
    chaos: ("chaos --minutes 20 --every 5", "chaos --kinds kill --roles decode --logs logs"),
    peer: ("peer --model ~/models/Qwen3-0.6B --vllm-venv ~/vllm",),
    interference: ("interference --model ~/models/Qwen3-0.6B --vllm-venv ~/vllm",),
    frontier: ("frontier --model ~/models/Qwen3-0.6B --rates 0.1,0.2 --plot f.png",),
    perplexity: (
        "perplexity models/demo --text README.md",
        "perplexity model-Q4_K_M.gguf --text text.txt --llamacpp-venv ~/llamacpp",
    ),
    startup: ("startup --model model-Q4_0.gguf --llamacpp-venv ~/llamacpp",),
    handover: ("handover --model ~/models/Qwen3-0.6B --pairs 30",),
    tiers: ("tiers --model ~/models/Qwen3-0.6B --tokens 8192 --kv-cache-memory 1GiB",),
    chart: ("chart --peer peer.json --interference load.json engines.png",),
}

app = typer.Typer(
    name="benchmarks",
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback(
    help=unwrap("""
    Research benchmarks of Baton, also against other engines.

    Options are read from a file (--config), the environment (BATON_BENCH_CHAOS_SEED is --seed of
    `chaos`) and the command line; each source overrides the ones before it. `baton bench
    serve` sends a load to a running cluster.
    """)
)
def _benchmarks(config: ConfigFile = None) -> None: ...


for command, lines in EXAMPLES.items():
    app.command(epilog=examples(*(f"{PROGRAM} {line}" for line in lines)))(command)
use_command_class(app)


def main() -> None:
    """Run the command line. A named error prints one line; a bug keeps its traceback."""
    prepare()
    exit_on_sigterm()  # unwinds the stack, so that started processes end with the measurement
    sys.exit(run_program(app, PROGRAM, VARIABLE_PREFIX))
