"""The `baton` command, also as `python -m baton`."""

import sys

INTERRUPTED = 130


def main() -> None:
    """Ctrl-C ends it without a traceback, while its libraries are imported, too."""
    try:
        from baton.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
