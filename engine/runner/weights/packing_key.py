"""Key of packed weights: all that their bytes depend on."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from glob import glob
from pathlib import Path

import torch

import baton.checkpoint
import baton.engine.runner
from baton.checkpoint import weight_digests
from baton.checkpoint.checkpoint import Tensors
from baton.checkpoint.weight_digests import FileIdentity

REVISION = 1  # of packed_file
MIN_AGE_S = weight_digests.MIN_AGE_S
MIN_CACHED_BYTES = weight_digests.MIN_CACHED_BYTES


def are_cacheable(files: Sequence[FileIdentity]) -> bool:
    """Return whether a later change of the files would show, and reading them takes long."""
    is_old_enough = all(time.time() - each.changed_s >= MIN_AGE_S for each in files)
    return is_old_enough and sum(each.num_bytes for each in files) >= MIN_CACHED_BYTES


def are_quantized(files: Sequence[FileIdentity], tensors: Tensors) -> bool:
    """Return whether files have fewer bytes than their tensors would have in bfloat16."""
    num_numbers = sum(math.prod(shape) for shape in tensors.shapes().values())
    return sum(each.num_bytes for each in files) < 1.9 * num_numbers


def packing_key(
    files: Sequence[FileIdentity], model: str, quantize: Sequence[str], layout: str
) -> str:
    """Return the key of a model's packed weights, as part of a file name.

    It changes with each source file of loader and checkpoint: none of them has to be known as one
    on which the bytes depend.
    """
    identities = [asdict(each) for each in files]
    parts = [REVISION, identities, model, quantize, layout, _digest_sources(), torch.__version__]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


@cache
def _digest_sources() -> str:
    digest = hashlib.sha256()
    for package in (baton.checkpoint, baton.engine.runner):
        folder = Path(str(package.__file__)).parent
        for source in sorted(glob("**/*.py", root_dir=folder, recursive=True)):
            digest.update(f"{source}\n".encode())
            digest.update((folder / source).read_bytes())
    return digest.hexdigest()
