"""Options of the command line: parsing, defaults and checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from baton.cli import make_app
from baton.cli.commands.cluster import GIVEN, ClusterSize, UpOptions, cluster_options, up
from baton.cli.signatures import forwarded_arguments, inherit_options, parameters_of
from baton.cluster import ClusterOptions
from baton.core.errors import InvalidConfig
from baton.core.legs import LegKind
from baton.core.options import build_config
from baton.demo_model import demo_model
from baton.engine.scheduler.config import LoadFailurePolicy
from baton.engine.scheduler.config import SchedulingPolicy as SchedulingPolicy
from baton.node.cpus import parse_cpus
from baton.node.options import NodeOptions
from baton.router.__main__ import node_discovery
from baton.router.discovery.sources import DnsName, FixedNode, parse_sources
from baton.router.model_options import ByName, ModelOptions, parse_models
from baton.router.options import RouterOptions
from baton.rpc.server import parse_announcement
from baton.telemetry.options import TRACE_DIR_VARIABLE, TelemetryOptions
from tests.support.command_lines import invoke


def node_options(model: str, **given: object) -> NodeOptions:
    return build_config(NodeOptions, {"model": model, **given})


def test_cpu_lists_have_numbers_and_ranges() -> None:
    assert parse_cpus("0-3,6") == (0, 1, 2, 3, 6)
    assert parse_cpus("") == ()


@pytest.mark.parametrize("written", ["a", "1-", "-1", "1-b", "1;2"])
def test_malformed_cpu_lists_are_refused(written: str) -> None:
    with pytest.raises(InvalidConfig, match="--cpus"):
        parse_cpus(written)


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "serve", "--router", "127.0.0.1:1", "--json"],
        ["trace", "show", "--html"],
    ],
)
@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("nowhere/file", "there is no folder"),
        (".", "is a folder; name a file"),
        ("/proc/file", "cannot be written to"),  # not by root either
        (f"{'x' * 300}", "cannot be written to"),
    ],
)
def test_the_output_path_is_checked_before_the_benchmark(
    arguments: list[str], path: str, complaint: str, tmp_path: Path
) -> None:
    ended = invoke(make_app(), [*arguments, str(tmp_path / path)], env={"COLUMNS": "1000"})

    assert ended.exit_code == 2
    assert complaint in ended.output


def test_up_and_run_default_to_the_demo_model() -> None:
    for command in ("up", "run"):
        ended = invoke(make_app(), [command, "--show-config"], env={"COLUMNS": "200"})
        assert ended.exit_code == 0, ended.output

    assert (Path(demo_model()) / "config.json").exists()


def test_up_serves_http_on_loopback_by_default() -> None:
    options = build_config(UpOptions, {})

    assert (options.host, options.http_port) == ("127.0.0.1", 8000)


@pytest.mark.parametrize("flag", ["--address", "--router"])
def test_bench_accepts_the_common_and_the_former_router_option(flag: str) -> None:
    load = ["bench", "serve", flag, "http://127.0.0.1:1", "--requests", "1"]
    ended = invoke(make_app(), load)

    assert isinstance(ended.exception, InvalidConfig)
    assert "is a URL" in str(ended.exception)


@pytest.mark.parametrize("written", ["none", "off", "None"])
def test_tracing_is_disabled_by_off_and_by_none(written: str) -> None:
    assert build_config(TelemetryOptions, {"trace_dir": written}).trace_dir is None
    assert build_config(TelemetryOptions, {"trace_dir": "./none"}).trace_dir == Path("none")

    ended = invoke(make_app(), ["trace", "list", "--trace-dir", written])

    assert isinstance(ended.exception, InvalidConfig)
    assert "keeps no traces" in str(ended.exception)


def test_the_plot_folder_is_checked_before_the_load(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in ("file", "file/below"):
        load = ["bench", "serve", "--router", "127.0.0.1:1", "--plots", str(tmp_path / folder)]
        ended = invoke(make_app(), load, env={"COLUMNS": "1000"})

        assert ended.exit_code == 2
        assert f"{tmp_path / 'file'} is not a folder" in ended.output


@pytest.mark.parametrize("written", ["x", "99999", "-1", "1,,70000"])
def test_the_doctor_refuses_invalid_ports(written: str) -> None:
    ended = invoke(make_app(), ["doctor", "--ports", written])

    assert isinstance(ended.exception, InvalidConfig)
    assert "write it like 50051,50061" in str(ended.exception)


def test_only_the_announcement_line_is_parsed_as_an_address() -> None:
    assert parse_announcement("baton ready: decode 127.0.0.1:5\n") == ("decode", "127.0.0.1:5")
    assert parse_announcement("INFO ready\n") is None


def test_up_has_the_options_of_nodes_and_router_except_those_it_sets_itself() -> None:
    offered = {one.name for one in parameters_of(up)}

    of_nodes = {one.name for one in parameters_of(NodeOptions)}
    of_router = {one.name for one in parameters_of(RouterOptions)}
    assert offered > (of_nodes | of_router) - set(GIVEN)
    assert not offered & {"node_id", "prefill_nodes", "decode_nodes"}


def test_up_passes_only_given_options_and_only_to_processes_that_have_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(TRACE_DIR_VARIABLE)  # the tests' own
    passed: list[tuple[str, ...]] = []

    @inherit_options(NodeOptions, RouterOptions, without=GIVEN)
    def command(context: typer.Context, **_given: object) -> None:
        passed.append(forwarded_arguments(context, NodeOptions, without=GIVEN))
        passed.append(forwarded_arguments(context, RouterOptions, without=GIVEN))

    app = typer.Typer()
    app.command()(command)
    run = typer.main.get_command(app).main
    run(
        ["--no-kv-verify", "--kv-tls", "^cma", "--policy", "round_robin", "--kv-lease-s", "2"],
        standalone_mode=False,
    )

    assert passed == [
        ("--kv-tls=^cma", "--no-kv-verify", "--kv-lease-s=2.0"),
        ("--policy=round_robin",),
    ]


def test_up_divides_cores_among_nodes_and_their_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    passed: list[ClusterOptions] = []
    app = typer.Typer()

    @app.command()
    @inherit_options(UpOptions, NodeOptions, RouterOptions, without=GIVEN)
    def command(context: typer.Context, **given: Any) -> None:
        embedders = [ByName("folder", "embedder")]
        options = cluster_options(context, "m", ClusterSize(), embedders, without=GIVEN)
        passed.append(options)

    for arguments in ([], ["--tensor-parallel-size=2", "--enable-expert-parallel"]):
        app(arguments, standalone_mode=False)

    assert [options.node_arguments[0] for options in passed] == ["--threads=5", "--threads=3"]
    assert "--enable-expert-parallel" in passed[1].node_arguments
    assert not [each for each in passed[1].embedder_arguments if "parallel" in each]


def test_lease_and_timeout_options_reach_the_kv_worker() -> None:
    options = node_options("m", kv_lease_s=2.0, kv_silence_s=3.0)

    receiver = options.kv_worker.receiver
    assert (receiver.lease_s, receiver.silence_s) == (2.0, 3.0)
    with pytest.raises(InvalidConfig, match=r"kv-lease-s is 0\.0; it must be above 0"):
        node_options("m", kv_lease_s=0.0)


def test_the_stuck_timeout_must_exceed_the_heartbeat_interval() -> None:
    assert node_options("m", stuck_after_s=7.0).stuck_after_s == 7.0
    with pytest.raises(InvalidConfig, match="stuck-after-s"):
        node_options("m", stuck_after_s=1.0)


def test_discovery_options_set_the_sources_and_the_interval() -> None:
    options = RouterOptions(parse_sources("dns:///d:1"), parse_sources("a:1"), find_every_s=2.0)

    discovery = node_discovery(options)
    assert discovery.leg_by_source == {
        DnsName("d", 1): LegKind.DECODE,
        FixedNode("a:1"): LegKind.PREFILL,
    }
    assert discovery.every_s == 2.0
    with pytest.raises(InvalidConfig, match="--decode-nodes"):
        RouterOptions(())
    with pytest.raises(InvalidConfig, match="find-every-s"):
        RouterOptions(parse_sources("d:1"), find_every_s=0.0)
    two = ModelOptions(parse_models(["a=x", "b=y"]))
    with pytest.raises(InvalidConfig, match="--smg is for one --model"):
        RouterOptions(parse_sources("d:1"), models=two, smg=True)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_kv_cache_is_sized_by_free_memory_by_default(device: str) -> None:
    runner = node_options(model="m", device=device).runner
    reported = node_options(model="m", kv_cache_memory="2GiB").runner

    assert (runner.kv_cache_bytes, runner.kv_cache_share) == (None, None)
    assert reported.kv_cache_bytes == 2 << 30


def test_graphs_are_captured_unless_eager_steps_are_enforced() -> None:
    assert not node_options("m").runner.enforce_eager
    assert node_options("m", enforce_eager=True).runner.enforce_eager


@pytest.mark.parametrize(
    "settings", [{"kernels": "torch"}, {"device": "cuda"}, {"device": "cuda:1", "kernels": "torch"}]
)
def test_torch_cannot_be_batch_invariant(settings: dict[str, str]) -> None:
    with pytest.raises(InvalidConfig, match="--batch-invariant: plain torch"):
        node_options("m", batch_invariant=True, **settings)


@pytest.mark.parametrize("settings", [{}, {"device": "cuda", "kernels": "triton"}])
def test_own_kernels_can_be_batch_invariant(settings: dict[str, str]) -> None:
    assert node_options("m", batch_invariant=True, **settings).runner.batch_invariant


def test_nodes_schedule_by_priority_by_default() -> None:
    assert node_options("m").scheduling.policy is SchedulingPolicy.PRIORITY
    assert node_options("m", scheduling_policy="fcfs").scheduling.policy is SchedulingPolicy.FCFS
    with pytest.raises(InvalidConfig, match="scheduling-policy 'lifo': choose one of fcfs"):
        node_options("m", scheduling_policy="lifo")


def test_every_scheduler_feature_has_an_option() -> None:
    as_it_is = node_options("m").scheduling
    changed = node_options(
        "m",
        kv_load_failure_policy="fail",
        remote_headroom_blocks=0,
        max_num_partial_prefills=3,
        max_long_partial_prefills=2,
    ).scheduling
    whole = node_options("m", chunked_prefill=False).scheduling

    assert as_it_is.kv_load_failure_policy is LoadFailurePolicy.RECOMPUTE
    assert (as_it_is.remote_headroom_blocks, as_it_is.max_num_partial_prefills) == (1, None)
    assert (as_it_is.long_prefill_token_threshold, as_it_is.max_long_partial_prefills) == (512, 1)
    assert changed.kv_load_failure_policy is LoadFailurePolicy.FAIL
    assert (changed.remote_headroom_blocks, changed.max_num_partial_prefills) == (0, 3)
    assert changed.max_long_partial_prefills == 2
    assert (
        node_options("m", max_long_partial_prefills=0).scheduling.max_long_partial_prefills is None
    )
    assert not whole.enable_chunked_prefill
    assert (whole.long_prefill_token_threshold, whole.max_long_partial_prefills) == (0, None)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (
            {"kv_load_failure_policy": "retry"},
            "kv-load-failure-policy 'retry': .*recompute, fail",
        ),
        ({"remote_headroom_blocks": -1}, "remote-headroom-blocks is -1"),
        ({"chunked_prefill": False, "long_prefill_token_threshold": 8}, "enable_chunked_prefill"),
        ({"chunked_prefill": False, "target_step_ms": 9.0}, "enable_chunked_prefill"),
        ({"long_prefill_token_threshold": 0, "max_long_partial_prefills": 1}, "threshold"),
    ],
)
def test_incompatible_switches_are_refused_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidConfig, match=named):
        node_options("m", **given)
