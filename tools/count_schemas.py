"""Counts the JSON schemas of a folder that structured output accepts, and why it refuses others.

git clone https://github.com/guidance-ai/jsonschemabench
python -m tools.count_schemas jsonschemabench/data
python -m tools.count_schemas jsonschemabench/data models/demo

With a model, grammars are also compiled for its tokenizer, as nodes do.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.core.errors import InvalidRequest
from baton.core.structured_outputs import StructuredOutputs
from baton.engine.structured_output.compiler import STACK_BYTES
from baton.engine.structured_output.llguidance_backend import GrammarLibrary, validate_grammar

ACCEPTED = "accepted"
MAX_REASON_CHARACTERS = 90
NUM_SLOWEST = 20
SHARES = (0.5, 0.99, 0.999)

Check = Callable[[StructuredOutputs], object]


def outcome_of(text: str, check: Check = validate_grammar) -> str:
    """Return that a schema is accepted, or the beginning of the reason for its refusal."""
    try:
        check(StructuredOutputs(json=text))
    except InvalidRequest as refusal:
        return str(refusal).split("enforced: ")[-1][:MAX_REASON_CHARACTERS]
    return ACCEPTED


def compiler_of(model: Path) -> Check:
    """Return the compiler of a node with this model."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    ends = config["eos_token_id"]
    eos_token_ids = ends if isinstance(ends, list) else [ends]
    library = GrammarLibrary(SafetensorsFolder(model), config["vocab_size"], eos_token_ids)
    library.compile(StructuredOutputs(json="{}"))  # reads the tokenizer
    return library.compile


def count(folder: Path, check: Check) -> None:
    outcomes: Counter[str] = Counter()
    times: list[tuple[float, str]] = []  # in CPU time
    for path in sorted(folder.rglob("*.json")):
        text = path.read_text(encoding="utf-8")
        began_s = time.thread_time()
        outcomes[outcome_of(text, check)] += 1
        times.append((time.thread_time() - began_s, str(path.relative_to(folder))))
    if not outcomes:
        sys.exit(f"{folder} has no .json files")
    total = outcomes.total()
    print(f"{outcomes[ACCEPTED]} of {total} accepted ({outcomes[ACCEPTED] / total:.1%})")
    times.sort()
    found = (f"{share:.1%} within {times[int(share * total)][0]:.4f} s" for share in SHARES)
    print(f"CPU time: {', '.join(found)}; the slowest:")
    for took_s, name in reversed(times[-NUM_SLOWEST:]):
        print(f"{took_s:6.2f} s  {name}")
    print("refused:")
    for reason, number in outcomes.most_common():
        if reason != ACCEPTED:
            print(f"{number:6d}  {reason}")


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    check = validate_grammar if len(sys.argv) == 2 else compiler_of(Path(sys.argv[2]))
    # llguidance follows long chains of references by recursion.
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=count, args=(Path(sys.argv[1]), check))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
