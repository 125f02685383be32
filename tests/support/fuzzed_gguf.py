"""Damaged copies of small GGUF files, and what loading each one comes to.

    python -m tests.support.fuzzed_gguf --count 2000 --seed 1

loads so many in a process with little memory, prints a report, and fails if one is neither loaded
nor refused by name within two seconds of processor time. The file that ends the process stays.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from baton.checkpoint.gguf.header import ARRAY, NUMBERS, STRING
from baton.checkpoint.hub import open_checkpoint
from baton.core.errors import InvalidConfig, InvalidRequest, ModelError
from baton.engine.runner.load import RunnerConfig, load_runner
from tests.support.gguf_files import write_gguf
from tests.support.models import save_tokenizer
from tests.support.random_folders import small_folder

MAX_SECONDS = 2.0
MAX_BYTES = 512 << 20  # beyond what the process has before the first file
MAX_ELEMENTS = 4  # of each list, whose places are damaged
EXTREMES = (0, 1, 2, 3, 8, 9, 31, 127, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
LARGE = (1 << 32, 1 << 40, 1 << 60, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
MESSAGES = [{"role": "user", "content": "hi"}]
Damage = Callable[[bytearray, Sequence["Place"], random.Random], None]


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of a header that are one number or one text."""

    offset: int
    size: int
    is_text: bool = False


@dataclass(slots=True)
class Report:
    """Results by the number of the file."""

    num_loaded: int = 0
    num_refused: int = 0
    failed: dict[int, str] = field(default_factory=dict)
    slowest_s: float = 0.0
    peak_bytes: int = 0


def base_files(folder: Path) -> list[bytes]:
    """Return small valid files: one with each kind of tokenizer, in bits and in floats."""
    small_folder(folder, "llama3.2-1b", vocab_size=320)
    save_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0}
    (folder / "config.json").write_text(json.dumps(config))
    return [
        write_gguf(folder, folder / "bytes.gguf", "Q4_0").path.read_bytes(),
        write_gguf(folder, folder / "pieces.gguf", tokenizer="llama").path.read_bytes(),
    ]


def fuzz(bases: Sequence[bytes], folder: Path, count: int, seed: int) -> Report:
    """Load damaged copies, one after the other."""
    report, before = Report(), _peak_bytes()
    for number in range(count):
        path = folder / f"{seed}-{number}.gguf"
        path.write_bytes(damaged(bases[number % len(bases)], f"{seed}-{number}"))
        started = time.process_time()
        try:
            load(path)
            report.num_loaded += 1
        except InvalidConfig:  # an option that the sizes of this file do not allow
            report.num_refused += 1
        except ModelError as error:
            report.num_refused += 1
            if str(path) not in str(error) and "chat template" not in str(error):
                report.failed[number] = f"the message does not name the file: {error}"
        except Exception as error:  # noqa: BLE001
            report.failed[number] = repr(error)[:300]
        report.slowest_s = max(report.slowest_s, time.process_time() - started)
        path.unlink()
    report.peak_bytes = _peak_bytes() - before
    return report


def load(path: Path) -> None:
    """Read all that the processes of a cluster read of a file."""
    config = RunnerConfig(str(path), kv_cache_bytes=1 << 22, max_model_len=64, num_threads=1)
    with load_runner(config):
        pass
    tokenizer = open_checkpoint(str(path)).load_tokenizer()
    tokenizer.decode(tokenizer.encode("hi there"))
    with contextlib.suppress(InvalidRequest):
        tokenizer.render_chat(MESSAGES)


def damaged(content: bytes, seed: str) -> bytes:
    draw = random.Random(seed)
    changed, places = bytearray(content), _Places(content).found
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        there = [each for each in places if each.offset + each.size < len(changed)]
        if any(each.is_text for each in there):
            draw.choice(DAMAGES)(changed, there, draw)
    return bytes(changed)


