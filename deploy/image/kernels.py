"""Builds the native kernels for every CPU variant that the compiler supports."""

from __future__ import annotations

from engine.runner.kernels.build import VARIANTS, KernelsUnavailable, library


def main() -> None:
    for variant in VARIANTS:
        try:
            print("built", library(variant))
        except KernelsUnavailable as error:
            print("left out", variant.name, error)


if __name__ == "__main__":
    main()
