"""`baton up` in a terminal: start, Ctrl-C and failures."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from baton.client import BatonError, Client, Generation
from baton.core.sampling import SamplingParams
from tests.support.baton_command import BATON, run_baton
from tests.support.child_programs import cluster_processes_of
from tests.support.models import prompt_of
from tests.support.ports import free_port
from tests.support.terminal import CTRL_C, Terminal

FREE_PORTS = ("--port", "0", "--http-port", "0")  # no HTTP, unless a test chooses a port
OF_NODES = ("--kv-cache-memory", "4MiB", "--threads", "1", "--max-num-seqs", "32")
HTTP = re.compile(r"http://\S+/v1")
ROW = re.compile(r"│ (\S+)\s*│\s*(\d+) │ (\S+)")


def check_pasted_request(screen: Terminal) -> None:
    """Run the command that is shown next as a shell would."""
    [line] = re.findall(r"curl .*(?=\r\n)", screen.await_text("'\r\n"))
    program, *arguments = shlex.split(line)
    done = subprocess.run([program, "-sS", *arguments], capture_output=True, check=True)
    assert json.loads(done.stdout)["choices"], done.stdout


@pytest.fixture
def up(model_folder: Path) -> Callable[..., Terminal]:
    def start(*arguments: str, is_forked: bool = True) -> Terminal:
        command = [*BATON, "up", "--model", str(model_folder), *FREE_PORTS, *OF_NODES]
        variables = {"NO_COLOR": "1", "COLUMNS": "150"}
        return Terminal([*command, *arguments], variables, is_forked=is_forked)

    return start


def processes(screen: Terminal) -> dict[str, tuple[int, str]]:
    """Return the pid and the address of each process, from the summary."""
    shown = screen.await_text("┘")
    return {name: (int(pid), address) for name, pid, address in ROW.findall(shown)}


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_up_shows_its_processes_and_ends_them_on_ctrl_c(up: Callable[..., Terminal]) -> None:
    with up("--policy", "round_robin", "--max-num-seqs", "7", is_forked=False) as screen:
        screen.await_text("processes are up")
        shown = processes(screen)
        assert set(shown) == {"router", "prefill-0", "decode-0"}
        router = Path(f"/proc/{shown['router'][0]}/cmdline").read_bytes().split(b"\0")
        decode = Path(f"/proc/{shown['decode-0'][0]}/cmdline").read_bytes().split(b"\0")
        assert b"--policy=round_robin" in router
        assert b"--max-num-seqs=7" in decode
        assert b"--max-num-seqs=7" not in router
        with Client(shown["router"][1], timeout_s=60) as client:
            client.generate(prompt_of(20), Generation(SamplingParams(max_tokens=2)))

        screen.type(CTRL_C)

        screen.await_text("draining")
        screen.await_end()
        assert screen.process.returncode == 0
        assert all(is_gone(pid) for pid, _ in shown.values())


@pytest.mark.slow
def test_up_shows_router_and_nodes_with_one_model_name(
    up: Callable[..., Terminal], model_folder: Path
) -> None:
    with up() as screen:
        shown = re.findall(r"│ \S+\s*│ +\d+ │ \S+\s*│ (\S+)", screen.await_text("┘"))

    assert shown == [model_folder.name] * 3


@pytest.mark.slow
def test_further_models_embed_on_nodes_of_their_own(
    up: Callable[..., Terminal], model_folder: Path
) -> None:
    further = ("--embed", f"vectors={model_folder}", "--pooling", "mean", "--max-model-len", "64")
    with up("--http-port", str(free_port()), "--served-model-name", "writer", *further) as screen:
        shown = screen.await_text("/v1; Ctrl-C ends")
        check_pasted_request(screen)
        assert re.findall(r"│ (\S+)\s*│ +\d+ │ \S+\s*│ (.*?)\s*│", shown) == [
            ("router", "vectors, writer"),
            ("prefill-0", "writer"),
            ("decode-0", "writer"),
            ("embed-0", "vectors"),
        ]
        address = HTTP.search(shown)
        assert address is not None
        with OpenAI(base_url=address[0], api_key="none", max_retries=0) as client:
            limits = {each.id: (each.model_extra or {}) for each in client.models.list().data}
            assert {name: each["tasks"] for name, each in limits.items()} == {
                "vectors": ["embed", "token_embed"],
                "writer": ["generate"],
            }
            assert limits["vectors"]["max_model_len"] > limits["writer"]["max_model_len"] == 64
            assert client.embeddings.create(model="", input="the quick").data[0].embedding
            assert client.completions.create(model="", prompt="the quick", max_tokens=2).choices
        screen.type(CTRL_C)
        screen.await_end()
        assert screen.process.returncode == 0


def test_a_further_model_must_embed(model_folder: Path) -> None:
    for arguments, complaint in (
        ([f"--embed={model_folder}"], "names no pooling; give --pooling last, mean or cls"),
        (["--embed=name="], "--embed 'name=': write FOLDER or NAME=FOLDER"),
        (["--embed=a=x", "--embed=a=y"], "--embed is given twice for a"),
    ):
        done = run_baton("up", "--model", str(model_folder), *FREE_PORTS, *arguments)

        [line] = done.stderr.splitlines()
        assert complaint in line
        assert done.returncode != 0


@pytest.mark.slow
def test_an_http_stream_finishes_before_up_exits(up: Callable[..., Terminal]) -> None:
    with up("--prefill", "0", "--http-port", str(free_port())) as screen:
        address = HTTP.search(screen.await_text("/v1; Ctrl-C ends"))
        assert address is not None
        with OpenAI(base_url=address[0], api_key="none", max_retries=0) as client:
            stream = client.completions.create(
                model="",
                prompt=list(prompt_of(20)),
                max_tokens=300,
                stream=True,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            reported: list[Any] = [next(stream)]
            screen.type(CTRL_C)
            screen.await_text("draining")

            reported += stream

        assert sum(len(getattr(one.choices[0], "token_ids", ())) for one in reported) == 300
        assert reported[-1].choices[0].finish_reason == "length"
        screen.await_end()
        assert screen.process.returncode == 0


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_cluster_that_does_not_drain(
    up: Callable[..., Terminal],
) -> None:
    with up("--prefill", "0", "--drain-timeout-s", "3600") as screen:
        shown = processes(screen)
        with Client(shown["router"][1]) as client:
            generation = Generation(SamplingParams(max_tokens=400, ignore_eos=True))
            stream = client.stream(prompt_of(20), generation)
            next(stream)
            stopped = os.pidfd_open(shown["decode-0"][0])
            signal.pidfd_send_signal(stopped, signal.SIGSTOP)
            screen.type(CTRL_C)
            screen.await_text("draining")

            screen.type(CTRL_C)

            try:
                screen.await_end()
            finally:
                with suppress(ProcessLookupError):  # else it stays, whatever failed
                    signal.pidfd_send_signal(stopped, signal.SIGKILL)
                os.close(stopped)
            stream.close()
        assert screen.process.returncode == 130
        assert all(is_gone(pid) for pid, _ in shown.values())


@pytest.mark.parametrize("is_forked", [True, False])
def test_ctrl_c_while_it_loads_ends_it_at_once(
    up: Callable[..., Terminal], is_forked: bool
) -> None:
    with up(is_forked=is_forked) as screen:
        screen.await_text("processes are up")

        screen.type(CTRL_C)

        shown = screen.await_end()
        assert "Traceback" not in shown
        assert "serving on" not in shown
        assert screen.process.returncode == 130


@pytest.mark.slow
def test_up_reports_a_lost_node_and_exits_when_no_decode_node_is_left(
    up: Callable[..., Terminal],
) -> None:
    with up("--prefill", "0", "--decode", "2") as screen:
        shown = processes(screen)
        os.kill(shown["decode-0"][0], signal.SIGKILL)
        screen.await_text("decode-0 ended with code -9; --restart would restart it")

        os.kill(shown["decode-1"][0], signal.SIGKILL)

        screen.await_text(
            "baton: error: decode-1 ended with code -9; the cluster cannot serve without it"
        )
        screen.await_end()
        assert screen.process.returncode == 1
        assert all(is_gone(pid) for pid, _ in shown.values())


@pytest.mark.slow
def test_up_reports_what_no_longer_works_without_its_prefill_node(
    up: Callable[..., Terminal],
) -> None:
    with up() as screen:
        shown = processes(screen)
        os.kill(shown["prefill-0"][0], signal.SIGKILL)

        screen.await_text("no prefill node is left: decode nodes compute the prompts")

        with Client(shown["router"][1], timeout_s=60) as client:
            client.generate(prompt_of(20), Generation(SamplingParams(max_tokens=2)))


@pytest.mark.slow
@pytest.mark.parametrize("is_forked", [True, False])
def test_a_node_that_dies_is_restarted_at_its_address(
    up: Callable[..., Terminal], is_forked: bool
) -> None:
    with up("--prefill", "0", "--restart", is_forked=is_forked) as screen:
        shown = processes(screen)
        pid, address = shown["decode-0"]
        os.kill(pid, signal.SIGKILL)

        screen.await_text("decode-0 ended with code -9; restarting it in 1 s (1 of 5)")
        screen.await_text(f"decode-0 was restarted on {address}")
        screen.await_text("decode-0 joined from")
        screen.await_text("serving on")

        with Client(shown["router"][1], timeout_s=60) as client:
            client.generate(prompt_of(20), Generation(SamplingParams(max_tokens=2)))
        children = cluster_processes_of(screen.process.pid)
        screen.type(CTRL_C)
        screen.await_end()
        assert screen.process.returncode == 0
        assert len(children) == (2 if is_forked else 3)  # with the fork server
        assert all(is_gone(one) for one in children)


@pytest.mark.slow
def test_ctrl_c_before_a_restart_is_due_starts_nothing(up: Callable[..., Terminal]) -> None:
    with up("--prefill", "0", "--decode", "2", "--restart") as screen:
        shown = processes(screen)
        os.kill(shown["decode-0"][0], signal.SIGKILL)
        screen.await_text("restarting it in 1 s")

        screen.type(CTRL_C)

        screen.await_text("draining")
        assert "was restarted" not in screen.await_end()
        assert screen.process.returncode == 0
        assert all(is_gone(pid) for pid, _ in shown.values())


@pytest.mark.slow
def test_a_node_that_dies_while_the_cluster_drains_is_not_restarted(
    up: Callable[..., Terminal],
) -> None:
    with up("--prefill", "0", "--restart") as screen:
        shown = processes(screen)
        with Client(shown["router"][1]) as client:
            generation = Generation(SamplingParams(max_tokens=400, ignore_eos=True))
            stream = client.stream(prompt_of(20), generation)
            next(stream)
            os.kill(shown["decode-0"][0], signal.SIGSTOP)
            screen.type(CTRL_C)
            screen.await_text("draining")

            os.kill(shown["decode-0"][0], signal.SIGKILL)

            with pytest.raises(BatonError):
                list(stream)
        assert "restart" not in screen.await_end()
        assert all(is_gone(pid) for pid, _ in shown.values())


@pytest.mark.slow
def test_a_node_stopped_by_sigterm_is_not_restarted(up: Callable[..., Terminal]) -> None:
    with up("--prefill", "0", "--decode", "2", "--restart") as screen:
        shown = processes(screen)
        os.kill(shown["decode-0"][0], signal.SIGTERM)

        screen.await_text("decode-0 ended with code 0; it is not restarted: it was told to end")


@pytest.mark.slow
def test_the_serving_address_is_the_last_line_once_all_nodes_have_joined(
    up: Callable[..., Terminal],
) -> None:
    with up("--decode", "2") as screen:
        shown = ""
        nodes = {"prefill-0", "decode-0", "decode-1"}
        while not all(f"{name} joined from" in shown for name in nodes):
            shown += screen.await_text(" joined from ")

        screen.await_text("serving on ")


@pytest.mark.parametrize(
    ("option", "zero"), [("--port", "--port 0 for any"), ("--http-port", "--http-port 0 for none")]
)
def test_a_busy_port_is_reported_before_anything_is_loaded(
    model_folder: Path, option: str, zero: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = (*FREE_PORTS, option, str(port))
        done = run_baton("up", "--model", str(model_folder), *arguments)

    assert done.stderr == (
        f"baton: error: port {port} of 127.0.0.1 is in use; choose another {option}, or {zero}\n"
    )
    assert (done.returncode, done.stdout) == (1, "")


def test_the_settings_file_may_set_the_http_port_for_routers_alone(
    model_folder: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = tmp_path / "baton.toml"
        settings.write_text(f"[up]\nport = 0\n[serve.router]\nhttp_port = {port}\n")

        done = run_baton("up", "--model", str(model_folder), "--config", str(settings))

    assert f"port {port} of 127.0.0.1 is in use" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--policy", "luck"], "luck"),
        (["--kv-lease-s", "3"], "kv-lease-s is not an option of the command line"),
        (["--kv-transport", "byte"], "--kv-transport 'byte'"),
        (["--tool-parser", "other"], "--tool-parser 'other'"),
    ],
)
def test_wrong_options_of_nodes_and_router_are_reported_before_anything_is_loaded(
    arguments: list[str], complaint: str
) -> None:
    done = run_baton("up", "--model", "no-such-model", *arguments)

    [line] = done.stderr.splitlines()
    assert line.startswith("baton: error: ")
    assert complaint in line
    assert done.returncode == 2


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json"])
def test_a_broken_model_folder_is_reported_before_anything_is_started(
    model_folder: Path, tmp_path: Path, name: str
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / name).write_text("{")

    done = run_baton("up", "--model", str(folder), *FREE_PORTS)

    [line] = done.stderr.splitlines()
    assert re.match(rf"baton: error: \S+{name} cannot be read", line)
    assert done.returncode != 0


def test_a_failed_start_ends_with_the_reason(model_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"")

    done = run_baton("up", "--model", str(folder), *FREE_PORTS)

    last = done.stderr.splitlines()[-1]
    assert re.match(r"baton: error: (prefill|decode)-0 did not start: ", last)
    assert "model.safetensors is corrupt" in last
    assert done.stderr.count("model.safetensors is corrupt") == 1
    assert done.returncode == 1


def test_a_broken_tokenizer_ends_the_start_with_the_reason(
    model_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "tokenizer.json").write_text("{")

    done = run_baton("up", "--model", str(folder), *FREE_PORTS)

    last = done.stderr.splitlines()[-1]
    assert re.match(r"baton: error: router did not start: \S+tokenizer.json cannot be read", last)
    assert done.returncode == 1
