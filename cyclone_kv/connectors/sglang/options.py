# SPDX-License-Identifier: Apache-2.0
"""The options of the storage, as they stand in its extra config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from cyclone_kv.config import CacheConfig
from cyclone_kv.connectors._options import ConnectorOptions
from cyclone_kv.errors import ConfigError

__all__ = ["HiCacheOptions"]

_LOADER = ("backend_name", "module_path", "class_name", "interface_v1")


@dataclass(frozen=True, kw_only=True)
class HiCacheOptions(ConnectorOptions):
    """What the storage understands; fields of `CacheConfig` may stand beside it.

    >>> options, config = HiCacheOptions.of_extra_config(
    ...     {"interface_v1": 1, "path": "kv.cyc", "capacity": "1GiB"}
    ... )
    >>> options.path, config.capacity
    ('kv.cyc', 1073741824)
    """

    owner: ClassVar[str] = "CycloneHiCache"

    @classmethod
    def of_extra_config(
        cls, extra_config: Mapping[str, Any]
    ) -> tuple[HiCacheOptions, CacheConfig]:
        """Check what SGLang left in the extra config, its loader's keys among it."""
        if not extra_config.get("interface_v1"):
            raise ConfigError(
                'add "interface_v1": 1 to the extra config: without it SGLang copies '
                "each page twice more"
            )
        return cls.parse(
            {key: value for key, value in extra_config.items() if key not in _LOADER}
        )
