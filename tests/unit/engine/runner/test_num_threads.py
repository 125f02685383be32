from __future__ import annotations

import pytest

from baton.core.errors import InvalidConfig
from baton.engine.runner.config import RunnerConfig


@pytest.mark.parametrize("number", [0, 1025])
def test_a_number_of_threads_that_torch_cannot_start_is_refused(number: int) -> None:
    with pytest.raises(InvalidConfig, match=rf"threads is {number}; it must be .*at most 1024"):
        RunnerConfig("m", num_threads=number)
