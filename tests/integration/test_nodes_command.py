"""`baton nodes` on a cluster of real processes."""

from __future__ import annotations

import json

from baton.client import Client, Generation
from baton.cluster import LocalCluster
from baton.core.sampling import SamplingParams
from tests.support.baton_command import BATON, run_baton
from tests.support.models import prompt_of
from tests.support.nodes import await_load, is_busy, load_at
from tests.support.terminal import CTRL_C, Terminal
from tests.support.waits import await_value

COUNTED = ("num_prompt_tokens", "num_hit_tokens", "num_sampled_tokens")


def look(cluster: LocalCluster) -> list[dict[str, object]]:
    done = run_baton("nodes", "--once", "--json", "--address", cluster.address)
    assert done.returncode == 0, done.stderr
    nodes: list[dict[str, object]] = json.loads(done.stdout)["nodes"]
    return nodes


def number(node: dict[str, object], name: str) -> int:
    value = node[name]
    assert isinstance(value, int)
    return value


def look_at_idle(cluster: LocalCluster) -> list[dict[str, object]]:
    """Return the router's list once nodes are idle and it has their last reports."""
    for child in cluster.prefills + cluster.decodes:
        await_load(child.address, lambda load: not is_busy(load))
    return await_value(lambda: look(cluster), has_current_totals, what="current totals of nodes")


def has_current_totals(nodes: list[dict[str, object]]) -> bool:
    totals = {str(node["address"]): load_at(str(node["address"])).totals for node in nodes}
    return all(
        number(node, name) == getattr(totals[str(node["address"])], name)
        for node in nodes
        for name in COUNTED
    )


def test_the_nodes_command_lists_nodes_and_their_work(
    cluster: LocalCluster, client: Client
) -> None:
    before = look_at_idle(cluster)  # requests of other tests may have just ended
    client.generate(
        prompt_of(33), Generation(SamplingParams(max_tokens=9, ignore_eos=True), cache_salt="new")
    )

    after = look_at_idle(cluster)

    assert [(node["legs"], node["state"], node["address"]) for node in after] == [
        (["encode", "prefill"], "ready", cluster.prefills[0].address),
        (["encode", "decode"], "ready", cluster.decodes[0].address),
    ]
    assert {node["kernels"] for node in after} == {"torch"}  # of a model in float32
    changes = [
        {name: number(now, name) - number(then, name) for name in COUNTED}
        for then, now in zip(before, after, strict=True)
    ]
    prefill, decode = changes
    assert prefill == {"num_prompt_tokens": 33, "num_hit_tokens": 0, "num_sampled_tokens": 1}
    assert decode["num_sampled_tokens"] == 8


def test_the_live_table_shows_each_node_and_exits_cleanly_on_ctrl_c(cluster: LocalCluster) -> None:
    command = [*BATON, "nodes", "--interval", "0.2", "--address", cluster.address]
    with Terminal(command, {"COLUMNS": "200", "NO_COLOR": "1"}) as screen:
        screen.await_text("2 of 2 nodes ready")
        shown = screen.await_text("decode-0/")
        assert "prefill-0/" in shown
        screen.await_text("2 of 2 nodes ready")  # redrawn

        screen.type(CTRL_C)

        assert "Traceback" not in screen.await_end()
        assert screen.process.returncode == 0


def test_the_nodes_command_reports_a_missing_router_in_one_line() -> None:
    done = run_baton("nodes", "--once", "--address", "127.0.0.1:1")

    [line] = done.stderr.splitlines()
    assert line.startswith("baton: error: 127.0.0.1:1 cannot be reached")
    assert done.returncode == 1
