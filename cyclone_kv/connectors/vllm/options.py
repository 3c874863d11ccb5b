# SPDX-License-Identifier: Apache-2.0
"""The options of the tier, as they stand in `secondary_tiers`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from cyclone_kv.connectors._options import CopyOptions
from cyclone_kv.errors import ConfigError

__all__ = ["TierOptions"]


@dataclass(frozen=True, kw_only=True)
class TierOptions(CopyOptions):
    """What the tier itself understands; fields of `CacheConfig` may stand beside it.

    >>> options, config = TierOptions.parse({"path": "kv.cyc", "capacity": "1GiB"})
    >>> options.store_threads, config.capacity
    (1, 1073741824)
    """

    owner: ClassVar[str] = "CycloneTier"

    enable_kv_events: bool = False
    """Report stored and removed blocks as KV events of the medium STORAGE."""
    locality: Literal["LOCAL", "REMOTE"] = "LOCAL"
    """Where the storage is, seen from the engine: for events and tier filters."""
    announce_again_seconds: float = 60.0
    """A block in use is reported as stored again when its last report is so old: a
    reset of the engine's prefix cache makes routers forget every tier, and tells the
    tiers nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.enable_kv_events, bool):
            raise TypeError(
                f"enable_kv_events is {self.enable_kv_events!r}; "
                "it must be true or false"
            )
        seconds = self.announce_again_seconds
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise TypeError(
                f"announce_again_seconds is {seconds!r}; it must be a number"
            )
        if not 0 <= seconds < float("inf"):
            raise ConfigError(
                f"announce_again_seconds is {seconds!r}; it must be 0 or more"
            )
        if self.locality not in ("LOCAL", "REMOTE"):
            raise ConfigError(
                f'locality is {self.locality!r}; it must be "LOCAL" or "REMOTE"'
            )
