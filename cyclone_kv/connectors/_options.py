# SPDX-License-Identifier: Apache-2.0
"""The options that connectors have in common; each may add its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from cyclone_kv.config import CacheConfig, parse_size
from cyclone_kv.connectors._common import split_options
from cyclone_kv.errors import ConfigError

if TYPE_CHECKING:
    from typing import Self

__all__ = ["ConnectorOptions", "CopyOptions"]

_THREADS_MAX = 64


@dataclass(frozen=True, kw_only=True)
class ConnectorOptions:
    """What every connector understands; fields of `CacheConfig` may stand beside it."""

    owner: ClassVar[str] = "the connector"
    """Who has the options, for messages."""

    path: str | Sequence[str]
    """The volume file, or a list with one per device."""
    model: str | None = None
    """Name of the model, equal on all replicas; default: as the engine was given it."""
    weights: str | None = None
    """A digest or a revision that never moves; default: a fingerprint of the files."""
    recompute_tokens_per_second: float | None = None
    """How fast the engine computes a prompt.  When measured loads are slower than that,
    lookups are misses for ten seconds at a time."""

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> tuple[Self, CacheConfig]:
        """Check the options; unknown names are TypeErrors with a hint."""
        own = {field.name for field in fields(cls)}
        mine, config = split_options(options, own, owner=cls.owner)
        if "path" not in mine:
            raise ConfigError(
                'path is missing: name the volume file, such as "path": "/nvme/kv.cyc"'
            )
        return cls(**mine), config

    def __post_init__(self) -> None:
        if isinstance(self.path, Sequence) and not isinstance(self.path, str):
            object.__setattr__(self, "path", list(self.path))
        for name in ("model", "weights"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigError(f"{name} is {value!r}; it must be a non-empty str")
        self._check_speed()

    def _check_speed(self) -> None:
        speed = self.recompute_tokens_per_second
        if speed is None:
            return
        if isinstance(speed, bool) or not isinstance(speed, (int, float)):
            raise TypeError(
                f"recompute_tokens_per_second is {speed!r}; it must be a number"
            )
        if not 0 < speed < float("inf"):
            raise ConfigError(
                f"recompute_tokens_per_second is {speed}; it must be above 0"
            )


@dataclass(frozen=True, kw_only=True)
class CopyOptions(ConnectorOptions):
    """`ConnectorOptions` of a connector that copies on threads of its own."""

    load_threads: int = 2
    """Load jobs that run at the same time."""
    store_threads: int = 1
    """Store jobs that run at the same time."""
    store_queue: int | str | None = None
    """Bytes that may wait to be stored; further stores are dropped and counted.  They
    stay pinned in the engine's own tier meanwhile.  Default: a quarter of it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("load_threads", "store_threads"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} is {value!r}; it must be an int")
            if not 1 <= value <= _THREADS_MAX:
                raise ConfigError(f"{name} is {value}; it must be 1 to {_THREADS_MAX}")
        if self.store_queue is not None:
            size = parse_size(self.store_queue, "store_queue")
            object.__setattr__(self, "store_queue", size)

    def store_queue_bytes(self, tier_bytes: int) -> int:
        """Return the bound of the queue of stores."""
        if self.store_queue is None:
            return tier_bytes // 4
        return parse_size(self.store_queue, "store_queue")
