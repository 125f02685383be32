"""Benchmark of the router's index of cached prefixes: memory, updates and matches.

Every node caches the same shared blocks, and further blocks of its own. Updates are those of a
node that starts with a full cache and then replaces a tenth of it. Times are CPU time of the
thread. A dictionary of sets, at the same task with fewer nodes, is measured alternately.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from time import thread_time

import numpy as np
import numpy.typing as npt

from baton.engine.kv_cache.block_hashes import HASH_BYTES
from baton.router.routing.prefix_index import NodePrefixes
from baton.rpc.cached_prefixes import MAX_NAMES, PrefixChanges, unpack_names

SHARED_PART = 10  # one in ten names of a node is held by all
REPLACED_PART = 10
NUM_MATCHES = 200
DICTIONARY_NODES = 8

Packed = npt.NDArray[np.uint64]  # names as pairs of words


@dataclass(slots=True)
class Costs:
    """Times of updates, by the number of their names."""

    num_names: int = 0
    seconds: list[float] = field(default_factory=list)

    def measure(self, num_names: int, action: Callable[[], object]) -> None:
        began_s = thread_time()
        action()
        self.seconds.append(thread_time() - began_s)
        self.num_names += num_names

    @property
    def names_per_s(self) -> float:
        return self.num_names / sum(self.seconds)


@dataclass(frozen=True, slots=True)
class IndexFigures:
    num_nodes: int
    names_per_node: int
    bytes_per_name: float  # of the index, by name and holder
    million_names_per_s: float
    ratio_to_dictionary: float
    p99_update_ms: float  # of up to MAX_NAMES stored and removed names
    worst_update_ms: float
    num_blocks: int  # of the matched prompt
    match_ms: float  # median, with all nodes as holders
    drop_ms: float  # a node that leaves


def run(num_nodes: int, names_per_node: int, num_blocks: int, seed: int = 0) -> IndexFigures:
    random = np.random.default_rng(seed)
    shared = _names(random, max(names_per_node // SHARED_PART, num_blocks))
    prefixes, costs = NodePrefixes(), Costs()
    peer = _measure_dictionary(random, shared, min(num_nodes, DICTIONARY_NODES), names_per_node)
    for number in range(num_nodes):
        for changes in _history(random, shared, names_per_node):
            num_names = (len(changes.stored) + len(changes.removed)) // HASH_BYTES
            costs.measure(num_names, partial(prefixes.take, f"node-{number}", changes))
    requested = sorted(unpack_names(shared[:num_blocks].tobytes()))  # all nodes have all of them
    matches = Costs()
    for _ in range(NUM_MATCHES):
        matches.measure(1, lambda: prefixes.match(requested))
    if len(prefixes.match(requested).reported) != num_nodes:
        raise RuntimeError("the index does not match what was stored")
    num_bytes = prefixes.num_reported_bytes / (num_nodes * names_per_node)
    drop = Costs()
    drop.measure(1, lambda: prefixes.drop("node-0"))
    return IndexFigures(
        num_nodes=num_nodes,
        names_per_node=names_per_node,
        bytes_per_name=num_bytes,
        million_names_per_s=costs.names_per_s / 1e6,
        ratio_to_dictionary=costs.names_per_s / peer.names_per_s,
        p99_update_ms=float(np.quantile(costs.seconds, 0.99)) * 1e3,
        worst_update_ms=max(costs.seconds) * 1e3,
        num_blocks=num_blocks,
        match_ms=statistics.median(matches.seconds) * 1e3,
        drop_ms=drop.seconds[0] * 1e3,
    )


def _names(random: np.random.Generator, count: int) -> Packed:
    return random.integers(1, 1 << 63, (count, 2), np.uint64)


def _history(
    random: np.random.Generator, shared: Packed, names_per_node: int
) -> Iterator[PrefixChanges]:
    """Yield the changes that a node reports."""
    own = _names(random, names_per_node - len(shared))
    num_replaced = len(own) // REPLACED_PART
    sequence = 0
    for part in _parts(np.concatenate((shared, own))):
        sequence += 1
        yield PrefixChanges(sequence, sequence == 1, part.tobytes())
    fresh = _names(random, num_replaced)
    for new, old in zip(_parts(fresh), _parts(own[:num_replaced]), strict=True):
        sequence += 1
        yield PrefixChanges(sequence, False, new.tobytes(), old.tobytes())


def _parts(names: Packed) -> Iterator[Packed]:
    for first in range(0, len(names), MAX_NAMES):
        yield names[first : first + MAX_NAMES]


def _measure_dictionary(
    random: np.random.Generator, shared: Packed, num_nodes: int, names_per_node: int
) -> Costs:
    """Measure a dictionary from names to sets of holders."""
    holders: defaultdict[bytes, set[str]] = defaultdict(set)
    costs = Costs()

    def take(holder: str, changes: PrefixChanges) -> None:
        for name in unpack_names(changes.removed):
            holders[name].discard(holder)
            if not holders[name]:
                del holders[name]
        for name in unpack_names(changes.stored):
            holders[name].add(holder)

    for number in range(num_nodes):
        for changes in _history(random, shared, names_per_node):
            num_names = (len(changes.stored) + len(changes.removed)) // HASH_BYTES
            costs.measure(num_names, partial(take, f"node-{number}", changes))
    return costs
