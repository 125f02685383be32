"""`baton demo` from start to end."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from tests.support.baton_command import BATON, run_baton
from tests.support.child_programs import running_program


def test_the_demo_hands_kv_over_and_exits() -> None:
    ended = run_baton("demo")

    assert ended.returncode == 0, ended.stderr
    assert "What happened" in ended.stdout
    assert "the decode node computed no" in ended.stdout
    assert "kv_push" in ended.stdout
    assert "The KV went from prefill to decode memory over nixl" in ended.stdout


def test_ctrl_c_during_an_answer_ends_the_demo_and_all_its_processes() -> None:
    with running_program([*BATON, "demo"]) as demo:
        assert demo.stdout is not None
        shown = ""
        while "def read_config" not in shown:
            line = demo.stdout.readline()
            assert line, f"it ended before its first prompt: {shown}"
            shown += line

        demo.send_signal(signal.SIGINT)

        _, errors = demo.communicate(timeout=120)
    pids = re.findall(r"pid\s(\d+)", shown)
    assert (demo.returncode, errors) == (130, "")
    assert len(pids) == 3
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
