"""Matrix of docs/models.md: the parts of each family that torch computes in a native model.

A native forward pass must execute no torch arithmetic but that of the parts that the log names.
`pytest tests/golden/test_family_matrix.py --write-models-page` writes the matrix.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from baton.core.ids import RequestId
from baton.engine.runner.families.table import FAMILIES
from baton.engine.runner.kernels import torch_parts
from baton.engine.runner.load import RunnerConfig, load_runner
from tests.support.families import (
    FAMILY_VARIANTS,
    STATE_VARIANTS,
    WRAPPED_PLAIN,
    WRAPPED_TEXT,
)
from tests.support.kernels import kernels_by_variant
from tests.support.models import VARIANTS, prompt_of
from tests.support.packed_folders import EVERY_FORMAT, FORMATS_BY_FAMILY, write_quantized
from tests.support.runner_drivers import Drive, Driver

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- matrix: begin -->\n", "<!-- matrix: end -->\n"
PLAIN = {name: VARIANTS[name] for name in ("llama", "mistral", "qwen2", "qwen3")}
EVERY_VARIANT = {
    **PLAIN,
    **FAMILY_VARIANTS,
    **WRAPPED_PLAIN,
    **WRAPPED_TEXT,
    **STATE_VARIANTS,
}
LENGTH = 40
# Operations that compute nothing new: memory, indices, comparisons.
MOVES = frozenset(
    {
        *(
            "arange",
            "cat",
            "clone",
            "contiguous",
            "copy_",
            "detach",
            "detach_",
            "empty",
            "empty_like",
        ),
        *("eq", "flatten", "gather", "gt", "index", "index_select", "isneginf", "item"),
        *("lift_fresh", "lt", "max", "new_ones", "randint", "reshape", "resolve_conj"),
        *(
            "resolve_neg",
            "select",
            "slice",
            "split_with_sizes",
            "to",
            "transpose",
            "unbind",
            "unsqueeze",
            "view",
            "where",
            "zeros_like",
        ),
    }
)
ARITHMETIC: Mapping[str, frozenset[str]] = {
    torch_parts.EMBEDDING_SCALE: frozenset({"mul"}),
    torch_parts.LOGITS_SCALE: frozenset({"mul_"}),
    torch_parts.LOGITS_SOFTCAP: frozenset({"mul_", "sigmoid_", "sub_"}),
    torch_parts.ROPE_BY_LENGTH: frozenset({"cos", "sin", "div", "mul", "pow", "reciprocal"}),
    torch_parts.COLUMN_ORDER: frozenset(),
    torch_parts.EXPERT_SCALES: frozenset({"mul"}),
    torch_parts.PER_LAYER_INPUTS: frozenset({"add", "mul"}),
    torch_parts.STREAMS: frozenset(
        {
            *("add", "add_", "addcmul_", "clamp", "div", "mean", "mul", "sqrt", "square", "sub"),
            *("sum", "tanh"),
        }
    ),
    torch_parts.SPARSE_GATES: frozenset({"div", "mul", "relu_", "sqrt", "square", "sub", "sum"}),
    torch_parts.LAYER_SCALE: frozenset({"mul"}),
    torch_parts.EXPERT_SUM: frozenset({"_unique2", "index_add_", "mul"}),
}

pytestmark = pytest.mark.skipif(not kernels_by_variant(), reason="no C++ compiler here")

FolderOf = Callable[[str], Path]


class OperationRecorder(TorchDispatchMode):
    """Records the names of the torch operations that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.names.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def logged_parts(folder: Path, log: pytest.LogCaptureFixture, **settings: Any) -> list[str]:
    """Load native kernels and compute some tokens. Return the parts that the log names.

    Checks that torch computes these parts and no other.
    """
    log.clear()
    config = RunnerConfig(
        str(folder), kv_cache_bytes=1 << 20, dtype="bfloat16", kernels="native", **settings
    )
    with log.at_level(logging.INFO, "baton.engine.runner.kernels"), load_runner(config) as runner:
        for name in ("warm-up", "recorded"):
            with OperationRecorder() as recorder:
                blocks = runner.kv_memory.num_blocks
                driver = Driver(runner, num_blocks=blocks, block_size=16, chunk=23)
                driver.run(Drive(RequestId(name), prompt_of(LENGTH), num_tokens=2))
    lines = [line for line in log.messages if "torch computes" in line]
    assert len(lines) < 2
    named = lines[0].partition("torch computes the ")[2].split(", the ") if lines else []
    expected = frozenset[str]().union(*(ARITHMETIC[part] for part in named))
    assert recorder.names - MOVES == expected
    return named


@pytest.fixture
def folder_of(family_folder: FolderOf, model_folder: FolderOf) -> FolderOf:
    return lambda name: model_folder(name) if name in PLAIN else family_folder(name)


def test_the_matrix_of_the_models_page_is_correct(
    folder_of: FolderOf, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    rows, architectures = [], set()
    for name in EVERY_VARIANT:
        folder = folder_of(name)
        [architecture] = json.loads((folder / "config.json").read_text())["architectures"]
        architectures.add(architecture)
        parts = logged_parts(folder, caplog)
        assert all(logged_parts(folder, caplog, quantize=q) == parts for q in ("int8", "int4"))
        rows.append(matrix_row(architecture, name, parts))

    assert architectures == FAMILIES.keys()
    matrix = f"{BEGIN}\n{HEADER}{''.join(sorted(rows))}\n{END}"
    if request.config.getoption("--write-models-page", False):
        write_matrix(matrix)
    assert matrix in PAGE.read_text(encoding="utf-8")


HEADER = (
    "| architecture | model of the tests | torch computes | quantized folders in the tests |\n"
    "|---|---|---|---|\n"
)


def matrix_row(architecture: str, name: str, parts: list[str]) -> str:
    """Return the row of a model, or nothing if it is native as a whole and has no such folders."""
    formats: Iterable[str] = FORMATS_BY_FAMILY.get(name, ())
    if name == "llama":
        formats = [written for written in EVERY_FORMAT if written != "mxfp4"]
    if not parts and not formats:
        return ""
    cells = (f"`{architecture}`", name, ", ".join(parts), ", ".join(formats))
    return f"| {' | '.join(cells)} |\n"


def write_matrix(matrix: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(before + matrix + rest.partition(END)[2], encoding="utf-8")


def test_reordered_columns_leave_the_sum_over_experts_to_torch(
    folder_of: FolderOf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    packed, _ = write_quantized(folder_of("qwen3-moe"), tmp_path, EVERY_FORMAT["gptq-v2-ordered"])

    assert logged_parts(packed, caplog) == [torch_parts.COLUMN_ORDER, torch_parts.EXPERT_SUM]


def test_unordered_columns_are_native(
    folder_of: FolderOf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    packed, _ = write_quantized(folder_of("qwen3-moe"), tmp_path, EVERY_FORMAT["awq"])

    assert logged_parts(packed, caplog) == []
