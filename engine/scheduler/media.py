"""Border to what plans the pictures of steps, and its table. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from baton.core.ids import RequestId
from baton.engine.kv_cache.block_pool import Holds
from baton.engine.kv_cache.cache import KvCache
from baton.engine.kv_cache.held_kv import HeldKv
from baton.engine.media.media_planner import MediaPlanner, StoredEncodings
from baton.engine.plan import MediaOrders
from baton.engine.request_media import RequestMedia
from baton.engine.scheduler.config import SchedulerConfig


class MediaPlans(Protocol):
    """Keeps the encodings of pictures, and limits those that a step encodes.

    An encoding is in use from the plan with the first token of its picture until the tokens of the
    picture are computed. So a request that uses one can always go on, and none waits for another
    that waits for it.
    """

    def begin_step(self) -> None: ...

    def can_encode(self, media: RequestMedia, start: int, num_blocks: int) -> bool:
        """Return whether all pictures from token `start` on have pixels, or stored encodings.

        These may take `num_blocks` blocks, which they hold until their tokens are computed.
        """
        ...

    def hold(self, kv: HeldKv, media: RequestMedia, start: int) -> None:
        """Keep the stored encodings that a request needs from token `start` on.

        Call it after `can_encode`. They are kept until all pictures are computed, or `release`.
        """
        ...

    def begin_whole(self, media: RequestMedia, start: int) -> int:
        """Return where to start for a chunk that would start here: not inside a whole picture."""
        ...

    def limit(self, media: RequestMedia, start: int, num_tokens: int, num_left: int) -> int:
        """Return how many of these tokens can be computed: up to a picture without room.

        A chunk that begins with a picture which must be whole gets all of it, even if that is more
        than the share of its prompt, if as many tokens are left in the step.
        """
        ...

    def use(self, kv: HeldKv, media: RequestMedia, start: int, num_tokens: int) -> None:
        """Encode the pictures of these tokens, for which there is room, unless they are cached."""
        ...

    def release(self, request_id: RequestId) -> None:
        """Note that a request was preempted or has ended."""
        ...

    def drop(self, media: RequestMedia) -> None:
        """Forget the encodings of a request whose pass failed. Other users encode them again."""
        ...

    def reset(self) -> None:
        """Forget all encodings that no request uses."""
        ...

    def take_orders(self) -> MediaOrders:
        """Return what the next pass encodes, and what the runner forgets before."""
        ...

    def end_pass(self) -> None:
        """Note that the first of the planned passes has ended."""
        ...

    def stats(self) -> dict[str, int]:
        """Return the statistics of pictures, by field of `SchedulerStats`."""
        ...

    def check(self, running: Collection[RequestId]) -> None:
        """Raise EncodingsUnaccounted unless all adds up."""
        ...


MakePlans = Callable[[SchedulerConfig, KvCache, Holds], MediaPlans]
# One, or none where all models take text alone.
MEDIA_PLANS: Sequence[MakePlans] = (
    lambda config, cache, holds: MediaPlanner(
        config.num_encoder_rows,
        config.max_num_batched_tokens,
        StoredEncodings(cache, holds, config.stored_rows),
        whole_pictures=config.whole_pictures,
    ),
)
