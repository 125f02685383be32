"""docker compose, as a person would use it, on a project of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Any port that is free, so that a cluster of the same file may run beside this one.
ENVIRONMENT = {"BATON_PUBLISH": "127.0.0.1:0", "COMPOSE_PROJECT_NAME": "baton-test"}


def run(*command: str) -> str:
    """What it printed. Raises CalledProcessError with all that it said in the test's output."""
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.strip()


def log_of(container: str) -> str:
    """The processes log to stderr."""
    command = ["docker", "logs", container]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def compose(*arguments: str) -> str:
    return run("docker", "compose", *arguments)


class ContainerCluster:
    """A cluster that is up."""

    @property
    def address(self) -> str:
        """Where the router is reached from outside."""
        return compose("port", "router", "50051")

    def scale(self, *, prefill: int, decode: int) -> None:
        """Returns when every container is healthy, and those that are too many have ended."""
        sizes = ("--scale", f"prefill={prefill}", "--scale", f"decode={decode}")
        compose("up", "--detach", "--no-build", "--no-recreate", "--wait", *sizes)

    def containers(self, *services: str) -> list[str]:
        return compose("ps", "--all", "--quiet", *services).splitlines()

    def container_of(self, service: str, node_id: str) -> str:
        """By what the node says of itself when it starts."""
        return next(one for one in self.containers(service) if node_id in log_of(one))

    def exit_codes(self) -> set[int]:
        told = run("docker", "inspect", "--format", "{{.State.ExitCode}}", *self.containers())
        return {int(code) for code in told.splitlines()}

    def received_bytes(self, service: str) -> int:
        """By the network, by all containers of the service together."""
        counter = "/sys/class/net/eth0/statistics/rx_bytes"
        told = [run("docker", "exec", one, "cat", counter) for one in self.containers(service)]
        return sum(map(int, told))


def missing() -> str:
    """Why there can be no containers here; empty if there can."""
    for command in (("docker", "info"), ("docker", "compose", "version")):
        try:
            ended = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            return "docker is not installed"
        if ended.returncode:
            return f"{' '.join(command)}: {(ended.stderr or ended.stdout).strip()}"
    return ""
