"""Check of UCX wheels: can this one move the memory of GPUs?"""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.kv_transfer.transports.base import UcxConfig
from baton.kv_transfer.transports.ucx_cuda import allows_cuda, ucx_has_cuda

LOADABLE = ("libc.so.6", "libm.so.6")
MISSING = ("libc.so.6", "libno_such_driver.so.1")


@pytest.mark.parametrize(
    ("tls", "is_allowed"),
    [
        ("", True),
        ("all", True),
        ("tcp", False),
        ("tcp,cuda_copy", True),
        ("sm,self", False),
        ("^cma", True),
        ("^cuda", False),
        ("^cma,cuda_copy", False),
    ],
)
def test_transports_that_ucx_may_use_decide(tls: str, is_allowed: bool) -> None:
    assert allows_cuda(tls) is is_allowed


@pytest.mark.parametrize(
    ("has_module", "driver", "tls", "has_cuda"),
    [
        (True, LOADABLE, "", True),
        (False, LOADABLE, "", False),
        (True, MISSING, "", False),
        (True, LOADABLE, "tcp", False),
    ],
)
def test_cuda_needs_a_module_a_driver_and_the_permission(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    has_module: bool,
    driver: tuple[str, ...],
    tls: str,
    has_cuda: bool,
) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    folder = tmp_path / "nixl.libs" / "ucx"
    folder.mkdir(parents=True)
    if has_module:
        (folder / "libuct_cuda.so.0").touch()

    assert ucx_has_cuda(tmp_path / "nixl", UcxConfig(tls), driver) is has_cuda
