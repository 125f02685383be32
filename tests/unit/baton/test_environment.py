from __future__ import annotations

import os

import pytest

import baton


def test_idle_torch_threads_of_the_library_do_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)

    assert baton.LLM.__name__ == "LLM"

    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


def test_a_wait_policy_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")

    assert baton.LLM.__name__ == "LLM"

    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
