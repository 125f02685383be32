"""The `baton` command, also as `python -m baton`."""

import sys

from baton.imports import uncollected

INTERRUPTED = 130


def main() -> None:
    """Run the command. Ctrl-C ends it without a traceback, even during imports."""
    try:
        with uncollected():
            from baton.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
