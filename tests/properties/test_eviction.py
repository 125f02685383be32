"""Eviction order of a tier under random events: it equals a slow model of the rules."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baton.core.ids import BlockName
from baton.core.kv_hints import SHARED, BlockHints, Tenant
from baton.kv_transfer.tiers.eviction import DEFAULT_PRIORITY, RELEASED, EvictionOrder
from tests.support.hypothesis_profiles import num_examples

TENANTS = (SHARED, Tenant(b"a"), Tenant(b"b"))
NAMES = [BlockName(bytes([number])) for number in range(12)]

hints_of_requests = st.builds(
    BlockHints,
    retain_s=st.sampled_from([0.0, 0.0, 1.0, 2.0, 9.0]),
    priority=st.sampled_from([None, None, 0, 35, 100]),
    is_released=st.sampled_from([False, False, False, True]),
)


@dataclass(slots=True)
class _Known:
    tenant: Tenant
    priority: int = DEFAULT_PRIORITY
    until_s: float | None = None
    is_pinned: bool = False


class EvictionMachine(RuleBasedStateMachine):
    """A tier that makes room before it adds a block, as both tiers do."""

    @initialize(max_blocks=st.integers(1, 9), share=st.sampled_from([0.2, 0.5, 1.0]))
    def start(self, max_blocks: int, share: float) -> None:
        self.order = EvictionOrder(max_blocks, share)
        self.max_blocks = max_blocks
        self.quota = max(1, int(max_blocks * share)) if share < 1 else None
        self.known: dict[BlockName, _Known] = {}  # least recently used first
        self.now = 0.0
        self.num_refused = 0

    @rule(seconds=st.sampled_from([0.25, 1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(number=st.integers(0, len(NAMES) - 1), hints=hints_of_requests)
    def add(self, number: int, hints: BlockHints) -> None:
        tenant = TENANTS[number % len(TENANTS)]
        hints = BlockHints(tenant, hints.retain_s, hints.priority, hints.is_released)
        name = NAMES[number]
        if name not in self.known:
            if not self._make_room(tenant):
                return
            self.known[name] = _Known(tenant)
        self.order.add(name, hints, self.now)
        self._use(name, hints)

    @rule(number=st.integers(0, len(NAMES) - 1), hints=hints_of_requests)
    def use(self, number: int, hints: BlockHints) -> None:
        self.order.use(NAMES[number], hints, self.now)
        if NAMES[number] in self.known:
            self._use(NAMES[number], hints)

    @rule(number=st.integers(0, len(NAMES) - 1))
    def touch(self, number: int) -> None:
        name = NAMES[number]
        self.order.touch(name)
        if name not in self.known or self.known[name].until_s is not None:
            return
        if self.known[name].priority == RELEASED:
            self.known[name].priority = DEFAULT_PRIORITY
        self._move_to_end(name)

    @rule(number=st.integers(0, len(NAMES) - 1))
    def pin_or_unpin(self, number: int) -> None:
        name = NAMES[number]
        if name not in self.known:
            return
        block = self.known[name]
        block.is_pinned = not block.is_pinned
        if block.is_pinned:
            self.order.pin(name)
            return
        self.order.unpin(name)
        if block.until_s is None:
            self._move_to_end(name)

    @rule(number=st.integers(0, len(NAMES) - 1))
    def remove(self, number: int) -> None:
        self.order.remove(NAMES[number])
        self.known.pop(NAMES[number], None)

    @invariant()
    def holds_what_was_added(self) -> None:
        assert set(self.order.names) == set(self.known)
        assert self.order.num_refused == self.num_refused
        for name, block in self.known.items():
            hints = self.order.hints_of(name, self.now)
            until_s = self.now if block.until_s is None else block.until_s
            assert hints.retain_s == max(0.0, until_s - self.now)
            assert hints.is_released is (block.priority == RELEASED)

    @invariant()
    def evicts_in_the_order_of_the_model(self) -> None:
        for tenant in TENANTS:
            assert list(self.order.victims(tenant, self.now)) == self._victims(tenant)
            assert self.order.is_at_quota(tenant) is self._is_at_quota(tenant)
        assert self.order.num_retained == sum(k.until_s is not None for k in self.known.values())

    def _make_room(self, tenant: Tenant) -> bool:
        """Evict what has to be. Returns False if there is no victim, as all are pinned."""
        while self.order.is_full_for(tenant):
            victims = self._victims(tenant)
            assert next(self.order.victims(tenant, self.now), None) == next(iter(victims), None)
            if not victims:
                assert any(block.is_pinned for block in self.known.values())
                return False
            self.order.remove(victims[0])
            del self.known[victims[0]]
        assert len(self.known) < self.max_blocks
        assert not self._is_at_quota(tenant)
        return True

    # --- the model ----------------------------------------------------------------

    def _use(self, name: BlockName, hints: BlockHints) -> None:
        self._expire()
        block = self.known[name]
        until_s, block.until_s = block.until_s, None
        if hints.is_released:
            block.priority = RELEASED
        else:
            kept = DEFAULT_PRIORITY if block.priority == RELEASED else block.priority
            block.priority = kept if hints.priority is None else hints.priority
            ends = [until_s, self.now + hints.retain_s if hints.retain_s else None]
            until_s = max((end for end in ends if end is not None), default=None)
            if until_s is not None and self._may_retain(block.tenant):
                block.until_s = until_s
            elif until_s is not None:
                self.num_refused += 1
        self._move_to_end(name)

    def _may_retain(self, tenant: Tenant) -> bool:
        tenants = [block.tenant for block in self.known.values() if block.until_s is not None]
        if len(tenants) >= self.max_blocks // 2:
            return False
        if self.quota is None or tenant == SHARED:
            return True
        return tenants.count(tenant) < self.quota // 2

    def _expire(self) -> None:
        ends = [(block.until_s, name) for name, block in self.known.items() if block.until_s]
        for until_s, name in sorted(ends):
            if until_s <= self.now:
                self.known[name].until_s = None
                self._move_to_end(name)

    def _victims(self, tenant: Tenant) -> list[BlockName]:
        self._expire()
        own_only = self._is_at_quota(tenant)
        names = [
            name
            for name, block in self.known.items()
            if block.until_s is None
            and not block.is_pinned
            and (not own_only or block.tenant == tenant)
        ]
        return sorted(names, key=lambda name: self.known[name].priority)

    def _is_at_quota(self, tenant: Tenant) -> bool:
        num_own = sum(block.tenant == tenant for block in self.known.values())
        return self.quota is not None and tenant != SHARED and num_own >= self.quota

    def _move_to_end(self, name: BlockName) -> None:
        self.known[name] = self.known.pop(name)


TestEviction = EvictionMachine.TestCase
TestEviction.settings = settings(max_examples=num_examples(50))
