# SPDX-License-Identifier: Apache-2.0
"""Views as numpy arrays and torch tensors, which are imported on use.

A view from ``Cache.get`` is memory of the volume, mapped for reading only.  numpy keeps
that in mind and refuses to write.  torch does not: see ``as_torch``.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy
    import torch
    from typing_extensions import Buffer

__all__ = ["as_numpy", "as_torch"]


def as_numpy(
    view: Buffer, dtype: Any = "uint8", shape: Sequence[int] | None = None
) -> numpy.ndarray[Any, Any]:
    """Return an array over ``view``, without a copy.

    The array is read-only if the view is, and keeps the block pinned while it lives.
    ``shape`` may have one -1; without it the array has one dimension.  ``ValueError``
    when the bytes do not fit ``dtype`` and ``shape``.
    """
    import numpy as np

    array: numpy.ndarray[Any, Any] = np.frombuffer(memoryview(view), dtype=dtype)
    return array if shape is None else array.reshape(tuple(shape))


def as_torch(
    view: Buffer,
    dtype: torch.dtype | str = "uint8",
    shape: Sequence[int] | None = None,
    *,
    copy: bool = True,
) -> torch.Tensor:
    """Return a CPU tensor with the bytes of ``view``.

    ``copy=True`` (the default) returns memory of its own, which may be written to.

    ``copy=False`` returns a tensor over the view itself, and keeps the block pinned
    while it lives. torch has no read-only tensors: writing to this one, also by an
    in-place operation, ends the process by a signal when the view came from
    ``Cache.get``.  Use it as a source of copies to a device, and for nothing else.

    ``dtype`` is a ``torch.dtype`` or its name, such as ``"bfloat16"``.
    """
    import torch

    kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    if not isinstance(kind, torch.dtype):
        raise TypeError(f"{dtype!r} is not a dtype of torch")
    source = memoryview(view).cast("B")
    if source.nbytes == 0:
        tensor = torch.empty(0, dtype=kind)
    elif copy:
        tensor = torch.frombuffer(bytearray(source), dtype=kind)
    else:
        with warnings.catch_warnings():
            # "The given buffer is not writable": that is what the caller asked for.
            warnings.simplefilter("ignore", UserWarning)
            tensor = torch.frombuffer(source, dtype=kind)
    return tensor if shape is None else tensor.reshape(tuple(shape))
