"""`python -m benchmarks NAME`, from a checkout of the repository."""

import sys

INTERRUPTED = 130


def main() -> None:
    """Run a benchmark. Ctrl-C ends it without a traceback, even during imports."""
    try:
        from benchmarks.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
