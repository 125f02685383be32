"""Lifecycle of cluster processes: start, drain, shutdown and failure."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from baton.client import AsyncClient, BatonError, Client, Generation
from baton.cluster import Child, ClusterFailed, ClusterOptions, LocalCluster
from baton.core.ids import HandoffId, NodeId, Peer
from baton.core.legs import LegKind
from baton.core.request import EngineRequest, ReceiveKv
from baton.core.sampling import SamplingParams
from baton.rpc.messages.calls import leg_order, node_request_id
from baton.rpc.node_info import NodeLoad
from baton.rpc.status import remote_error
from baton.v1 import inference_pb2, inference_pb2_grpc, node_pb2, node_pb2_grpc
from tests.support.baton_command import BATON, run_baton
from tests.support.child_programs import cluster_processes_of, running_program
from tests.support.client_load import PATIENCE_S, ClientAnswer, ClientRequest, stream_answer
from tests.support.health import health_of
from tests.support.models import prompt_of, reference_choices
from tests.support.nodes import await_load, drain, is_busy, kill_the_writer
from tests.support.suspended_processes import suspended
from tests.support.waits import until_answer

MakeOptions = Callable[..., ClusterOptions]


def greedy(max_tokens: int) -> Generation:
    return Generation(sampling(max_tokens))


def sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def test_a_running_request_finishes_after_a_sigterm_to_every_process(
    cluster_options: MakeOptions, model_folder: Path
) -> None:
    prompt = prompt_of(33)
    with LocalCluster(cluster_options()) as cluster, Client(cluster.address) as client:
        stream = client.stream(prompt, greedy(200))
        token_ids: list[int] = []
        while len(token_ids) < 2:  # the decode node samples the second one
            token_ids += next(stream).token_ids
        for child in cluster.children:
            child.request_stop()

        token_ids += [token_id for chunk in stream for token_id in chunk.token_ids]
    assert token_ids == reference_choices(model_folder, prompt, token_ids, 200)
    assert [child.process.returncode for child in cluster.children] == [0, 0, 0]


def test_without_its_prefill_node_a_cluster_answers_from_decode_alone_and_reports_it(
    cluster_options: MakeOptions, model_folder: Path
) -> None:
    prompt = prompt_of(50)
    with LocalCluster(cluster_options()) as cluster, Client(cluster.address) as client:
        client.generate(prompt_of(20), greedy(2))
        [prefill] = cluster.prefills
        prefill.process.kill()
        prefill.process.wait()

        answer = client.generate(prompt, greedy(12))

    assert answer.finish is not None
    served = answer.finish.served
    assert answer.token_ids == reference_choices(model_folder, prompt, answer.token_ids, 12)
    assert (served.is_prefill_remote, served.kv_bytes) == (False, 0)
    assert served.prompt_tokens_computed_on_decode == 50
    assert served.prefill_reason
    assert [child.process.returncode for child in (cluster.router, *cluster.decodes)] == [0, 0]


def test_a_stream_continues_on_another_node_when_its_decode_node_is_killed(
    cluster_options: MakeOptions, model_folder: Path
) -> None:
    prompt = prompt_of(40)
    options = cluster_options(num_decode=2)
    with LocalCluster(options) as cluster, Client(cluster.address) as client:
        stream = client.stream(prompt, greedy(300))
        chunks = [next(stream), next(stream)]
        with suspended(*cluster.decodes):  # or the answer may be whole before that
            serving = kill_the_writer(cluster)

        chunks += stream

    token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
    finish = chunks[-1].finish
    assert token_ids == reference_choices(model_folder, prompt, token_ids, 300)
    assert finish is not None
    assert finish.served.attempts == 2
    assert finish.served.decode_node != serving.name


@pytest.mark.slow
def test_a_stream_waits_for_its_only_decode_node_to_restart_and_continues(
    cluster_options: MakeOptions, model_folder: Path
) -> None:
    prompt = prompt_of(40)
    options = cluster_options(num_prefill=0, router_arguments=("--node-patience-s", "60"))
    with (
        LocalCluster(options) as cluster,
        Client(cluster.address) as client,
        health_of(cluster.address) as health,
    ):
        stream = client.stream(prompt, greedy(200))
        chunks = [next(stream), next(stream)]
        [decode] = cluster.decodes

        decode.process.kill()
        decode.process.wait()
        reported = [next(health), next(health)]
        port = int(decode.address.rpartition(":")[2])
        cluster.start_node("decode", name=decode.name, port=port)
        reported.append(next(health))

        chunks += stream

    assert reported == ["SERVING", "NOT_SERVING", "SERVING"]
    token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
    assert token_ids == reference_choices(model_folder, prompt, token_ids, 200)


def test_a_decode_node_works_alone_and_without_any_a_request_is_refused_by_name(
    cluster_options: MakeOptions,
) -> None:
    options = cluster_options(num_prefill=0, router_arguments=("--node-patience-s", "0"))
    with LocalCluster(options) as cluster, Client(cluster.address) as client:
        [decode] = cluster.decodes
        alone = client.generate(prompt_of(5), greedy(2))
        drain(decode.address)
        decode.process.wait(timeout=30)

        with pytest.raises(BatonError) as refusal:
            client.generate(prompt_of(5), greedy(2))

    assert alone.finish is not None
    assert alone.finish.served.prefill_reason
    assert decode.process.returncode == 0
    assert refusal.value.reason == "NO_NODES"


def test_the_router_starts_while_nodes_load_and_the_first_failure_ends_all(
    cluster_options: MakeOptions,
) -> None:
    listening: list[str] = []

    def kill_a_node(child: Child) -> None:
        listening.append(child.name)
        cluster.prefills[0].process.kill()

    never_listens = ("tests.support.idle_program",)
    options = replace(cluster_options(), node_program=never_listens, on_up=kill_a_node)
    cluster = LocalCluster(options)

    with pytest.raises(ClusterFailed, match="prefill-0 ended with code -9 at start"), cluster:
        pass

    assert listening == ["router"]
    assert all(child.process.returncode is not None for child in cluster.children)


@pytest.mark.parametrize("is_forked", [True, False])
def test_no_process_and_no_file_outlives_a_killed_parent(
    model_folder: Path, is_forked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    command = [*BATON, "up", "--model", str(model_folder), "--port", "0", "--http-port", "0"]
    with running_program(command, is_forked=is_forked) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline().startswith("serving on")
        children = [os.pidfd_open(pid) for pid in cluster_processes_of(parent.pid)]

        parent.kill()

        ended = select.poll()
        for child in children:
            ended.register(child, select.POLLIN)
        for _ in range(len(children)):
            [(child, _event), *_rest] = ended.poll(30_000)
            ended.unregister(child)
            os.close(child)
    assert len(children) == (3 if is_forked else 4)  # with the fork server
    assert not list(tmp_path.iterdir())


def test_under_load_one_signal_drains_and_a_second_one_ends_at_once(
    cluster_options: MakeOptions, model_folder: Path
) -> None:
    requests = [ClientRequest(prompt_of(20 + number, seed=70), greedy(400)) for number in range(6)]

    async def scenario(
        cluster: LocalCluster,
    ) -> tuple[list[ClientAnswer], BatonError, list[grpc.StatusCode]]:
        async with AsyncClient(cluster.address, timeout_s=PATIENCE_S) as client:
            asking = [asyncio.ensure_future(stream_answer(client, request)) for request in requests]
            await asyncio.to_thread(
                await_load, cluster.decodes[0].address, are_running(len(requests))
            )
            with suspended(*cluster.decodes):  # or the answers, and the router, may end before
                await asyncio.to_thread(drain_router, cluster)
                with pytest.raises(BatonError) as refusal:
                    await client.generate(prompt_of(5), greedy(2))
                late = [asyncio.ensure_future(last_code(cluster.address)) for _ in range(8)]
            answers = await asyncio.gather(*asking)
            return answers, refusal.value, await asyncio.gather(*late)

    with LocalCluster(cluster_options()) as cluster:
        reported, refusal, last_codes = asyncio.run(scenario(cluster))
        code = cluster.router.stop()
        health, code_of_second = end_by_two_signals(cluster.prefills[0], cluster.decodes[0])

    assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    for one in reported:
        token_ids = list(one.token_ids)
        assert token_ids == reference_choices(model_folder, one.request.prompt, token_ids, 400)
    assert last_codes == [grpc.StatusCode.UNAVAILABLE] * len(last_codes)
    assert code == 0
    assert [child.log for child in cluster.children if "Traceback" in child.log] == []
    assert (health, code_of_second) == (["SERVING", "NOT_SERVING"], -signal.SIGTERM)


async def last_code(address: str) -> grpc.StatusCode:
    """Call a draining router again and again. Return the first status that is not its refusal."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.GenerateRequest(text="a")

        async def refusal() -> tuple[grpc.StatusCode, str | None]:
            try:
                async for _ in stub.Generate(request, timeout=PATIENCE_S):
                    raise AssertionError("a draining router has answered")
            except grpc.aio.AioRpcError as error:
                return error.code(), remote_error(error).reason
            return grpc.StatusCode.OK, None

        code, _ = await until_answer(refusal, lambda refused: refused[1] != "DRAINING")
    return code


