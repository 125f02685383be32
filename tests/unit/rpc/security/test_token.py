"""Bearer tokens: accepted, refused and never disclosed."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.core.errors import InvalidConfig
from baton.rpc.errors import Unauthenticated
from baton.rpc.security.token import AcceptedTokens, authorization, read_tokens


def test_every_token_of_the_file_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("first-one\n\n  second.one  \n", encoding="utf-8")

    accepted = AcceptedTokens(read_tokens(path))

    accepted.check("Bearer first-one")
    accepted.check("bearer second.one")


@pytest.mark.parametrize(
    "shown", [None, "", "Bearer", "Bearer ", "Bearer first-on", "first-one", "Basic first-one"]
)
def test_other_tokens_are_refused(shown: str | None) -> None:
    with pytest.raises(Unauthenticated):
        AcceptedTokens(("first-one",)).check(shown)


@pytest.mark.parametrize("written", ["", "\n \n", "two words", "caf\u00e9", "tab\tbed"])
def test_a_file_without_a_usable_token_is_refused_and_not_quoted(
    tmp_path: Path, written: str
) -> None:
    path = tmp_path / "tokens"
    path.write_text(written, encoding="utf-8")

    with pytest.raises(InvalidConfig) as refusal:
        read_tokens(path)

    assert str(path) in str(refusal.value)
    assert not written.strip() or written.strip() not in str(refusal.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"--token-file .*none cannot be read"):
        read_tokens(tmp_path / "none")


def test_tokens_do_not_appear_when_settings_are_shown() -> None:
    assert "secret" not in repr(AcceptedTokens(("secret",)))
    assert authorization("secret") == ("authorization", "Bearer secret")
