"""Orders for the KV worker, collected while a step is planned."""

from __future__ import annotations

from baton.core.ids import BlockName
from baton.kv_transfer.external_kv import NO_ORDERS, ExternalOrders, Load, Store, Use
from baton.kv_transfer.types import (
    NO_KV_ORDERS,
    Complete,
    KvOrders,
    Receive,
    Revoke,
    Send,
    SendLayers,
    Withdraw,
)


class StepOrders:
    def __init__(self) -> None:
        self._clear()

    def __bool__(self) -> bool:
        return self._has_transfers or self._has_external

    def take(self) -> KvOrders:
        """Return and clear the orders."""
        if not self:
            return NO_KV_ORDERS
        orders = KvOrders(
            receives=tuple(self.receives),
            revokes=tuple(self.revokes),
            sends=tuple(self.sends),
            completes=tuple(self.completes),
            withdraws=tuple(self.withdraws),
            layer_sends=tuple(self.layer_sends),
            external=self._external() if self._has_external else NO_ORDERS,
        )
        self._clear()
        return orders

    @property
    def _has_transfers(self) -> bool:
        sending = self.sends or self.completes or self.withdraws or self.layer_sends
        return bool(sending or self.receives or self.revokes)

    @property
    def _has_external(self) -> bool:
        return bool(self.loads or self.stores or self.drops or self.uses)

    def _external(self) -> ExternalOrders:
        return ExternalOrders(
            tuple(self.loads), tuple(self.stores), tuple(self.drops), tuple(self.uses)
        )

    def _clear(self) -> None:
        self.receives: list[Receive] = []
        self.revokes: list[Revoke] = []
        self.sends: list[Send] = []
        self.completes: list[Complete] = []
        self.withdraws: list[Withdraw] = []
        self.layer_sends: list[SendLayers] = []
        self.loads: list[Load] = []
        self.stores: list[Store] = []
        self.drops: list[BlockName] = []
        self.uses: list[Use] = []
