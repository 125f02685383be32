"""The demo model, default of the commands that need one."""

from __future__ import annotations

from pathlib import Path

from baton.core.errors import ModelError

PACKAGE = Path(__file__).resolve().parent
# In a wheel, where setup.py puts it, and in a checkout.
PLACES = (PACKAGE / "models" / "demo", PACKAGE.parent / "models" / "demo")


def demo_model() -> str:
    """Return the folder of the demo model. Raises ModelError."""
    for folder in PLACES:
        if (folder / "config.json").exists():
            return str(folder)
    looked_in = ", ".join(map(str, PLACES))
    raise ModelError(f"the demo model is in none of {looked_in}; name a model with --model")
