# SPDX-License-Identifier: Apache-2.0
"""Many may be inside, or one alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["Gate"]


class Gate:
    """Transfers pass together; who takes apart what they use waits until all are out.

    While somebody waits for that, nobody new gets in.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Be inside together with others."""
        with self._changed:
            while self._closed:
                self._changed.wait()
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self, timeout_s: float | None = None) -> Iterator[bool]:
        """Be inside alone.  False when others are still there after the timeout."""
        with self._changed:
            while self._closed:
                self._changed.wait()
            self._closed = True
            try:
                left = self._changed.wait_for(lambda: self._inside == 0, timeout_s)
            except BaseException:
                self._closed = False
                self._changed.notify_all()
                raise
        try:
            yield left
        finally:
            with self._changed:
                self._closed = False
                self._changed.notify_all()
