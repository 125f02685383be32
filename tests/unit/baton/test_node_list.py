from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from baton.cluster.local_cluster import NodeList

OWNER = """
from baton.cluster.local_cluster import NodeList
nodes = NodeList()
nodes.write(["localhost:1"])
print(nodes.path, flush=True)
input()
"""


def test_a_reader_gets_the_addresses_that_were_written_last() -> None:
    with NodeList() as nodes:
        assert Path(nodes.path).read_text() == ""
        nodes.write(["localhost:1", "localhost:22"])
        assert Path(nodes.path).read_text() == "localhost:1\nlocalhost:22"
        nodes.write(["localhost:3"])
        assert Path(nodes.path).read_text() == "localhost:3"


def test_a_list_ends_with_the_process_that_owns_it() -> None:
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as owner:
        assert owner.stdout is not None
        path = Path(owner.stdout.readline().strip())
        assert path.read_text() == "localhost:1"

        owner.kill()
        owner.wait()

        with pytest.raises(FileNotFoundError):
            path.read_text()