class _Places:
    """The numbers and texts of a header: all but those at the end of long lists."""

    def __init__(self, content: bytes) -> None:
        self.found: list[Place] = [Place(4, 4)]
        self._content = content
        self._at = 8
        num_tensors, num_fields = self._number(8), self._number(8)
        for _ in range(num_fields):
            self._text()
            self._value(self._number(4))
        for _ in range(num_tensors):
            self._text()
            for _ in range(self._number(4)):
                self._number(8)
            self._number(4)
            self._number(8)

    def _value(self, kind: int) -> None:
        if kind == STRING:
            self._text()
        elif kind != ARRAY:
            self._number(NUMBERS[kind].itemsize)
        else:
            kind, count = self._number(4), self._number(8)
            for number in range(count):
                kept = len(self.found)
                self._value(kind)
                if number >= MAX_ELEMENTS:
                    del self.found[kept:]

    def _text(self) -> None:
        size = self._number(8)
        self.found.append(Place(self._at, size, is_text=True))
        self._at += size

    def _number(self, size: int) -> int:
        self.found.append(Place(self._at, size))
        self._at += size
        return int.from_bytes(self._content[self._at - size : self._at], "little")


def _set_number(content: bytearray, places: Sequence[Place], draw: random.Random) -> None:
    place = draw.choice([each for each in places if not each.is_text])
    near = int.from_bytes(content[place.offset : place.offset + place.size], "little")
    values = (*EXTREMES, *LARGE, near + 1, near - 1, near * 2, near // 2, len(content))
    value = draw.choice(values) % (1 << 8 * place.size)
    content[place.offset : place.offset + place.size] = value.to_bytes(place.size, "little")


def _set_text(content: bytearray, places: Sequence[Place], draw: random.Random) -> None:
    """Put another text of the header, or junk, in the place of a text."""
    texts = [each for each in places if each.is_text]
    place, other = draw.choice(texts), draw.choice(texts)
    new = bytes(content[other.offset : other.offset + other.size])
    new = draw.choice((new, draw.randbytes(draw.randint(1, 40)), b"", b"\xff", b"{{" * 20))
    if draw.random() < 0.5:  # with a size that is right, which moves all that follows
        content[place.offset - 8 : place.offset] = len(new).to_bytes(8, "little")
        content[place.offset : place.offset + place.size] = new
    else:
        content[place.offset : place.offset + len(new)] = new


def _set_bytes(content: bytearray, places: Sequence[Place], draw: random.Random) -> None:
    end = draw.choice((places[-1].offset, len(content)))
    for _ in range(draw.choice((1, 4, 64))):
        content[draw.randrange(end)] = draw.choice((0, 1, 127, 128, 255, draw.randrange(256)))


def _cut(content: bytearray, places: Sequence[Place], draw: random.Random) -> None:
    end = draw.choice((draw.choice(places).offset, draw.randrange(len(content))))
    del content[end:]


def _move(content: bytearray, places: Sequence[Place], draw: random.Random) -> None:
    """Repeat or remove a part of the header."""
    first, last = sorted(draw.choice(places).offset for _ in range(2))
    part = content[first : min(last, first + 4096)]
    if draw.random() < 0.5:
        content[first:first] = part
    else:
        del content[first : first + len(part)]


DAMAGES: Sequence[Damage] = (_set_number, _set_number, _set_text, _set_bytes, _cut, _move)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Load damaged GGUF files.")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as made:
        bases = base_files(Path(made))
    folder = Path(tempfile.mkdtemp(prefix="fuzzed-gguf-"))
    (folder / "valid.gguf").write_bytes(bases[0])
    load(folder / "valid.gguf")
    (folder / "valid.gguf").unlink()
    _limit_memory()
    report = fuzz(bases, folder, options.count, options.seed)
    print(json.dumps(asdict(report), indent=2))
    left = [path.name for path in folder.iterdir()]
    print("left on disk:", left)
    if not left:
        folder.rmdir()
    return int(bool(report.failed or left or report.slowest_s > MAX_SECONDS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
