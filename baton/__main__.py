"""The `baton` command, also as `python -m baton`."""

import sys

from baton.imports import quick_imports

INTERRUPTED = 130


def main() -> None:
    """Run the command. Ctrl-C ends it without a traceback, even during imports."""
    try:
        with quick_imports():
            from baton.cli import main as run  # Ctrl-C can interrupt it here

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
