"""What UCX itself tells of the transport it chose: the tables that UCX_PROTO_INFO=y makes it write.

NIXL's telemetry does not say it, and its endpoints cannot be asked from outside. UCX writes a table
when it first chooses for an operation on an endpoint; the last one for writes between processes is
the one that a hand-off uses. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LOG_NAME = "ucx-{pid}.log"

CELL = re.compile(r"^\[[^\]]*\] \[[^\]]*\]\s+(?P<rest>[|+].*)$")
ENDPOINT = re.compile(r"(?P<name>\S+) (?P<place>self|intra-node|inter-node)\b.*cfg#\d+")
RANGE = re.compile(r"(?P<first>\d+[KMG]?)(?:\.\.(?P<last>\d+[KMG]?|inf))?")
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
WRITE = "remote memory write by ucp_put*"

IN_WORDS = {
    "cma": "the kernel copies straight from the one process's memory to the other's",
    "xpmem": "the one process writes into the other's mapped memory",
    "sysv": "shared memory",
    "posix": "shared memory",
    "tcp": "TCP",
    "rc_mlx5": "RDMA",
    "dc_mlx5": "RDMA",
    "rc_verbs": "RDMA",
    "cuda_ipc": "from GPU to GPU",
}


@dataclass(frozen=True, slots=True)
class Chosen:
    """For writes of some size to a process elsewhere."""

    place: str  # intra-node or inter-node
    first_bytes: int
    last_bytes: float
    how: str  # zero-copy and the like
    transport: str  # such as cma/memory or tcp/eth0

    @property
    def in_words(self) -> str:
        names = {one.partition("/")[0].split()[-1] for one in self.transport.split(" and ")}
        known = [IN_WORDS[name] for name in sorted(names) if name in IN_WORDS]
        return "; ".join(known)


def environment_for(folder: str) -> dict[str, str]:
    return {"UCX_PROTO_INFO": "y", "UCX_LOG_FILE": f"{folder}/{LOG_NAME.format(pid='%p')}"}


def chosen_for_writes(log: str, num_bytes: int) -> Chosen | None:
    """What UCX last chose for a write of this size to another process; None if it told nothing."""
    found = [one for one in _choices(log) if one.first_bytes <= num_bytes <= one.last_bytes]
    return found[-1] if found else None


def _choices(log: str) -> list[Chosen]:
    choices: list[Chosen] = []
    place, is_write = "", False
    for line in log.splitlines():
        match = CELL.match(line)
        if match is None:
            continue
        cells = [cell.strip() for cell in match["rest"].strip("|").split("|")]
        if len(cells) == 1:
            endpoint = ENDPOINT.search(cells[0])
            if endpoint is not None:
                place, is_write = endpoint["place"], False
            elif not cells[0].startswith("+"):
                is_write = cells[0].startswith(WRITE)
        elif len(cells) == 3 and is_write and place != "self":
            choices += _choice(place, *cells)
    return choices


def _choice(place: str, sizes: str, how: str, transport: str) -> list[Chosen]:
    match = RANGE.fullmatch(sizes)
    if match is None:
        return []  # the heading
    last = match["last"] or match["first"]
    last_bytes = float("inf") if last == "inf" else float(_bytes(last))
    return [Chosen(place, _bytes(match["first"]), last_bytes, how, transport)]


def _bytes(written: str) -> int:
    unit = written[-1] if written[-1] in UNITS else ""
    return int(written.removesuffix(unit)) * UNITS[unit]
