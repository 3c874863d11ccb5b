# SPDX-License-Identifier: Apache-2.0
"""Engines that break a promise, to see that the judge notices.

A mutant is the core with one line replaced.  Each names the workload that shows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import build_core
from support.compile import BUILD, CORE

__all__ = ["MUTANTS", "Mutant"]


@dataclass(frozen=True)
class Mutant:
    source: str
    line: str
    instead: str
    workload: str

    def build(self, name: str) -> Path:
        text = (CORE / self.source).read_text()
        assert text.count(self.line) == 1, f"{self.source} has no line {self.line!r}"
        path = BUILD / "mutants" / name.replace(" ", "-") / self.source
        path.parent.mkdir(parents=True, exist_ok=True)
        changed = text.replace(self.line, self.instead)
        if not path.exists() or path.read_text() != changed:
            path.write_text(changed)
        return build_core.build(sources=[path])


MUTANTS = {
    "payloads are not checked": Mutant(
        "reader.c",
        "    if (payload_crc != record->payload_crc || "
        "header_crc != record->header_crc) {",
        "    if (false) {",
        "wrap",
    ),
    "a removal stays in memory": Mutant(
        "file.c",
        "    return ckv_os_write_all(file->data_fd, &no_seal, sizeof(no_seal),",
        "    return ckv_os_write_all(-1, &no_seal, 0,",
        "removes",
    ),
    "a clear is not synced": Mutant(
        "cache.c",
        "    return result < 0 ? result : ckv_os_sync(file->data_fd);",
        "    return result;",
        "removes",
    ),
    "both headers at once": Mutant(
        "file.c",
        "    if (name == ckv_load_acquire_u64(&file->durable_header)) {",
        "    if (name != 0) {",
        "checkpoints",
    ),
    "a set is used before its names are there": Mutant(
        "volume.c",
        "        CKV_TRY(ckv_file_sync_name(&volume->files[i], error));",
        "        (void)i;",
        "creation of two files",
    ),
}
