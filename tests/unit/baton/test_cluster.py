"""Arguments of processes that a local cluster restarts."""

from __future__ import annotations

from baton.cluster.local_cluster import with_port


def test_a_restarted_process_gets_the_ports_that_were_bound() -> None:
    arguments: tuple[str, ...] = ("router", "--port", "0", "--http-port", "0", "--policy", "prefix")

    arguments = with_port(arguments, "--port", "127.0.0.1:1234")
    arguments = with_port(arguments, "--http-port", "127.0.0.1:5678")

    assert arguments == ("router", "--port", "1234", "--http-port", "5678", "--policy", "prefix")


def test_replacing_an_option_does_not_add_a_missing_one() -> None:
    assert with_port(("decode", "--port", "0"), "--http-port", "") == ("decode", "--port", "0")
