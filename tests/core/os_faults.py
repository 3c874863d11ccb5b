# SPDX-License-Identifier: Apache-2.0
"""Replaces members of the table of system calls (os.h) by Python functions.

    with OsTable(core) as table:
        table.replace("allocate", lambda fd, offset, length: -errno.EOPNOTSUPP)
        ...                                    # at the end all is as it was

A replacement reaches the real call through `table.native.<member>`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from callbacks import lasting_callback

# These answer no status that could be failed.
_NO_STATUS = {
    "monotonic_ns",
    "realtime_ns",
    "sleep_ns",
    "process_id",
    "user_id",
    "program_name",
}
# These are done even when they report a failure: otherwise the test itself would leak.
_DONE_ANYWAY = {"close_file", "unmap"}


class OsTable:
    def __init__(self, core: Any) -> None:
        self.ffi = core.ffi
        self.table = core.lib.ckv_os
        self.native = core.lib.ckv_os_native

    def __enter__(self) -> OsTable:
        return self

    def __exit__(self, *_: object) -> None:
        for name, _field in self._members():
            setattr(self.table, name, getattr(self.native, name))

    def _members(self) -> list[tuple[str, Any]]:
        return list(self.ffi.typeof("struct ckv_os").fields)

    def replace(self, name: str, function: Callable[..., Any]) -> None:
        kind = dict(self._members())[name].type
        setattr(self.table, name, lasting_callback(self.ffi, kind, function))

    def watch(self, decide: Callable[[str], int]) -> None:
        """Asks `decide(member)` before each call that can fail: 0 or -errno."""
        for name, _field in self._members():
            if name not in _NO_STATUS:
                self.replace(name, self._watched(name, decide))

    def _watched(self, name: str, decide: Callable[[str], int]) -> Callable[..., Any]:
        native = getattr(self.native, name)

        def call(*arguments: Any) -> Any:
            failure = decide(name)
            if failure == 0:
                return native(*arguments)
            if name in _DONE_ANYWAY:
                native(*arguments)
            return failure

        return call
