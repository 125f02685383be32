"""Options of models that nodes and routers share."""

from __future__ import annotations

from typing import Annotated

from baton.core.options import MODEL, Option

Mmproj = Annotated[
    str,
    Option(
        "GGUF file of the model's vision tower (of a router: of the first --model); the same for "
        "all nodes and routers. Default: mmproj*.gguf in the folder of a GGUF model.",
        MODEL,
    ),
]
