"""Build steps that pyproject.toml cannot express; everything else about the package is there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
# Variants of the kernels that the wheel gets, separated by commas. Default: all that the compiler
# can build. The others are built at the first start, where there is a compiler.
VARIANTS = os.environ.get("BATON_WHEEL_KERNELS")


class BuildPackages(build_py):
    """Generates the gRPC stubs before the modules are collected; adds kernels and demo model."""

    def run(self) -> None:
        subprocess.run([sys.executable, str(ROOT / "protos" / "generate.py")], check=True)
        super().run()
        if not self.editable_mode:
            packaged = Path(self.build_lib, "baton", "models", "demo")
            shutil.copytree(ROOT / "models" / "demo", packaged, dirs_exist_ok=True)
            _add_kernels(Path(self.build_lib, "baton", "engine", "runner", "kernels", "built"))


def _add_kernels(folder: Path) -> None:
    sys.path.insert(0, str(ROOT))
    from baton.engine.runner.kernels import build

    for variant in build.VARIANTS:
        if VARIANTS is None or variant.name in VARIANTS.split(","):
            print(f"adding the kernels for {variant.name}")
            try:
                library = build.library(variant)
            except build.KernelsUnavailable as error:
                print(f"the wheel has no kernels for {variant.name}: {error}")
            else:
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy(library, folder)


setup(
    cmdclass={"build_py": BuildPackages},
    package_data={"baton.v1": ["*.pyi"]},
)
