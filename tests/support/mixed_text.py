"""Lines of mixed text for tokenizers: code, scripts, emoji, control characters, look-alikes."""

# ruff: noqa: RUF001

from __future__ import annotations

import random
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

TEXT = """
the quick brown Fox jumps OVER lazy dogs don't I'M we'LL they'd it's HTTPServer naïve café
Größe straße élève señor Привет мир Ελληνικά ქართული हिन्दी नमस्ते தமிழ் ภาษาไทย tiếng
def return self._value += 0x1F != lambda: {} [] => </div> // /* */ #include 3.14159 1e-9
"""
WORDS = TEXT.split()
CJK = "東京都は日本の首都です。人工智能模型，한국어 문장입니다カタカナひらがな漢字！？『』"
RTL = "שלום עולם مرحبا بالعالم السَّلَامُ עִבְרִית فارسی اردو\u200f\u200e\u202b"
EMOJI = ("🙂", "👩‍👩‍👧‍👦", "🇩🇪", "👍🏽", "❤️", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "🫠", "☺", "✈️", "1️⃣")
MARKS = "\u0301\u0308\u0327\u093c\u0323\u20dd\u034f\ufe0f\u3099"
SPACES = (
    " ",
    "  ",
    "   ",
    "\t",
    "\n",
    "\r\n",
    "\n\n",
    "\u00a0",
    "\u3000",
    "\u2009",
    "\u200b",
    "\x85",
)
LOOK_ALIKES = (
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<bos>",
        "<eos>",
        "<unk>",
        "<pad>",
        "<s>",
        "</s>",
    ),
    *(
        "<start_of_turn>",
        "<end_of_turn>",
        "<|im_start",
        "im_end|>",
        "<unused7>",
        "<unused99>x",
        "<0x0A>",
    ),
    *(
        "<0xE2>",
        "[multimodal]",
        "<repo_name>",
        "<mask>",
        "▁",
        "▁▁the",
        "Ġ",
        "Ċ",
        "<table>",
        "</h1>",
    ),
)
Maker = Callable[[random.Random], str]


def _characters(draw: random.Random) -> str:
    """Characters of all planes, without surrogates."""
    limit = draw.choice((0x80, 0x250, 0x3000, 0x10000, 0x20000, 0x110000))
    points = (draw.randrange(limit) for _ in range(draw.randint(1, 30)))
    return "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)


MAKERS: tuple[Maker, ...] = (
    lambda draw: " ".join(draw.choices(WORDS, k=draw.randint(1, 12))),
    lambda draw: "".join(draw.choices(CJK, k=draw.randint(1, 40))),
    lambda draw: "".join(draw.choices(RTL, k=draw.randint(1, 40))),
    lambda draw: "".join(draw.choices(EMOJI, k=draw.randint(1, 8))),
    lambda draw: "".join(chr(draw.choice((*range(32), 127, *range(128, 160)))) for _ in range(9)),
    lambda draw: "".join(draw.choices(SPACES, k=draw.randint(1, 12))),
    lambda draw: draw.choice((" ", "\n", "\t", "=", "-", "a", "ab")) * draw.randint(1, 70),
    lambda draw: "".join(draw.choices(LOOK_ALIKES, k=draw.randint(1, 4))),
    lambda draw: "".join(
        letter + "".join(draw.choices(MARKS, k=draw.randint(0, 3)))
        for letter in draw.choices("aeouınçकがAZ9 .", k=draw.randint(1, 15))
    ),
    lambda draw: "".join(draw.choices("0123456789.,-+ ²½٣४Ⅷ", k=draw.randint(1, 20))),
    lambda draw: "".join(draw.choices("!?.,;:'\"()[]{}<>/\\|@#$%^&*-_=+`~", k=draw.randint(1, 20))),
    _characters,
)


def mixed_lines(count: int, *, seed: int = 37) -> list[str]:
    """Return generated lines, the same ones for a seed."""
    draw = random.Random(seed)
    return [
        draw.choice(("", " ", "\n")).join(
            draw.choice(MAKERS)(draw) for _ in range(draw.choice((1, 1, 2, 5)))
        )
        for _ in range(count)
    ]


def real_lines(count: int) -> list[str]:
    """Return lines of files on this machine: Python's library and the documentation of Baton."""
    library, documents = Path(sysconfig.get_path("stdlib")), Path(__file__).parents[2] / "docs"
    files = [*sorted(documents.rglob("*.md")), *sorted(library.glob("*.py"))]
    files += sorted((library / "test").glob("test_*unicode*.py"))
    lines = list(_lines_of(files))
    return random.Random(count).sample(lines, min(count, len(lines)))


def _lines_of(files: list[Path]) -> Iterator[str]:
    for file in files:
        for line in file.read_text("utf-8", errors="ignore").splitlines(keepends=True):
            if line.strip():
                yield line
