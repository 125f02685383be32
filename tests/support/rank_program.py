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
    signal.pause()


if __name__ == "__main__":
    main()
