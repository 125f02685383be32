"""Ctrl-C while a blocking client waits for an answer."""

from __future__ import annotations

import signal
import sys

from tests.support.child_programs import running_program
from tests.support.scripted_router import WAIT_S, scripted_router

NUM_ROUNDS = 25
# It continues after each signal, which reveals gRPC locks in a wrong state.
SCRIPT = """
import sys
from contextlib import closing
from baton.client import Client

with Client(sys.argv[1]) as client:
    for _ in range(int(sys.argv[2])):
        try:
            with closing(client.stream("hi")) as stream:
                for chunk in stream:
                    print(chunk.text, flush=True)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    print(client.generate("the last").text, flush=True)
    try:
        for chunk in client.stream("bye"):
            print(chunk.text, flush=True)
    except KeyboardInterrupt:
        sys.exit(130)
"""


def test_a_blocking_client_survives_every_ctrl_c_and_its_process_exits_normally() -> None:
    command = [sys.executable, "-c", SCRIPT]
    with (
        scripted_router() as router,
        running_program([*command, router.address, str(NUM_ROUNDS)]) as script,
    ):
        assert script.stdout is not None
        for number in range(NUM_ROUNDS):
            requested = router.next_request()
            requested.send_text(f"piece {number}")
            assert script.stdout.readline() == f"piece {number}\n"

            script.send_signal(signal.SIGINT)

            assert script.stdout.readline() == "interrupted\n"
            assert requested.was_cancelled.wait(WAIT_S)
        whole = router.next_request()
        whole.send_text("well")
        whole.end()
        assert script.stdout.readline() == "well\n"
        last = router.next_request()
        last.send_text("bye")
        assert script.stdout.readline() == "bye\n"
        script.send_signal(signal.SIGINT)
        _, errors = script.communicate(timeout=WAIT_S)

    assert (script.returncode, errors) == (130, "")
    assert last.was_cancelled.wait(WAIT_S)
