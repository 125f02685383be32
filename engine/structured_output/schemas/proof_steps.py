"""Budget of the proofs that rewriting needs, shared by all schemas of one text."""

from __future__ import annotations

from dataclasses import dataclass

MAX_DISJOINTNESS_STEPS = 300_000  # about 0.3 s
MAX_NEGATION_STEPS = 20_000


@dataclass(slots=True)
class ProofSteps:
    """Steps that are left. Proofs that exceed them count as not found."""

    disjointness: int = MAX_DISJOINTNESS_STEPS
    negation: int = MAX_NEGATION_STEPS
