"""Program that shows a variable and waits for the signal that ends it."""

import os
import signal
import sys


def main() -> None:
    for name in sys.argv[1:]:
        print(os.environ.get(name, ""), flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
