"""First request that `baton up` shows, as a shell reads it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from baton.cli.commands.curl_example import CHAT, curl_example, first_request
from baton.rpc.security.tls import PLAIN
from tests.support.certificates import make_authority

PRINTING = 'curl() { for each in "$@"; do echo "$each"; done; }; '


def arguments_of(line: str) -> list[str]:
    """Return the arguments that a shell passes to curl."""
    shell = ["sh", "-c", PRINTING + line]
    return subprocess.run(shell, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize(
    ("generates", "num_labels", "has_chat_template", "path", "field"),
    [
        (True, 0, True, "chat/completions", "messages"),
        (True, 0, False, "completions", "prompt"),
        (False, 0, False, "embeddings", "input"),
        (False, 1, False, "score", "text_1"),
        (False, 3, False, "embeddings", "input"),
    ],
)
def test_the_example_is_a_request_that_the_model_can_serve(
    generates: bool, num_labels: int, has_chat_template: bool, path: str, field: str
) -> None:
    request = first_request(
        generates=generates, num_labels=num_labels, has_chat_template=has_chat_template
    )

    url, *rest, body = arguments_of(curl_example("127.0.0.1:8000", PLAIN, None, request))

    assert url == f"http://127.0.0.1:8000/v1/{path}"
    assert rest == ["-H", "content-type: application/json", "-d"]
    assert field in json.loads(body)


def test_the_example_shows_the_first_token_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "client tokens"
    path.write_text("  \n secret-1\nsecret-2\n")

    line = curl_example("127.0.0.1:8000", PLAIN, path, CHAT)

    assert "secret" not in line
    assert "authorization: Bearer secret-1" in arguments_of(line)


def test_the_example_trusts_the_authority_and_shows_a_certificate_for_mutual_tls(
    tmp_path: Path,
) -> None:
    tls = make_authority(tmp_path).mutual("its own", "127.0.0.1")

    url, *rest = arguments_of(curl_example("127.0.0.1:8000", tls, None, CHAT))

    assert url.startswith("https://")
    assert rest[:6] == ["--cacert", str(tls.ca), "--cert", str(tls.cert), "--key", str(tls.key)]
