"""Wrapper of docker compose for a project of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Any free port, so that another cluster of the same file can run at the same time.
PUBLISH = "127.0.0.1:0"


def run(*command: str, environment: Mapping[str, str] | None = None) -> str:
    """Run a command and return its standard output. Raises CalledProcessError."""
    whole = {**os.environ, **(environment or {})}
    done = subprocess.run(
        command, cwd=ROOT, env=whole, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.strip()


def log_of(container: str) -> str:
    """Return the log of a container, whose process writes it to stderr."""
    command = ["docker", "logs", container]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


@dataclass(frozen=True)
class ContainerCluster:
    """Project of docker compose."""

    project: str
    files: tuple[str, ...] = ("docker-compose.yml",)
    environment: Mapping[str, str] = field(default_factory=dict)

    def compose(self, *arguments: str) -> str:
        files = [part for name in self.files for part in ("--file", name)]
        mine = {"BATON_PUBLISH": PUBLISH, "COMPOSE_PROJECT_NAME": self.project, **self.environment}
        return run("docker", "compose", *files, *arguments, environment=mine)

    @property
    def address(self) -> str:
        """Return the router's published address."""
        return self.compose("port", "router", "50051")

    def build(self) -> None:
        self.compose("build", "--quiet")

    def scale(self, *, prefill: int, decode: int) -> None:
        """Wait until all containers are healthy and surplus ones have ended."""
        sizes = ("--scale", f"prefill={prefill}", "--scale", f"decode={decode}")
        self.compose("up", "--detach", "--no-build", "--no-recreate", "--wait", *sizes)

    def down(self) -> None:
        self.compose("down", "--volumes", "--timeout", "10")

    def containers(self, *services: str) -> list[str]:
        return self.compose("ps", "--all", "--quiet", *services).splitlines()

    def container_of(self, service: str, node_id: str) -> str:
        """Return the container of a node, found by the node id in its log."""
        return next(one for one in self.containers(service) if node_id in log_of(one))

    def exit_codes(self) -> set[int]:
        reported = run("docker", "inspect", "--format", "{{.State.ExitCode}}", *self.containers())
        return {int(code) for code in reported.splitlines()}

    def received_bytes(self, service: str) -> int:
        """Return the bytes that the containers of a service have received over the network."""
        counter = "/sys/class/net/eth0/statistics/rx_bytes"
        reported = [run("docker", "exec", one, "cat", counter) for one in self.containers(service)]
        return sum(map(int, reported))


def missing() -> str:
    """Return why containers cannot run here; empty if they can."""
    for command in (("docker", "info"), ("docker", "compose", "version")):
        try:
            ended = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            return "docker is not installed"
        if ended.returncode:
            return f"{' '.join(command)}: {(ended.stderr or ended.stdout).strip()}"
    return ""
