# SPDX-License-Identifier: Apache-2.0
"""Tell the weights in a model folder apart from others, in about a second.

The bytes of a KV block depend on the weights, and a folder's name does not tell them
apart.  Reading hundreds of gigabytes at each start is no answer either.  So the
fingerprint digests name and size of each weights file and a sample of its bytes: of a
safetensors file the whole header and three pages of each tensor (first, middle, last),
of any other file 4096 pages at equal distances.  Training changes next to every page of
a tensor that it changes at all; an edit made to defeat the sample is not noticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["folder_fingerprint"]

_PAGE = 4096
_SAMPLES = 4096
_HEADER_MAX = 100 << 20  # what the format allows
# In the order in which engines prefer them; the first kind that is there counts.
_KINDS = (("*.safetensors",), ("*.bin", "*.pt", "*.pth"), ("*.gguf",))


def folder_fingerprint(folder: Path) -> str:
    """Return a fingerprint of the weights in `folder`, or of one file.

    ValueError when there are none, OSError when they cannot be read.
    """
    files = [folder] if folder.is_file() else []
    for patterns in _KINDS if not files else ():
        files = sorted({file for pattern in patterns for file in folder.glob(pattern)})
        if files:
            break
    if not files:
        raise ValueError(f"{folder} has no weights (*.safetensors, *.bin, *.gguf)")
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(json.dumps([file.name, size]).encode())
        with file.open("rb") as stream:
            for place in _places(stream, size):
                stream.seek(place)
                digest.update(stream.read(_PAGE))
    return f"sampled:{digest.hexdigest()}"


def _places(stream: BinaryIO, size: int) -> Iterator[int]:
    """Yield the offsets of the pages to read."""
    tensors = _tensors(stream, size)
    if tensors is None:
        step = max(size // _SAMPLES, _PAGE)
        yield from range(0, size, step)
        yield max(size - _PAGE, 0)
        return
    start, spans = tensors
    yield from range(0, start, _PAGE)
    for first, last in spans:
        yield start + first
        yield start + (first + last) // 2
        yield start + max(first, last - _PAGE)


def _tensors(stream: BinaryIO, size: int) -> tuple[int, list[tuple[int, int]]] | None:
    """Return where the data of a safetensors file begins, and each tensor's span."""
    length = int.from_bytes(stream.read(8), "little")
    if not 2 <= length <= min(_HEADER_MAX, size - 8):
        return None
    try:
        header = json.loads(stream.read(length))
        spans = sorted(
            (int(first), int(last))
            for name, tensor in header.items()
            if name != "__metadata__"
            for first, last in [tensor["data_offsets"]]
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    start = 8 + length
    if any(not 0 <= first <= last <= size - start for first, last in spans):
        return None
    return start, spans
