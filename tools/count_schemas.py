"""Counts the JSON schemas of a folder that structured output accepts, and why it refuses others.

git clone https://github.com/guidance-ai/jsonschemabench
python -m tools.count_schemas jsonschemabench/data
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from pathlib import Path

from baton.core.errors import InvalidRequest
from baton.core.structured_outputs import StructuredOutputs
from baton.engine.structured_output.compiler import STACK_BYTES
from baton.engine.structured_output.llguidance_backend import validate_grammar

ACCEPTED = "accepted"
MAX_REASON_CHARACTERS = 90


def outcome_of(text: str) -> str:
    """Return that a schema is accepted, or the beginning of the reason for its refusal."""
    try:
        validate_grammar(StructuredOutputs(json=text))
    except InvalidRequest as refusal:
        return str(refusal).split("enforced: ")[-1][:MAX_REASON_CHARACTERS]
    return ACCEPTED


def count(folder: Path) -> None:
    outcomes: Counter[str] = Counter()
    slowest_s = 0.0
    for path in sorted(folder.rglob("*.json")):
        began_s = time.thread_time()
        outcomes[outcome_of(path.read_text(encoding="utf-8"))] += 1
        slowest_s = max(slowest_s, time.thread_time() - began_s)
    if not outcomes:
        sys.exit(f"{folder} has no .json files")
    total = outcomes.total()
    print(f"{outcomes[ACCEPTED]} of {total} accepted ({outcomes[ACCEPTED] / total:.1%})")
    print(f"slowest: {slowest_s:.2f} s of CPU time")
    for reason, number in outcomes.most_common():
        if reason != ACCEPTED:
            print(f"{number:6d}  {reason}")


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    # llguidance follows long chains of references by recursion.
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=count, args=(Path(sys.argv[1]),))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