def are_running(num_requests: int) -> Callable[[NodeLoad], bool]:
    return lambda load: load.num_running == num_requests


def drain_router(cluster: LocalCluster) -> None:
    """Request a drain, and wait until the router reports NOT_SERVING."""
    with health_of(cluster.address) as health:
        reported = [next(health)]
        cluster.router.request_stop()
        reported.append(next(health))
    assert reported == ["SERVING", "NOT_SERVING"]


def end_by_two_signals(prefill: Child, decode: Child) -> tuple[list[str], int]:
    """Send two signals to a node with a request that cannot end: its prefill node is stopped."""
    with (
        suspended(prefill),
        health_of(decode.address) as health,
        grpc.insecure_channel(decode.address) as channel,
    ):
        reported = [next(health)]
        call = node_pb2_grpc.LegServiceStub(channel).Serve(iter([a_decode_request(prefill)]))
        await_load(decode.address, is_busy)
        decode.process.send_signal(signal.SIGTERM)
        reported.append(next(health))
        await_load(decode.address, lambda load: load.is_draining and is_busy(load))
        decode.process.send_signal(signal.SIGTERM)
        code = decode.process.wait(PATIENCE_S)
        call.cancel()
    return reported, code


def a_decode_request(prefill: Child) -> node_pb2.ServeRequest:
    handoff_id, peer = HandoffId("a", 1), Peer(NodeId(prefill.name), prefill.address)
    request = EngineRequest(
        node_request_id(handoff_id),
        prompt_of(20),
        sampling(5),
        seed=0,
        receive_from=ReceiveKv(handoff_id, peer),
    )
    order = leg_order(LegKind.DECODE, request)
    return node_pb2.ServeRequest(call=1, start=order)


