"""Tokenizer files of a model as a zip archive, in chunks, as SMG's GetTokenizer sends them."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from collections.abc import AsyncGenerator
from pathlib import Path

from smg_grpc_proto.generated import common_pb2

from baton.checkpoint.hub import resolve_model
from baton.checkpoint.json_fields import MAX_TEXT_BYTES
from baton.rpc.errors import UnsupportedInput

CHUNK_BYTES = 64 << 10
PATTERNS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "*.jinja",
    "*.model",
    "*.tiktoken",
)


class TokenizerBundle:
    """Archive of the tokenizer of one model. It is made once, on the first call."""

    def __init__(self, model: str) -> None:
        """`model` is a folder or a name of the hub; empty: this process has no files of it."""
        self._model = model
        self._archive: bytes | None = None
        self._making = asyncio.Lock()

    async def chunks(self) -> AsyncGenerator[common_pb2.GetTokenizerChunk, None]:
        """Yield the archive; its last chunk has the digest. Raises UnsupportedInput."""
        async with self._making:
            if self._archive is None:
                self._archive = await asyncio.to_thread(_make_archive, self._folder())
        archive = self._archive
        digest = hashlib.sha256(archive).hexdigest()
        for first in range(0, len(archive), CHUNK_BYTES):
            is_last = first + CHUNK_BYTES >= len(archive)
            yield common_pb2.GetTokenizerChunk(
                data=archive[first : first + CHUNK_BYTES], sha256=digest if is_last else ""
            )

    def _folder(self) -> Path:
        if not self._model:
            raise UnsupportedInput(
                "this router has no tokenizer to send: start it with --model, or the gateway with "
                "--tokenizer-path"
            )
        path = resolve_model(self._model, offline=True)
        if not path.is_dir():
            raise UnsupportedInput(
                f"{path.name} has its tokenizer inside: start the gateway with --tokenizer-path"
            )
        return path


def _make_archive(folder: Path) -> bytes:
    buffer = io.BytesIO()
    paths = {path for pattern in PATTERNS for path in folder.glob(pattern) if path.is_file()}
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(paths):
            if path.stat().st_size <= MAX_TEXT_BYTES:
                archive.write(path, path.name)
    return buffer.getvalue()
