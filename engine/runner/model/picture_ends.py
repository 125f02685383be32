"""Ends of what tokens attend to, where the tokens of a picture attend to each other."""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.errors import PictureCut
from baton.engine.runner.model.pass_layout import Ints, TokenRun


def picture_ends(runs: Sequence[TokenRun], positions: Ints) -> Ints | None:
    """Return the end of the tokens that each token sees; None if all see up to themselves.

    A token of a picture sees up to the picture's end, which must be in the same run.
    """
    ends: Ints | None = None
    first = 0
    for run in runs:
        start = run.end - run.num_tokens
        for segment in run.row.media:
            if segment.overlaps(start, run.end):
                end = segment.start + segment.num_tokens
                if segment.start < start or end > run.end:
                    raise PictureCut(
                        f"tokens {start} to {run.end} of {run.row.request_id} cut a picture that "
                        f"has tokens {segment.start} to {end}"
                    )
                ends = positions + 1 if ends is None else ends
                ends[first + segment.start - start : first + end - start] = end
        first += run.num_tokens
    return ends
