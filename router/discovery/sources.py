"""Sources of nodes, as given on the command line. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baton.core.errors import InvalidConfig
from baton.rpc.router_address import HOST, MAX_PORT, is_port

DNS, FILE, VLLM = "dns:", "file:", "vllm:"
ADDRESS_ADVICE = "write host:port, dns:///name:port or file:///path"


@dataclass(frozen=True, slots=True)
class FixedNode:
    address: str

    def __str__(self) -> str:
        return self.address


@dataclass(frozen=True, slots=True)
class DnsName:
    """DNS name, each address of which is a separate node."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{DNS}///{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class ListFile:
    """File with a host:port on each line; # begins a comment."""

    path: str

    def __str__(self) -> str:
        return f"{FILE}//{self.path}"


@dataclass(frozen=True, slots=True)
class VllmServer:
    """HTTP address of a vLLM server, which computes prompts."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{VLLM}//{self.host}:{self.port}"


NodeSource = FixedNode | DnsName | ListFile
PrefillSource = NodeSource | VllmServer


def parse_sources(text: str) -> tuple[NodeSource, ...]:
    """Parse a comma-separated list of sources. Raises InvalidConfig."""
    return tuple(map(_parse_source, _parts(text)))


def parse_prefill_sources(text: str) -> tuple[PrefillSource, ...]:
    """Parse a list of sources that can have vLLM servers, too. Raises InvalidConfig."""
    return tuple(
        _parse_vllm(part) if part.startswith(VLLM) else _parse_source(part) for part in _parts(text)
    )


def parse_list(text: str) -> frozenset[str]:
    """Parse the addresses in a list file. Raises InvalidConfig."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return frozenset(_check_address(line) for line in lines if line)


def check_single_role(**sources_by_role: Iterable[PrefillSource]) -> None:
    """Raises InvalidConfig if a source is listed for two roles."""
    role_of: dict[PrefillSource, str] = {}
    for role, sources in sources_by_role.items():
        for source in sources:
            if role_of.setdefault(source, role) != role:
                raise InvalidConfig(
                    f"{source} is listed both as a {role_of[source]} node and as a {role} node"
                )


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _parse_source(written: str) -> NodeSource:
    if written.startswith(DNS):
        return _parse_dns(written)
    if written.startswith(FILE):
        path = written.removeprefix(FILE)
        if not path.startswith("///"):
            raise InvalidConfig(f"node list {written!r}: write the whole path, as file:///path")
        return ListFile(path.removeprefix("//"))
    if written.startswith(VLLM):
        raise InvalidConfig(f"{written} cannot decode: list it in --prefill-nodes")
    return FixedNode(_check_address(written))


def _parse_vllm(written: str) -> VllmServer:
    host, _, port = _check_address(written.removeprefix(f"{VLLM}//"), written).rpartition(":")
    return VllmServer(host.strip("[]"), int(port))


def _parse_dns(written: str) -> DnsName:
    rest = written.removeprefix(DNS)
    if rest.startswith("//") and not rest.startswith("///"):
        raise InvalidConfig(
            f"node name {written!r} has a DNS server; the system's resolver is used: "
            "write dns:///name:port"
        )
    host, _, port = _check_address(rest.removeprefix("///"), written).rpartition(":")
    return DnsName(host, int(port))


def _check_address(address: str, written: str = "") -> str:
    """Return a host:port address unchanged. Raises InvalidConfig if it is malformed."""
    host, _, port = address.rpartition(":")
    if not HOST.fullmatch(host):
        raise InvalidConfig(f"node address {written or address!r}: {ADDRESS_ADVICE}")
    if not is_port(port):
        raise InvalidConfig(
            f"node address {written or address!r}: its port must be from 1 to {MAX_PORT}"
        )
    return address
