# SPDX-License-Identifier: Apache-2.0
"""Views as arrays and tensors."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from cyclone_kv import Cache
from cyclone_kv.arrays import as_numpy, as_torch

from .conftest import key_of

VALUES = np.arange(24, dtype="f4").reshape(2, 3, 4)


def stored(cache: Cache) -> memoryview:
    assert cache.put(key_of(1), VALUES)
    view = cache.get(key_of(1))
    assert view is not None
    return view


def test_an_array_has_the_shape_asked_for_and_is_read_only(cache: Cache) -> None:
    view = stored(cache)
    array = as_numpy(view, "f4", (2, -1, 4))
    assert np.array_equal(array, VALUES)
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0, 0] = 1
    assert as_numpy(view).shape == (96,)
    with pytest.raises(ValueError, match=r"."):
        as_numpy(view, "f4", (5, 5))


def test_a_tensor_is_a_copy_that_may_be_written_to(cache: Cache) -> None:
    view = stored(cache)
    torch = pytest.importorskip("torch")
    tensor = as_torch(view, torch.float32, (2, 3, 4))
    assert np.array_equal(tensor.numpy(), VALUES)
    tensor[0, 0, 0] = 99
    assert as_numpy(view, "f4")[0] == 0
    assert as_torch(view, "bfloat16").numel() == 48
    assert as_torch(memoryview(b""), "float16", (0, 4)).shape == (0, 4)
    with pytest.raises(TypeError, match="dtype"):
        as_torch(view, "load")


@pytest.mark.skipif(
    hasattr(sys, "gettotalrefcount"), reason="torch ends a debug build of Python here"
)
def test_a_tensor_over_the_view_does_not_warn(cache: Cache) -> None:
    view = stored(cache)
    torch = pytest.importorskip("torch")
    tensor = as_torch(view, torch.float32, (2, 3, 4), copy=False)
    assert np.array_equal(tensor.clone().numpy(), VALUES)
