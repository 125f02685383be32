"""Copies of a step's input to a device, all arrays in one transfer."""

from __future__ import annotations

import numpy as np
import torch

from baton.engine.runner.device import Array, copy_together, to_device

ARRAYS: list[Array] = [
    np.arange(6, dtype=np.int64).reshape(2, 3),
    np.array([[True], [False], [True]]),
    np.zeros((0, 4), dtype=np.int64),
    np.arange(12, dtype=np.int64).reshape(3, 4)[:, ::2],
]


def test_arrays_copied_together_keep_their_values() -> None:
    copies = copy_together(ARRAYS, torch.device("cpu"))

    for array, copy in zip(ARRAYS, copies, strict=True):
        assert copy.tolist() == array.tolist()
        assert copy.dtype == torch.from_numpy(array).dtype
    assert len({copy.untyped_storage().data_ptr() for copy in copies}) == 1


def test_arrays_copied_to_another_device_keep_their_shapes() -> None:
    copies = to_device(ARRAYS, torch.device("meta"))

    assert [tuple(copy.shape) for copy in copies] == [array.shape for array in ARRAYS]
    assert {copy.device.type for copy in copies} == {"meta"}


def test_arrays_on_the_cpu_are_not_copied() -> None:
    array = np.arange(4)

    (tensor,) = to_device([array], torch.device("cpu"))
    array[0] = 7

    assert tensor.tolist() == [7, 1, 2, 3]
