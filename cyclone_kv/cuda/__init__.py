# SPDX-License-Identifier: Apache-2.0
"""Copies between a volume and CUDA devices, over the driver's own interface.

Imported by the first method of ``Cache`` that needs it; loads the driver at the first
call that does. Needs cffi (``pip install 'cyclone-kv[cuda]'``), neither cupy nor torch.

* ``driver``        the calls of libcuda, one method each
* ``runtime``       what a process has: driver, devices, volumes; its end
* ``volume``        what the handles of a volume share; attaching and closing
* ``registration``  the mapping, registered chunk by chunk
* ``budget``        how much may be pinned
* ``ring``          pinned buffers
* ``flight``        copies under way and what they need
* ``targets``       device memory as callers have it
* ``transfer``      uploads, and puts from a device
"""

from __future__ import annotations

from cyclone_kv.cuda.registration import Registration
from cyclone_kv.cuda.ring import Shape
from cyclone_kv.cuda.runtime import current
from cyclone_kv.cuda.transfer import Upload
from cyclone_kv.errors import ConfigError

__all__ = ["Registration", "Upload", "set_ring"]


def set_ring(slots: int, slot_bytes: int) -> None:
    """Choose the pinned buffers of uploads: how many, and how large.

    By default 4 of 32 MiB, which no measurement on a device stands behind yet: see
    docs/gpu.md for the command that compares shapes. For rings that are made from now
    on: one for each device, at its first staged upload, freed when the last cache is
    closed.
    """
    if not 2 <= slots <= 1024:
        raise ConfigError(f"slots is {slots}; it must be between 2 and 1024")
    if slot_bytes < 4096 or slot_bytes % 4096:
        raise ConfigError(f"slot_bytes is {slot_bytes}; it must be a multiple of 4096")
    current().shape = Shape(slots, slot_bytes)
