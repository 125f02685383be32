"""Build steps that pyproject.toml cannot express; everything else about the package is there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildPackages(build_py):
    """Generates the gRPC stubs before the modules are collected, and adds the demo model."""

    def run(self) -> None:
        subprocess.run([sys.executable, str(ROOT / "protos" / "generate.py")], check=True)
        super().run()
        if not self.editable_mode:
            packaged = Path(self.build_lib, "baton", "models", "demo")
            shutil.copytree(ROOT / "models" / "demo", packaged, dirs_exist_ok=True)


setup(
    cmdclass={"build_py": BuildPackages},
    package_data={"baton.v1": ["*.pyi"]},
)
