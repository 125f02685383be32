"""`baton generate` and `baton chat` in a terminal and in pipes, with a real cluster."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from baton.client import Client
from baton.cluster import LocalCluster
from baton.rpc.server import parse_announcement
from tests.support.baton_command import BATON, run_baton
from tests.support.child_programs import running_program
from tests.support.scripted_router import WAIT_S, scripted_router
from tests.support.terminal import CTRL_C, CTRL_D, Terminal

NOBODY = "127.0.0.1:1"  # where no router is


def test_ctrl_c_cancels_the_answer_and_not_the_chat() -> None:
    with (
        scripted_router() as router,
        Terminal([*BATON, "chat", "--address", router.address]) as screen,
    ):
        screen.await_text("> ")
        screen.type("first\n")
        first = router.next_request()
        first.send_text("\x1b[2Ja long ")  # a screen that a model must not clear
        assert "\x1b[2J" not in screen.await_text("a long")

        screen.type(CTRL_C)
        screen.await_text("(stopped)")
        screen.await_text("> ")

        assert first.was_cancelled.wait(WAIT_S)
        screen.type("second\n")
        second = router.next_request()
        second.send_text("well")
        second.end()
        screen.await_text("well")
        assert second.turns == [
            ("user", "first"),
            ("assistant", "\x1b[2Ja long "),
            ("user", "second"),
        ]
        screen.await_text("> ")
        # A signal between the prompt and the first look at the keyboard waits for a key.
        screen.type(CTRL_C)
        screen.type("\n")
        screen.await_text("Ctrl-D or /exit quits")
        screen.await_text("> ")
        screen.type(CTRL_D)
        screen.await_end()
        assert screen.process.returncode == 0


def test_chat_commands_change_the_request() -> None:
    with (
        scripted_router("1", "2") as router,
        Terminal([*BATON, "chat", "--address", router.address]) as screen,
    ):
        screen.await_text("> ")
        screen.type("/nonsense\n")
        screen.await_text("no command /nonsense")
        for line in ("/system Be brief.", "one"):
            screen.await_text("> ")
            screen.type(f"{line}\n")
        assert router.next_request().turns == [("system", "Be brief."), ("user", "one")]

        screen.await_text("1\r\n")
        for line in ("/reset", "//two"):
            screen.await_text("> ")
            screen.type(f"{line}\n")
        assert router.next_request().turns == [("system", "Be brief."), ("user", "/two")]

        screen.await_text("2\r\n")
        screen.await_text("> ")
        screen.type("/exit\n")
        screen.await_end()
        assert screen.process.returncode == 0


def test_a_chat_continues_after_a_failed_answer(cluster: LocalCluster) -> None:
    with Terminal([*BATON, "chat", "--address", cluster.address, "--max-tokens", "2"]) as screen:
        screen.await_text("> ")
        screen.type("fox " * 700 + "\n")  # more than the model's context
        screen.await_text("baton: error: ")
        screen.await_text("> ")
        screen.type("the fox\n")
        screen.await_text("> ")
        screen.type(CTRL_D)
        assert "error" not in screen.await_end()


def test_with_piped_input_each_line_is_a_turn_and_only_answers_are_printed(
    cluster: LocalCluster, client: Client
) -> None:
    arguments = ("chat", "--address", cluster.address, "--max-tokens", "5", "--temperature", "0")
    piped = run_baton(*arguments, "--ignore-eos", piped="the quick\n\nbrown fox\n")

    assert piped.returncode == 0
    assert piped.stderr.count("(cut off after --max-tokens 5; ask it to go on, or allow more)") == 2
    alone = run_baton(*arguments, "--ignore-eos", piped="the quick\n")
    assert piped.stdout.startswith(alone.stdout)
    assert len(piped.stdout) > len(alone.stdout)


def test_a_model_without_a_chat_template_can_chat_in_plain_dialogue() -> None:
    with scripted_router(" hello", " again") as router:
        piped = run_baton(
            *("chat", "--address", router.address, "--plain", "--system", "S"), piped="hi\nho\n"
        )

        assert piped.stdout == " hello\n again\n"
        first, second = (router.next_request().request for _ in range(2))
    assert first.text == "S\n\nUser: hi\nAssistant:"
    assert second.text == "S\n\nUser: hi\nAssistant: hello\nUser: ho\nAssistant:"
    assert list(first.sampling.stop) == ["\nUser:"]


def test_a_piped_chat_ends_with_the_first_failed_answer() -> None:
    done = run_baton("chat", "--address", "127.0.0.1:1", piped="hi\nho\n")

    assert done.returncode == 1
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("baton: error: ")


def test_ctrl_c_ends_generate_with_its_exit_code_and_cancels_the_request() -> None:
    command = [*BATON, "generate", "hi"]
    with scripted_router() as router, Terminal([*command, "--address", router.address]) as screen:
        requested = router.next_request()
        requested.send_text("some text")
        screen.await_text("some text")

        screen.type(CTRL_C)

        assert "Traceback" not in screen.await_end()
        assert screen.process.returncode == 130
        assert requested.was_cancelled.wait(WAIT_S)


def test_generate_reads_a_pipe_and_prints_json(cluster: LocalCluster, client: Client) -> None:
    done = run_baton(
        *("generate", "--address", cluster.address, "--json", "--max-tokens", "4", "--ignore-eos"),
        *("--logprobs", "2", "--prompt-logprobs", "0", "--timings"),
        piped="the quick brown fox",
    )

    assert done.returncode == 0, done.stderr
    reported = json.loads(done.stdout)
    assert reported["text"] == client.detokenize(reported["token_ids"])
    assert reported["usage"] == {
        "prompt_tokens": len(client.tokenize("the quick brown fox")),
        "completion_tokens": 4,
        "cached_prompt_tokens": 0,
    }
    assert [len(one["top"]) for one in reported["logprobs"]] == [2] * 4
    assert len(reported["prompt_logprobs"]) == reported["usage"]["prompt_tokens"]
    assert reported["finish_reason"] == "length"
    assert reported["served"]["prefill_node"] == "prefill-0"
    assert "prefill-0 → decode-0" in done.stderr


def test_a_full_disk_is_reported_in_one_line_without_traceback() -> None:
    with scripted_router("an answer") as router, open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            [*BATON, "generate", "hi", "--address", router.address],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )

    assert done.returncode == 1
    assert done.stderr == (
        "baton: error: the output could not be written: No space left on device\n"
    )


@pytest.mark.parametrize(
    "command", [["generate", "--address", NOBODY], ["chat", "--address", NOBODY], ["run"]]
)
def test_input_in_another_encoding_is_refused_by_name(command: list[str]) -> None:
    done = subprocess.run(
        [*BATON, *command],
        input="gr\u00fcn".encode("latin-1"),
        capture_output=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr == (
        b"baton: error: the text is not valid UTF-8 (at character 2); convert it first\n"
    )


def test_generate_shows_each_token_with_its_top_alternatives(cluster: LocalCluster) -> None:
    done = run_baton(
        *("generate", "the fox", "--address", cluster.address, "--max-tokens", "3"),
        *("--ignore-eos", "--logprobs", "1"),
    )

    lines = [line for line in done.stderr.splitlines() if line.startswith("│")]
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("arguments", "complaint", "code"),
    [
        (["--temperature", "-1"], "temperature is -1.0", 2),
        (["--model", "other"], "model 'other' is not served here", 1),
    ],
)
def test_generate_names_the_refused_value(
    cluster: LocalCluster, arguments: list[str], complaint: str, code: int
) -> None:
    done = run_baton("generate", "hi", "--address", cluster.address, *arguments)

    assert (done.returncode, done.stdout) == (code, "")
    [line] = done.stderr.splitlines()
    assert line.startswith(f"baton: error: {complaint}")


def test_a_model_without_a_chat_template_is_refused_with_the_alternative(
    model_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    command = ["serve", "router", "--model", str(folder), "--decode-nodes", "127.0.0.1:1"]
    with running_program([*BATON, *command, "--port", "0"]) as router:
        assert router.stdout is not None
        announced = parse_announcement(router.stdout.readline())
        assert announced is not None

        done = run_baton("chat", "--address", announced[1], piped="hi\n")
        router.terminate()
        router.communicate()

    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert "this model has no chat template" in line
    assert line.endswith("--plain needs no chat template")
