"""Recorder of the product functions that a serving process runs.

`tools/request_path.py` puts this folder on PYTHONPATH, so that Python imports the module at start.
The file `phase` in the exchange folder names what is recorded at present; an empty file pauses.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

EVENT_LOOP = os.path.join("asyncio", "events.py")
ROLES = ("router", "prefill", "decode")
POLL_S = 0.005

Place = tuple[str, str, int]  # file, qualified name and first line of a function


class Recorder:
    """Counts calls of product functions.

    A call counts for every function of its stack, since those may have been entered earlier. Calls
    with a function of background work in their stack do not count.
    """

    def __init__(self, root: str, background: str, folder: Path, role: str) -> None:
        self._root = root.rstrip(os.sep) + os.sep
        self._background = re.compile(background)
        self._folder = folder
        self._role = role
        self._phase = ""
        self._calls: dict[Place, int] = {}  # in the order of first calls

    def profile(self, frame: FrameType, event: str, _argument: object) -> None:
        """Profile function of every thread."""
        if not self._phase or event != "call" or self._place_of(frame) is None:
            return
        stack = list(self._product_stack(frame))
        if any(self._background.search(f"{path}:{name}") for path, name, _ in stack):
            return
        for place in reversed(stack):
            self._calls[place] = self._calls.get(place, 0) + 1

    def follow_phases(self) -> None:
        sys.setprofile(None)
        while True:
            phase = (self._folder / "phase").read_text(encoding="utf-8")
            if phase != self._phase:
                self.change_phase(phase)
            time.sleep(POLL_S)

    def change_phase(self, phase: str) -> None:
        ended, calls = self._phase, self._calls
        self._phase = ""
        time.sleep(POLL_S)
        self._calls = {}
        self._phase = phase
        if ended:
            rows = [[*place, count] for place, count in calls.items()]
            self._write(f"{ended}.{self._role}", json.dumps(rows))
        if phase:
            self._write(f"{phase}.{self._role}.started", "")

    def _write(self, name: str, text: str) -> None:
        written = self._folder / f"{name}.{os.getpid()}"
        written.write_text(text, encoding="utf-8")
        written.rename(self._folder / name)

    def _product_stack(self, frame: FrameType | None) -> Iterator[Place]:
        """Yield the product functions of a stack, innermost first, up to the event loop."""
        while frame is not None and not frame.f_code.co_filename.endswith(EVENT_LOOP):
            place = self._place_of(frame)
            if place is not None:
                yield place
            frame = frame.f_back

    def _place_of(self, frame: FrameType) -> Place | None:
        code: CodeType = frame.f_code
        path = code.co_filename
        if path == "<string>":  # a method that `dataclass` has generated
            path = frame.f_globals.get("__file__") or ""
        if not path.startswith(self._root) or code.co_name == "<module>":
            return None
        line = 0 if code.co_filename == "<string>" else code.co_firstlineno
        return _real_path(path).removeprefix(self._root), code.co_qualname, line


@cache
def _real_path(path: str) -> str:
    """Return the path without links: rooms at the top level are imported through `baton/`."""
    return os.path.realpath(path)


def role_of(arguments: list[str]) -> str | None:
    """Return the role of a process that was started by `baton serve ROLE`, else None."""
    after = arguments[arguments.index("serve") + 1 :] if "serve" in arguments else []
    return next((argument for argument in after if argument in ROLES), None)


def install() -> None:
    role = role_of(sys.orig_argv)
    if role is None or "REQUEST_PATH_FOLDER" not in os.environ:
        return
    folder = Path(os.environ["REQUEST_PATH_FOLDER"])
    root, background = (os.environ[f"REQUEST_PATH_{name}"] for name in ("ROOT", "BACKGROUND"))
    recorder = Recorder(root, background, folder, role)
    threading.Thread(target=recorder.follow_phases, name="path recorder", daemon=True).start()
    threading.setprofile(recorder.profile)
    sys.setprofile(recorder.profile)


install()
