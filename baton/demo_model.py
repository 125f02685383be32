"""The demo model, default of the commands that need one."""

from __future__ import annotations

from pathlib import Path

from errors import ModelError

# A checkout, the working folder, the container image.
PLACES = (
    Path(__file__).resolve().parent.parent / "models" / "demo",
    Path("models/demo"),
    Path("/models/demo"),
)


def demo_model() -> str:
    """Return the folder of the demo model. Raises ModelError."""
    for folder in PLACES:
        if (folder / "config.json").exists():
            return str(folder)
    looked_in = ", ".join(map(str, PLACES))
    raise ModelError(f"the demo model is in none of {looked_in}; name a model with --model")
