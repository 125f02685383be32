"""Unmodified agents against a real cluster whose model calls their tools, and sees pictures.

Run with --agents FOLDER, after npm install --prefix FOLDER @anthropic-ai/claude-code @openai/codex
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from baton.cluster import LocalCluster
from tests.support.image_files import random_image
from tests.support.recording_proxy import a_recording_proxy
from tests.support.scripted_agent import LOOKED, PICTURE, SEEN

MAX_S = 240
TASK = "Open the door."
LOOK = f"Look at {PICTURE}, and say what it shows."
NOWHERE = "http://127.0.0.1:9"  # proxy for all that does not go to the cluster
CODEX_CONFIG = """
model = "agent"
model_provider = "baton"
approval_policy = "never"
sandbox_mode = "danger-full-access"
[model_providers.baton]
name = "baton"
base_url = "http://{address}/v1"
wire_api = "responses"
supports_websockets = {over_websocket}
"""


@pytest.fixture
def agents(request: pytest.FixtureRequest) -> Path:
    folder = request.config.getoption("--agents")
    if folder is None:
        pytest.skip("needs --agents FOLDER, with Claude Code and Codex")
    return Path(folder).resolve() / "node_modules" / ".bin"


def run_agent(command: list[str], folder: Path, **environment: str) -> list[dict[str, Any]]:
    """Run an agent in an empty folder, and return the JSON lines that it prints."""
    for name in ("home", "work"):
        (folder / name).mkdir(exist_ok=True)
    ended = subprocess.run(
        command,
        cwd=folder / "work",
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(folder / "home"),
            "HTTPS_PROXY": NOWHERE,
            "HTTP_PROXY": NOWHERE,
            "NO_PROXY": "127.0.0.1",
            **environment,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=MAX_S,
        check=False,
    )
    assert ended.returncode == 0, (ended.stdout, ended.stderr)
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]


def was_opened(folder: Path) -> bool:
    return (folder / "work" / "opened.txt").read_text(encoding="utf-8") == "opened\n"


def run_claude(
    agents: Path, cluster: LocalCluster, folder: Path, task: str, tool: str
) -> dict[str, Any]:
    command = [str(agents / "claude"), "-p", task, "--allowedTools", tool]
    [ended] = run_agent(
        [*command, "--output-format", "json"],
        folder,
        ANTHROPIC_BASE_URL=f"http://{cluster.router.http_address}",
        ANTHROPIC_AUTH_TOKEN="none",
        ANTHROPIC_MODEL="agent",
        ANTHROPIC_SMALL_FAST_MODEL="agent",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    return ended


def run_codex(
    agents: Path, address: str, folder: Path, task: str, *, over_websocket: bool = False
) -> list[dict[str, Any]]:
    config = folder / "home" / ".codex" / "config.toml"
    config.parent.mkdir(parents=True)
    written = CODEX_CONFIG.format(address=address, over_websocket=str(over_websocket).lower())
    config.write_text(written, encoding="utf-8")
    return run_agent(
        [str(agents / "codex"), "exec", "--skip-git-repo-check", "--json", task], folder
    )


def put_picture(folder: Path) -> None:
    path = folder / "work" / PICTURE
    path.parent.mkdir()
    random_image(150, 90).save(path)


def test_claude_code_runs_a_tool(agents: Path, scripted: LocalCluster, tmp_path: Path) -> None:
    ended = run_claude(agents, scripted, tmp_path, TASK, "Bash")

    assert was_opened(tmp_path)
    assert (ended["result"], ended["is_error"], ended["num_turns"]) == (SEEN, False, 2)
    assert ended["usage"]["cache_read_input_tokens"] > 16


def test_claude_code_reads_a_picture(agents: Path, scripted: LocalCluster, tmp_path: Path) -> None:
    put_picture(tmp_path)

    ended = run_claude(agents, scripted, tmp_path, LOOK, "Read")

    assert (ended["result"], ended["is_error"], ended["num_turns"]) == (LOOKED, False, 2)


def test_codex_views_a_picture(agents: Path, scripted: LocalCluster, tmp_path: Path) -> None:
    put_picture(tmp_path)
    router = scripted.router.http_address
    assert router is not None

    events = run_codex(agents, router, tmp_path, LOOK)

    said = [event["item"]["text"] for event in events if "text" in event.get("item", ())]
    assert said == [LOOKED]


@pytest.mark.parametrize("over_websocket", [False, True])
def test_codex_runs_a_tool(
    agents: Path, scripted: LocalCluster, tmp_path: Path, *, over_websocket: bool
) -> None:
    router = scripted.router.http_address
    assert router is not None
    with a_recording_proxy(router) as (address, heads):
        events = run_codex(agents, address, tmp_path, TASK, over_websocket=over_websocket)

    assert was_opened(tmp_path)
    said = [event["item"]["text"] for event in events if "text" in event.get("item", ())]
    assert said == [SEEN]
    assert events[-1]["type"] == "turn.completed"
    assert events[-1]["usage"]["cached_input_tokens"] > 16
    posts = [head for head in heads if head.startswith(b"POST /v1/responses ")]
    sockets = [head for head in heads if head.startswith(b"GET /v1/responses ")]
    assert (bool(posts), len(sockets)) == ((False, 1) if over_websocket else (True, 0))
