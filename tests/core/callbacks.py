# SPDX-License-Identifier: Apache-2.0
"""Python functions that threads of the engine call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_LASTING: list[Any] = []


def lasting_callback(ffi: Any, kind: Any, function: Callable[..., Any]) -> Any:
    """A callback that lives as long as the process.

    A thread of the engine may have read the pointer, or still be inside, when the test
    puts back what was there before: the code behind it must not be freed then.
    """
    callback = ffi.callback(kind, function)
    _LASTING.append(callback)
    return callback
