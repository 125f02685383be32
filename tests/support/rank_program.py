"""Rank that computes nothing: the model's name in its settings says how its start goes."""

import logging
import os
import signal

from baton.core.errors import ModelError
from baton.engine.runner.ranks.following import FirstRank

log = logging.getLogger("baton.rank")


def main() -> None:
    first = FirstRank.of_command_line()
    setup, fd = first.receive_setup()
    os.close(fd)
    log.info("loading %s", setup.config.model)
    if setup.config.model == "slow":
        signal.pause()
    with first.carrying_out():
        if setup.config.model == "faulty":
            raise ModelError("no tensors")
        if setup.config.model == "large":
            raise MemoryError("64 GiB")
    _, fd = first.receive_begin()
    os.close(fd)
    with first.carrying_out():
        pass
    first.load_adapters(LoggedAdapters())


class LoggedAdapters:
    """Implements `AdapterParts`."""

    def load(self, number: int, parts: object) -> None:
        log.info("adapter %d: %s", number, parts)
        if parts == "too large":
            raise MemoryError(parts)

    def drop(self, number: int) -> None:
        log.info("no adapter %d", number)


if __name__ == "__main__":
    main()
