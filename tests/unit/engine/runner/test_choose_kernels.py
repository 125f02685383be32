"""Kernel selection on a machine without a compiler."""

from __future__ import annotations

import logging

import pytest
import torch

from baton.core.errors import InvalidConfig
from baton.engine.runner.kernels import choose
from baton.engine.runner.kernels.build import KernelsUnavailable, Variant

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def library(_: Variant) -> None:
        raise KernelsUnavailable("there is no C++ compiler: install one")

    monkeypatch.setattr(choose, "library", library)


def test_falling_back_to_torch_logs_one_warning_with_the_cost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert choose.choose_parts("auto", torch.bfloat16, CPU) is choose.TORCH

    (warning,) = caplog.messages
    assert "two to three times slower" in warning
    assert "other tokens than nodes with kernels" in warning
    assert "install one" in warning


def test_models_that_do_not_use_kernels_cause_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert choose.choose_parts("auto", torch.float32, CPU) is choose.TORCH
    assert choose.choose_parts("torch", torch.bfloat16, CPU) is choose.TORCH
    assert not caplog.messages


@pytest.mark.parametrize(
    ("name", "dtype", "place", "message"),
    [
        ("auto", torch.float32, "cpu", "needs the native kernels, which compute bfloat16"),
        ("torch", torch.bfloat16, "cpu", "not torch.bfloat16 on cpu with kernels 'torch'"),
        ("auto", torch.bfloat16, "cuda", "or --kernels triton, not torch.bfloat16 on cuda"),
        ("auto", torch.bfloat16, "cpu", "not available: there is no C"),
    ],
)
def test_torch_is_refused_where_a_token_may_not_depend_on_its_batch(
    name: str, dtype: torch.dtype, place: str, message: str
) -> None:
    with pytest.raises(InvalidConfig, match=message):
        choose.choose_parts(name, dtype, torch.device(place), batch_invariant=True)


def test_native_kernels_without_a_compiler_are_refused_with_the_reason() -> None:
    with pytest.raises(InvalidConfig, match="not available: there is no C"):
        choose.choose_parts("native", torch.bfloat16, CPU)
