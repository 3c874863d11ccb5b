# SPDX-License-Identifier: Apache-2.0
"""What is raised inside when a device was given back meanwhile."""

from __future__ import annotations

from cyclone_kv.errors import CudaError

__all__ = ["DeviceClosedError"]


class DeviceClosedError(CudaError):
    """The device was given back; everything on it had landed by then."""
