"""Parser of UCX's protocol tables (UCX_PROTO_INFO=y), which name the selected transport. Pure.

NIXL does not expose the transport of its endpoints. UCX logs a table when it first selects a
protocol for an operation on an endpoint. A hand-off uses the last table for writes to another
process.
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

TRANSPORT_DESCRIPTIONS = {
    "cma": "the kernel copies directly between the memory of the two processes",
    "xpmem": "one process writes into mapped memory of the other",
    "sysv": "shared memory",
    "posix": "shared memory",
    "tcp": "TCP",
    "rc_mlx5": "RDMA",
    "dc_mlx5": "RDMA",
    "rc_verbs": "RDMA",
    "cuda_ipc": "direct copies between GPUs",
}


@dataclass(frozen=True, slots=True)
class SelectedTransport:
    """Transport that UCX selected for writes to another process."""

    place: str  # intra-node or inter-node
    how: str  # such as zero-copy
    transport: str  # such as cma/memory or tcp/eth0

    @property
    def transport_description(self) -> str:
        names = {part.partition("/")[0].split()[-1] for part in self.transport.split(" and ")}
        known = [
            TRANSPORT_DESCRIPTIONS[name] for name in sorted(names) if name in TRANSPORT_DESCRIPTIONS
        ]
        return "; ".join(known)


def ucx_log_environment(folder: str) -> dict[str, str]:
    return {"UCX_PROTO_INFO": "y", "UCX_LOG_FILE": f"{folder}/{LOG_NAME.format(pid='%p')}"}


def find_write_transport(log: str, num_bytes: int) -> SelectedTransport | None:
    """Return UCX's last choice for writes of this size to another process; None if not logged."""
    chosen = None
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
        elif len(cells) == 3 and is_write and place != "self" and _includes(cells[0], num_bytes):
            chosen = SelectedTransport(place, how=cells[1], transport=cells[2])
    return chosen


def _includes(sizes: str, num_bytes: int) -> bool:
    """Return whether a range of sizes, such as 8185..64K, includes this one."""
    match = RANGE.fullmatch(sizes)
    if match is None:
        return False  # the table's header
    last = match["last"] or match["first"]
    is_above = last != "inf" and num_bytes > _parse_size(last)
    return _parse_size(match["first"]) <= num_bytes and not is_above


def _parse_size(text: str) -> int:
    unit = text[-1] if text[-1] in UNITS else ""
    return int(text.removesuffix(unit)) * UNITS[unit]
