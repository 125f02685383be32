"""Generates the Python stubs of the protos into `baton/v1/`, when they are missing or stale.

Stubs are never committed. Run by the build (`setup.py`) and by the Makefile.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
ENDINGS = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def main() -> int:
    protos = sorted(PROTOS.rglob("*.proto"))
    if not any(_is_stale(proto) for proto in protos):
        return 0
    # Imported here: a tree whose stubs are fresh needs no compiler.
    from grpc_tools import protoc

    result: int = protoc.main(_arguments(protos))
    if result == 0:
        # A file without services gets no .pyi for them, and an unchanged time would look stale.
        for stub in (stub for proto in protos for stub in _stubs(proto)):
            stub.touch()
    return result


def _arguments(protos: list[Path]) -> list[str]:
    well_known = files("grpc_tools") / "_proto"
    return [
        "protoc",
        f"-I{PROTOS}",
        f"-I{well_known}",
        f"--plugin=protoc-gen-mypy={_plugin('protoc-gen-mypy')}",
        f"--plugin=protoc-gen-mypy_grpc={_plugin('protoc-gen-mypy_grpc')}",
        f"--python_out={ROOT}",
        f"--grpc_python_out={ROOT}",
        f"--mypy_out={ROOT}",
        f"--mypy_grpc_out={ROOT}",
        *(str(proto) for proto in protos),
    ]


def _plugin(name: str) -> str:
    """Return the plugin next to this interpreter: an isolated build has its own on the PATH."""
    path = os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", "")))
    found = shutil.which(name, path=path)
    if found is None:
        sys.exit(f"{name} is missing; install it with: pip install mypy-protobuf")
    return found


def _is_stale(proto: Path) -> bool:
    made = proto.stat().st_mtime
    return any(not stub.exists() or stub.stat().st_mtime < made for stub in _stubs(proto))


def _stubs(proto: Path) -> list[Path]:
    stem = (ROOT / proto.relative_to(PROTOS)).with_suffix("")
    return [stem.parent / f"{stem.name}{ending}" for ending in ENDINGS]


if __name__ == "__main__":
    sys.exit(main())
