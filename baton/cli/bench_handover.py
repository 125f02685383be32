"""`baton bench handover`."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.options import JsonFile
from baton.cli.show import console, show_table

if TYPE_CHECKING:
    from baton.bench.handover import Pair


def handover(
    model: Annotated[str, typer.Option(help="Model folder.")] = "models/demo",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    pairs: Annotated[int, typer.Option(min=1, help="Prompts; each goes to both.")] = 20,
    seed: Annotated[int, typer.Option(help="Same seed, same prompts.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """How much later a first token comes from prefill and decode nodes than from one node.

    One prompt at a time. The node that does both has the very cores that the prefill node has: half
    of this process's, so one of two. Shares are apart over together, pair by pair, less one.
    """
    from baton.bench.engines import baton_apart, baton_colocated, halves
    from baton.bench.handover import Handover, added, run

    what = Handover(prompt, pairs, seed)
    cpus, _ = halves()
    with console(stderr=True).status("starting") as status:

        def on_pair(number: int, pair: Pair) -> None:
            together, apart = pair.together.first_token_ms, pair.apart.first_token_ms
            status.update(f"pair {number + 1}: {together:.0f} ms together, {apart:.0f} ms apart")

        one_node = partial(baton_colocated, model, cpus)
        measured = run(what, one_node, partial(baton_apart, model), on_pair)
    found = [asdict(one) for one in added(measured)]
    show_table(f"{prompt} tokens, one prompt at a time, medians of {pairs} pairs", found)
    if json_file is not None:
        told = {
            "what": asdict(what),
            "cpus": len(cpus),
            "added": found,
            "pairs": [asdict(one) for one in measured],
        }
        json_file.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
