"""Triton kernels compile for GPUs, without one, and spill no registers of NVIDIA's."""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from baton.engine.runner.triton.availability import INTERPRETER_VARIABLE
from tests.support.triton_parts import require_triton

TOOL = "tools.report_triton_kernels"
NVIDIA = ["sm_80", "sm_90", "sm_100"]
TARGETS = [*NVIDIA, "gfx942"]
COMPILATION_LIMIT_S = 1800.0
MAX_SHARED_BYTES = 99 * 1024  # of a program on the smallest of them: sm_86 and sm_89


def compiled(folder: Path, *options: str) -> Sequence[dict[str, Any]]:
    """Return the resources of the compiled kernels.

    On a busy machine, all kernels take longer than a test may without being taken for one that
    hangs. The limit of compilation replaces that of the test, which would end the process.
    """
    require_triton()
    faulthandler.cancel_dump_traceback_later()
    environment = os.environ | {"TRITON_CACHE_DIR": str(folder)}
    environment.pop(INTERPRETER_VARIABLE, None)
    command = [sys.executable, "-W", "ignore", "-m", TOOL, "--json", *options]
    done = subprocess.run(
        command,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=COMPILATION_LIMIT_S,
    )
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def check_resources(found: Sequence[dict[str, Any]]) -> None:
    spilling = [str(each["name"]) for each in found if each["stack_bytes"]]
    assert [name for name in spilling if not may_spill(name, str(found[0]["target"]))] == []
    assert max(int(each["shared_bytes"]) for each in found) <= MAX_SHARED_BYTES


def may_spill(name: str, target: str) -> bool:
    """Return whether a kernel is known to spill: wide latent attention on AMD's GPUs."""
    return target == "gfx942" and " 576/512 " in name and not name.endswith(" bfloat16")


def test_attention_of_usual_heads_compiles_without_spills(tmp_path: Path) -> None:
    found = compiled(tmp_path, "--target", "sm_90", "--only", "attention 128 bfloat16")

    assert len(found) == 3
    check_resources(found)


@pytest.mark.triton
@pytest.mark.parametrize("target", NVIDIA)
def test_tiles_of_few_and_of_many_tokens_multiply_by_the_same_instruction(
    target: str, tmp_path: Path
) -> None:
    options = "--target", target, "--only"
    found = [
        *compiled(tmp_path, *options, "linear int4 group 128 tokens"),
        *compiled(tmp_path, *options, "experts up plain tokens"),
        *compiled(tmp_path, *options, "linear plain tokens"),
        *compiled(tmp_path, *options, "heads plain tokens"),
    ]

    products = {str(each["products"]) for each in found if "bfloat16" in str(each["name"])}
    assert products == {"['mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32']"}


@pytest.mark.triton
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_without_spills(target: str, tmp_path: Path) -> None:
    found = compiled(tmp_path, "--target", target)

    names = {str(each["name"]).split()[0] for each in found}
    assert names == {
        "rms_norm", "rope", "gate", "multiply_sigmoid", "add", "add_and_norm", "find_peaks",
        "write", "attention", "segments", "merge", "convolve", "recur", "gated_norm",
        "scatter_bias", "count_tokens", "constrain", "draw", "find_best", "logprobs",
        "linear", "rows", "plan_tiles", "experts", "sum_experts", "heads", "choose_experts",
        "sum_pieces", "merge_pieces", "project", "expand",
    }  # fmt: skip
    check_resources(found)
