"""Pass hooks with completion fences: no layer is sent before its KV is written."""

from __future__ import annotations

from baton.engine.errors import PassHookFailed
from baton.engine.runner.device.device import Device
from baton.engine.runner.model_info import NO_LAYER, PassHook
from baton.kv_transfer.fence import Fence


class FencedHook:
    """Calls a pass hook with a completion fence per layer.

    Exceptions of the hook are raised as PassHookFailed, to tell them from failures of the pass.
    In a retry, layers are reported as NO_LAYER, so that none of them is sent.
    """

    def __init__(self, hook: PassHook, device: Device, is_retry: bool) -> None:
        self._hook = hook
        self._device = device
        self._is_retry = is_retry

    def layer_done(self, layer: int) -> None:
        try:
            self._report(layer, self._device.record())
        except Exception as root:
            raise PassHookFailed(root) from root

    def layers_done(self, num_layers: int) -> None:
        """Report layers that were launched together, with one fence."""
        try:
            fence = self._device.record()
            for layer in range(num_layers):
                self._report(layer, fence)
        except Exception as root:
            raise PassHookFailed(root) from root

    def pass_done(self) -> None:
        try:
            self._hook.pass_done()
        except Exception as root:
            raise PassHookFailed(root) from root

    def _report(self, layer: int, fence: Fence) -> None:
        # Other rows of the plan may not have run yet, and their blocks wait for this layer.
        self._hook.layer_done(NO_LAYER if self._is_retry else layer, fence)
