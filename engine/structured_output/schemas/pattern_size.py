r"""Sizes of regular expressions: how many places of one can be reached at the same time. Pure.

The size is an upper bound, the number of characters and sets with repetitions written out:
`^[a-z]{1,63}$` has 63 and `(a|bc)*` has 3.
"""

from __future__ import annotations

import re

MAX_SIZE = 1_000_000
_TOKENS = re.compile(
    r"""(?P<open>\((?:\?(?:[imsxuU-]*:|P?<\w+>)?)?)
    |(?P<close>\))
    |(?P<sign>[*+?^$|])
    |\{(?P<low>\d+)(?P<more>,(?P<high>\d*))?\}
    |(?P<atom>\\[pPxu]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.)""",
    re.VERBOSE | re.DOTALL,
)


def pattern_size(pattern: str) -> int:
    groups: list[int] = []  # sizes of the open groups up to here
    size, last = 0, 0  # of the current group, and of its last item, which a repetition applies to
    for found in _TOKENS.finditer(pattern):
        if found["open"]:
            groups.append(size)
            size, last = 0, 0
        elif found["close"]:
            last = size
            size += groups.pop() if groups else 0
        elif found["atom"]:
            size, last = size + 1, 1
        elif found["low"]:
            times = max(int(found["low"]), int(found["high"] or 0), 1)
            size, last = size + last * (times - 1), last * times
        size, last = min(size, MAX_SIZE), min(last, MAX_SIZE)
    return size
