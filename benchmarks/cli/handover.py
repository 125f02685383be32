"""`python -m benchmarks handover`."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.options.output import JsonFile
from baton.cli.show import console, show_table, write_json
from benchmarks.partial_results import report_on_exit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.peers.handover import Handover, TimedPair
    from benchmarks.peers.warm_engines import Start


def handover(
    model: Annotated[str, typer.Option(help="Model folder.")] = "models/demo",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    pairs: Annotated[
        int, typer.Option(min=1, help="Number of prompts; each is sent to both setups.")
    ] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Measure the time to first token that disaggregation adds, compared with one node.

    Prompts are sent one at a time. The single node has the same cores as the prefill node: half of
    those of this process. Shares are disaggregated over single node minus one, per pair.
    """
    from benchmarks.peers.engines import baton_colocated, baton_disaggregated, core_halves
    from benchmarks.peers.handover import Handover

    cpus, _ = core_halves()
    one_node = partial(baton_colocated, model, cpus)
    two_nodes = partial(baton_disaggregated, model)
    measure(Handover(prompt, pairs, seed), one_node, two_nodes, len(cpus), json_file)


def measure(
    bench: Handover, together: Start, apart: Start, num_cpus: int, json_file: Path | None
) -> None:
    """Run the pairs and report the results, also partial ones after an interruption."""
    from benchmarks.peers.handover import run

    pairs: list[TimedPair] = []

    def report(is_whole: bool) -> None:
        _report(bench, pairs, is_whole, num_cpus, json_file)

    with (
        report_on_exit(pairs, report),
        console(stderr=True).status("starting") as status,
    ):

        def on_pair(pair: TimedPair) -> None:
            pairs.append(pair)
            one, two = pair.together.first_token_ms, pair.apart.first_token_ms
            status.update(f"pair {len(pairs)}: {one:.0f} ms together, {two:.0f} ms apart")

        run(bench, together, apart, on_pair)


def _report(
    bench: Handover,
    pairs: Sequence[TimedPair],
    is_whole: bool,
    num_cpus: int,
    json_file: Path | None,
) -> None:
    from benchmarks.peers.handover import added

    found = [asdict(one) for one in added(pairs)]
    values = {
        "what": asdict(bench),
        "cpus": num_cpus,
        "is_whole": is_whole,
        "added": found,
        "pairs": [asdict(one) for one in pairs],
    }
    write_json(json_file, values)
    tokens = f"{bench.prompt_tokens} tokens, one prompt at a time"
    show_table(f"{tokens}, medians of {len(pairs)} pairs", found)
