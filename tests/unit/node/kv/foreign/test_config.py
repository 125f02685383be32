"""Foreign servers that a node may dial, as they are written on the command line."""

from __future__ import annotations

import pytest

from baton.core.errors import InvalidConfig
from baton.kv_transfer.layout import KvPacking
from baton.node.kv.foreign.config import ForeignSource, parse_sources


def test_servers_are_parsed() -> None:
    written = (
        "vllm://10.0.0.5:5600, vllm://[::1]:5601?packing=vec&model=org/m&version=0.32.1&lease=60"
    )
    assert parse_sources(written) == (
        ForeignSource("10.0.0.5", 5600),
        ForeignSource("::1", 5601, "org/m", KvPacking.VLLM_VEC, "0.32.1", 60.0),
    )
    assert parse_sources("") == ()


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("10.0.0.5:5600", "write vllm://HOST:PORT"),
        ("vllm://10.0.0.5", "write vllm://HOST:PORT"),
        ("vllm://10.0.0.5:0", "write vllm://HOST:PORT"),
        ("vllm://10.0.0.5:99999", "write vllm://HOST:PORT"),
        ("vllm://10.0.0.5:5600/path", "write vllm://HOST:PORT"),
        ("vllm://10.0.0.5:5600?color=red", "color is unknown"),
        ("vllm://10.0.0.5:5600?packing=tight", "packing must be one of plain, vec, amx"),
        ("vllm://10.0.0.5:5600?lease=soon", "lease must be from 1"),
        ("vllm://10.0.0.5:5600?lease=nan", "lease must be from 1"),
        ("vllm://a:1,vllm://a:1?packing=vec", "names a server twice"),
        (",".join(f"vllm://a:{port}" for port in range(1, 66)), "the limit is 64"),
    ],
)
def test_mistakes_are_named(written: str, reason: str) -> None:
    with pytest.raises(InvalidConfig, match=reason):
        parse_sources(written)
