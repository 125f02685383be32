"""Orders for the KV worker, collected while a step is planned."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from baton.core.ids import BlockName, HandoffId
from baton.kv_transfer.external_kv import ExternalOrders, Load, Store, Use
from baton.kv_transfer.foreign.types import ForeignOrder
from baton.kv_transfer.types import NO_KV_ORDERS, Complete, KvOrders, Receive, Send, Withdraw


@dataclass(slots=True)
class StepOrders:
    receives: list[Receive] = field(default_factory=list)
    revokes: list[HandoffId] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)
    completes: list[Complete] = field(default_factory=list)
    withdraws: list[Withdraw] = field(default_factory=list)
    layer_sends: list[Send] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    drops: list[BlockName] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    foreign: list[ForeignOrder] = field(default_factory=list)

    def __bool__(self) -> bool:
        receiving, sending = self.receives or self.revokes, self.sends or self.layer_sends
        external = self.loads or self.stores or self.drops or self.uses or self.foreign
        return bool(receiving or sending or self.completes or self.withdraws or external)

    def take(self) -> KvOrders:
        """Return and clear the orders."""
        if not self:
            return NO_KV_ORDERS
        orders = KvOrders(
            tuple(self.receives),
            tuple(self.revokes),
            tuple(self.sends),
            tuple(self.completes),
            tuple(self.withdraws),
            tuple(self.layer_sends),
            ExternalOrders(
                tuple(self.loads), tuple(self.stores), tuple(self.drops), tuple(self.uses)
            ),
            tuple(self.foreign),
        )
        for each in fields(self):
            getattr(self, each.name).clear()
        return orders
