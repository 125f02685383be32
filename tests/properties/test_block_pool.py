"""Block pool against a model of it: holders, cached blocks and eviction order."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.core.ids import BlockId
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.block_pool import BlockPool

SOME = st.integers(0, 1000)  # picks one of however many there are


class BlockPoolMachine(RuleBasedStateMachine):
    """State machine; `holdings` are runs of blocks, each held once."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(1)
        self.holdings: list[list[BlockId]] = []
        self.block_by_hash: dict[BlockHash, BlockId] = {}
        self.let_go: list[BlockId] = []  # free and cached, the next to be evicted first
        self.marked: set[BlockId] = set()  # held, and to be evicted first

    @initialize(num_blocks=st.integers(1, 9))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        num_free = self.pool.num_free
        taken = self.pool.allocate(count)
        if taken is None:
            assert count > num_free == self.pool.num_free
            return
        num_evicted = max(0, count - (num_free - len(self.let_go)))
        evicted, self.let_go = self.let_go[:num_evicted], self.let_go[num_evicted:]
        assert len(taken) == len(set(taken)) == count
        assert not set(taken) & self._held()
        assert set(evicted) <= set(taken), "a younger cached block went before an older one"
        assert list(self.pool.take_evicted()) == [self._forget(block) for block in evicted]
        self.holdings.append(taken)

    @precondition(lambda self: self.holdings)
    @rule(pick=SOME)
    def release(self, pick: int) -> None:
        holding = self.holdings.pop(pick % len(self.holdings))
        self.pool.release(holding)
        cached, held = set(self.block_by_hash.values()), self._held()
        free = [b for b in reversed(holding) if b in cached and b not in held]
        self.let_go += [b for b in free if b not in self.marked]
        self.let_go = [b for b in free if b in self.marked] + self.let_go
        self.marked &= held

    @precondition(lambda self: self.holdings)
    @rule(pick=SOME, first=st.booleans())
    def mark(self, pick: int, first: bool) -> None:
        holding = self.holdings[pick % len(self.holdings)]
        if first:
            self.pool.evict_first(holding)
            self.marked |= set(holding)
        else:
            self.pool.evict_in_turn(holding)
            self.marked -= set(holding)

    @precondition(lambda self: any(self.holdings))
    @rule(pick=SOME, name=st.integers(0, 6))
    def register(self, pick: int, name: int) -> None:
        held = sorted(self._held() - set(self.block_by_hash.values()))
        if not held:
            return
        block, block_hash = held[pick % len(held)], _hash(name)
        is_new = block_hash not in self.block_by_hash
        assert self.pool.register(block, block_hash) is is_new
        if is_new:
            self.block_by_hash[block_hash] = block

    @rule(names=st.lists(st.integers(0, 6), max_size=4, unique=True))
    def hit(self, names: list[int]) -> None:
        expected: list[BlockId] = []
        for name in names:
            if _hash(name) not in self.block_by_hash:
                break
            expected.append(self.block_by_hash[_hash(name)])
        found = self.pool.find([_hash(name) for name in names])
        assert found == expected
        assert self.pool.num_free_among(found) == len(set(found) - self._held())
        self.pool.hold(found)
        self.let_go = [block for block in self.let_go if block not in found]
        self.holdings.append(found)

    @precondition(lambda self: self.block_by_hash)
    @rule(pick=SOME)
    def unregister(self, pick: int) -> None:
        blocks = sorted(self.block_by_hash.values())
        block = blocks[pick % len(blocks)]
        self.pool.unregister([block])
        self.let_go = [other for other in self.let_go if other != block]
        assert self.pool.take_evicted() == (self._forget(block),)

    @rule()
    def reset(self) -> None:
        self.pool.forget_hashes()
        self.block_by_hash.clear()
        self.let_go.clear()

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        self.pool.check(block for holding in self.holdings for block in holding)
        assert self.pool.num_free == self.pool.num_blocks - len(self._held())
        assert self.pool.num_cached == len(self.block_by_hash)

    def _held(self) -> set[BlockId]:
        return {block for holding in self.holdings for block in holding}

    def _forget(self, block: BlockId) -> BlockHash:
        block_hash = next(h for h, b in self.block_by_hash.items() if b == block)
        del self.block_by_hash[block_hash]
        return block_hash


def _hash(name: int) -> BlockHash:
    return BlockHash(bytes([name]))


TestBlockPool = BlockPoolMachine.TestCase
