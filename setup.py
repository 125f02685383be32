"""Everything about the package is in pyproject.toml; this only adds a step to the build."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class GenerateThenBuild(build_py):
    """Generates the gRPC stubs before the build collects the modules."""

    def run(self) -> None:
        generate = Path(__file__).resolve().parent / "protos" / "generate.py"
        subprocess.run([sys.executable, str(generate)], check=True)
        super().run()


setup(
    cmdclass={"build_py": GenerateThenBuild},
    package_data={"baton.v1": ["*.pyi"]},
)
