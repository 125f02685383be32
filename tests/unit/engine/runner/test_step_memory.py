"""Memory that steps reuse."""

from __future__ import annotations

import torch

from baton.engine.runner.device.step_memory import StepMemory

LIKE = torch.zeros(1)


def test_a_step_gets_the_memory_of_the_one_before_unless_it_needs_more() -> None:
    memory = StepMemory()

    large = memory.take("scores", LIKE, (3, 4), torch.float32)
    small = memory.take("scores", LIKE, (2, 5), torch.float32)
    other = memory.take("ids", LIKE, (2,), torch.int64)
    larger = memory.take("scores", LIKE, (4, 4), torch.float32)

    assert [tuple(each.shape) for each in (large, small, other, larger)] == [
        (3, 4),
        (2, 5),
        (2,),
        (4, 4),
    ]
    assert large.data_ptr() == small.data_ptr()
    assert len({each.data_ptr() for each in (large, other, larger)}) == 3
    assert (other.dtype, larger.is_contiguous()) == (torch.int64, True)


def test_no_rows_take_no_memory() -> None:
    memory = StepMemory()
    before = memory.take("scores", LIKE, (3, 4), torch.float32)

    nothing = memory.take("scores", LIKE, (0, 4), torch.float32)

    assert nothing.shape == (0, 4)
    assert memory.take("scores", LIKE, (3, 4), torch.float32).data_ptr() == before.data_ptr()
