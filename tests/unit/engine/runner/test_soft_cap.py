from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from baton.engine.runner.model.decoder import Decoder

INFINITY, NAN = float("inf"), float("nan")


def capped(logits: torch.Tensor, softcap: float) -> torch.Tensor:
    config = SimpleNamespace(
        logits_scale=1.0, logits_softcap=softcap, last_writer=0, suppressed_token_ids=()
    )
    unused = cast("Any", None)
    head = cast("Any", torch.nn.Identity())
    return Decoder(cast("Any", config), unused, unused, (), unused, head).logits(logits)


@pytest.mark.parametrize("softcap", [2.0, 30.0])
def test_the_soft_cap_is_that_of_tanh_in_double_precision(softcap: float) -> None:
    logits = torch.linspace(-90, 90, 2003)

    found = capped(logits.clone(), softcap)

    expected = softcap * torch.tanh(logits.double() / softcap)
    assert (found - expected).abs().max() < 3e-7 * softcap
    assert torch.equal(found, found.sort().values)  # greedy tokens stay the same


def test_the_soft_cap_bounds_infinities_and_keeps_nan() -> None:
    found = capped(torch.tensor([INFINITY, -INFINITY, NAN]), 30.0)

    assert found[:2].tolist() == [30.0, -30.0]
    assert found[2].isnan()
