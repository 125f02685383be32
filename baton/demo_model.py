"""The model that comes with Baton, for commands that are given none."""

from __future__ import annotations

from pathlib import Path

from engine.errors import ModelError

# A checkout, the working folder, the container image.
PLACES = (
    Path(__file__).resolve().parent.parent / "models" / "demo",
    Path("models/demo"),
    Path("/models/demo"),
)


def demo_model() -> str:
    """Its folder. Raises ModelError."""
    for folder in PLACES:
        if (folder / "config.json").exists():
            return str(folder)
    looked_in = ", ".join(map(str, PLACES))
    raise ModelError(f"the demo model is in none of {looked_in}; name a model with --model")
