"""The runner's device by its name, as options give it."""

from __future__ import annotations

import torch

from baton.core.errors import InvalidConfig
from baton.engine.runner.device.cuda import CudaDevice, count_devices
from baton.engine.runner.device.device import CPU, Device


def open_device(name: str) -> Device:
    """Return the device with this name: cpu, or that of an accelerator. Raises InvalidConfig."""
    place = torch.device(name)
    if place.type == "cpu":
        return CPU
    if (place.index or 0) >= count_devices():
        raise InvalidConfig(f"device {name!r}: this torch build or machine has no such CUDA device")
    return CudaDevice(place)
