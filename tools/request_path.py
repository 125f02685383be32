"""Measure the path of one request: the product code that a running cluster executes for it.

`python -m tools.request_path` starts a prefill node, a decode node and a router of the checkout
that it is run in (`--checkout` names another one), and sends requests with three tokens each. A
profiler in each process records which functions run during one request, and during idle intervals
of the same length. A function that a request does not run more often than an idle interval is
background work and left out, and so is what runs below a function that `--background` matches.

Counted are files with at least one function on the path, with all their lines, and the functions
with theirs. C++ code, generated stubs and libraries are not counted, nor are files from which a
request only takes values that run no Python code of their own, such as named tuples.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tools.product_code import FUNCTIONS, Module, product_modules

RECORDER = Path(__file__).resolve().parent / "path_recorder"
ROLES = ("router", "prefill", "decode")
NUM_WARMUPS = 3
NUM_IDLE_INTERVALS = 5
SETTLE_S = 0.2  # for what follows the last token, such as the ends of both legs
# Functions that stream node states, refresh lists, check health or store traces.
BACKGROUND = (
    r"/(watch\w*|status_feed|node_news|outlet|heartbeat|membership|health\w*)\.py:"
    r"|\.Watch$|NodeState\.follow$"
)


class Place(NamedTuple):
    path: str
    name: str
    line: int  # 0: generated


Calls = dict[Place, int]  # in the order of first calls


@dataclass(frozen=True, slots=True)
class PathFigures:
    files: int
    file_lines: int
    functions: int
    function_lines: int


def main() -> None:
    options = _parse_options()
    with TemporaryDirectory() as folder:
        recorded = record(options, Path(folder))
    paths = {role: request_path(*recorded[role]) for role in ROLES}
    sources = {str(module.path): module for module in product_modules(options.checkout)}
    everything = [place for role in ROLES for place in paths[role]]
    figures = {
        role: asdict(figures_of(places, sources))
        for role, places in {**paths, "total": everything}.items()
    }
    if options.json:
        print(json.dumps(figures, indent=2))
    else:
        for role, numbers in figures.items():
            print(f"{role:8}", *(f"{value:6} {name}" for name, value in numbers.items()))
    if options.list:
        for role in ROLES:
            _print_path(role, [place for place in paths[role] if place.path in sources])


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--checkout", type=Path, default=Path.cwd())
    parser.add_argument("--model", default="models/demo")
    parser.add_argument("--http", action="store_true", help="send the request to the OpenAI API")
    parser.add_argument("--tokens", type=int, default=3)
    parser.add_argument("--background", default=BACKGROUND, help="a regular expression")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--list", action="store_true", help="list files in the order of first use")
    options = parser.parse_args()
    options.checkout = options.checkout.resolve()
    return options


def request_path(request: Calls, idle_intervals: Sequence[Calls]) -> list[Place]:
    """Return the functions that run more often during a request than in any idle interval."""
    return [
        place
        for place, count in request.items()
        if all(count > calls.get(place, 0) for calls in idle_intervals)
    ]


def figures_of(places: Iterable[Place], sources: Mapping[str, Module]) -> PathFigures:
    """Count the files of these functions, and the functions by the lines that they cover."""
    by_path: dict[str, set[Place]] = {}
    for place in places:
        if place.path in sources:
            by_path.setdefault(place.path, set()).add(place)
    covered = {path: _lines_of(found, sources[path]) for path, found in by_path.items()}
    return PathFigures(
        files=len(by_path),
        file_lines=sum(sources[path].num_lines for path in by_path),
        functions=sum(_is_function(place) for found in by_path.values() for place in found),
        function_lines=sum(map(len, covered.values())),
    )


def _lines_of(places: Iterable[Place], module: Module) -> set[int]:
    lines_by_start: dict[int, range] = {}
    for node in ast.walk(module.tree):
        if isinstance(node, FUNCTIONS):
            start = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            lines_by_start[start] = range(start, (node.end_lineno or start) + 1)
    return {line for place in places for line in lines_by_start.get(place.line, ())}


def _is_function(place: Place) -> bool:
    return place.line > 0 and not place.name.endswith(">")


# --- the cluster ----------------------------------------------------------------------


def record(options: argparse.Namespace, folder: Path) -> dict[str, tuple[Calls, list[Calls]]]:
    """Return the calls during one request and during idle intervals, by role."""
    (folder / "phase").touch()
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(2)]
    kind = "http" if options.http else "grpc"
    with _cluster(options, folder, *addresses), _client(options, addresses) as client:
        for _ in range(NUM_WARMUPS):
            _send(client, kind, options.tokens)
        began_s = time.monotonic()
        with _recording(folder, "request"):
            _send(client, kind, options.tokens)
            time.sleep(SETTLE_S)
        interval_s = time.monotonic() - began_s
        for number in range(NUM_IDLE_INTERVALS):
            with _recording(folder, f"idle{number}"):
                time.sleep(interval_s)
    idle = [f"idle{number}" for number in range(NUM_IDLE_INTERVALS)]
    return {
        role: (_read(folder, "request", role), [_read(folder, phase, role) for phase in idle])
        for role in ROLES
    }


@contextmanager
def _cluster(
    options: argparse.Namespace, folder: Path, address: str, http_address: str
) -> Iterator[None]:
    paths = [str(RECORDER), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "REQUEST_PATH_FOLDER": str(folder),
        "REQUEST_PATH_ROOT": str(options.checkout),
        "REQUEST_PATH_BACKGROUND": options.background,
    }
    prefill, decode = (f"127.0.0.1:{port}" for port in _free_ports(2))
    nodes = f"--prefill-nodes={prefill}", f"--decode-nodes={decode}"
    http = "--http-port", http_address.split(":")[1]
    roles = {"prefill": (prefill,), "decode": (decode,), "router": (address, *nodes, *http)}
    with ExitStack() as stack:  # not `baton up`, whose processes are forks: they import no recorder
        for role, (own, *arguments) in roles.items():
            command = [_python(options), "-m", "baton", "serve", role, "--model", options.model]
            command += ["--port", own.split(":")[1], *arguments]
            stack.enter_context(_process(command, options.checkout, environment))
        yield


@contextmanager
def _process(
    command: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> Iterator[None]:
    """Run a process that listens, until the end of the block."""
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            if process.stdout is None or not process.stdout.readline():
                raise SystemExit(f"{' '.join(command)} did not start")
            yield
        finally:
            process.terminate()


@contextmanager
def _client(
    options: argparse.Namespace, addresses: Sequence[str]
) -> Iterator[subprocess.Popen[str]]:
    command = [_python(options), str(RECORDER / "client.py"), *addresses, str(options.tokens)]
    with subprocess.Popen(
        command, cwd=options.checkout, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        if process.stdin is not None:
            process.stdin.close()


def _send(client: subprocess.Popen[str], kind: str, num_tokens: int) -> None:
    if client.stdin is None or client.stdout is None:
        raise TypeError("the client has no pipes")
    client.stdin.write(f"{kind}\n")
    client.stdin.flush()
    answer = client.stdout.readline().strip()
    if answer != str(num_tokens):
        raise SystemExit(f"{num_tokens} tokens were requested; the client got {answer or 'none'}")


@contextmanager
def _recording(folder: Path, phase: str) -> Iterator[None]:
    """Record a phase in every process."""
    _set_phase(folder, phase)
    _await_files(folder, [f"{phase}.{role}.started" for role in ROLES])
    yield
    _set_phase(folder, "")
    _await_files(folder, [f"{phase}.{role}" for role in ROLES])


def _set_phase(folder: Path, phase: str) -> None:
    (folder / "phase.new").write_text(phase, encoding="utf-8")
    (folder / "phase.new").rename(folder / "phase")


def _await_files(folder: Path, names: Sequence[str]) -> None:
    """Wait until every process has acknowledged. The processes poll every few milliseconds."""
    while not all((folder / name).exists() for name in names):
        time.sleep(0.005)


def _read(folder: Path, phase: str, role: str) -> Calls:
    rows = json.loads((folder / f"{phase}.{role}").read_text(encoding="utf-8"))
    return {Place(*place): count for *place, count in rows}


def _python(options: argparse.Namespace) -> str:
    own = options.checkout / ".venv" / "bin" / "python"
    return str(own) if own.exists() else sys.executable


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _print_path(role: str, path: Sequence[Place]) -> None:
    """Print the files in the order of first use, with the functions of each."""
    names: dict[str, list[str]] = {}
    for place in path:
        names.setdefault(place.path, []).append(place.name)
    print(f"\n{role}")
    for file, functions in names.items():
        print(f"  {file}: {', '.join(dict.fromkeys(functions))}")


if __name__ == "__main__":
    main()