@pytest.mark.parametrize(
    "command",
    [
        ["router", "--decode-nodes", "127.0.0.1:1"],
        ["decode", "--model", "not looked at before the port is"],
    ],
)
def test_a_busy_port_is_reported_in_one_line_with_exit_code_1(command: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        arguments = ["serve", *command, "--port", port]

        ended = run_baton(*arguments)

    assert ended.returncode == 1
    assert ended.stderr == (
        f"baton: error: port {port} of 127.0.0.1 is in use; choose another --port, "
        "or --port 0 for any\n"
    )


def test_unavailable_cores_are_refused_with_the_available_ones() -> None:
    there = ",".join(map(str, sorted(os.sched_getaffinity(0))))

    ended = run_baton("serve", "decode", "--model", "m", "--cpus", "1022-1023")

    assert ended.returncode == 2
    assert ended.stderr == (
        f"baton: error: --cpus 1022,1023: not all are available; choose from {there}\n"
    )


def test_an_address_of_another_machine_is_reported_in_one_line() -> None:
    arguments = ["serve", "router", "--decode-nodes", "127.0.0.1:1", "--host", "192.0.2.1"]

    ended = run_baton(*arguments)

    assert ended.returncode == 1
    assert ended.stderr == (
        "baton: error: cannot listen on 192.0.2.1:50051: Cannot assign requested address\n"
    )
