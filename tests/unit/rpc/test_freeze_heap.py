"""Objects of a process's start are exempt from garbage collection."""

from __future__ import annotations

import gc
import weakref

from baton.rpc.server import freeze_heap


class Cycle:
    """Object that only a garbage collection frees."""

    def __init__(self) -> None:
        self.itself = self


def test_later_collections_leave_the_objects_of_the_start_alone_and_free_later_ones() -> None:
    gc.freeze()  # other tests' objects, which take seconds to look through
    garbage, at_start = weakref.ref(Cycle()), Cycle()
    survivor = weakref.ref(at_start)
    num_frozen = gc.get_freeze_count()

    freeze_heap()

    assert garbage() is None  # collected before, so that it is not kept for ever
    assert gc.get_freeze_count() > num_frozen
    assert not any(each is at_start for each in gc.get_objects())
    later = weakref.ref(Cycle())
    del at_start
    gc.collect()
    assert later() is None
    assert survivor() is not None
