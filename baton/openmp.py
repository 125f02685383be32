"""Wait policy of torch's OpenMP threads: idle ones sleep. Import this module before torch.

An idle thread that spins does so on a core that another thread could use: one of the kernels, or of
another process. With two cores, a decode step of the library takes several times as long then.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import cache

VARIABLE = "OMP_WAIT_POLICY"  # which OpenMP reads when torch is loaded

_is_late = VARIABLE not in os.environ and "torch" in sys.modules
os.environ.setdefault(VARIABLE, "PASSIVE")


@cache
def warn_if_threads_spin() -> None:
    """Log once that torch was loaded before the wait policy was set."""
    if _is_late:
        logging.getLogger(__name__).warning(
            "torch was imported before baton.LLM, so its idle threads spin on cores that the "
            "model needs: import LLM first, or set %s=PASSIVE",
            VARIABLE,
        )
