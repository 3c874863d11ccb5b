# SPDX-License-Identifier: Apache-2.0
"""The options of both plugins, as they stand in LMCache's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from cyclone_kv.config import CacheConfig
from cyclone_kv.connectors._options import CopyOptions
from cyclone_kv.errors import ConfigError

__all__ = ["BackendOptions", "L2Options"]

_LOADER = ("module_path", "class_name")


@dataclass(frozen=True, kw_only=True)
class L2Options(CopyOptions):
    """`adapter_params` of the L2 adapter.

    A server may serve several models, so `weights` may be a mapping from a model's
    name to its weights.
    """

    owner: ClassVar[str] = "CycloneL2Adapter"

    weights: str | Mapping[str, str] | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        given = self.weights
        if isinstance(given, Mapping):
            for name, value in given.items():
                if not isinstance(name, str) or not isinstance(value, str) or not value:
                    raise ConfigError(
                        f"weights has {name!r}: {value!r}; both must be non-empty str"
                    )
            object.__setattr__(self, "weights", None)
        super().__post_init__()
        object.__setattr__(self, "weights", given)
        if self.model is not None and not isinstance(given, str):
            raise ConfigError(
                "model renames every model that the server serves; give the weights "
                "of that one model with it, as a str"
            )

    def weights_of(self, model: str) -> str | None:
        """Return what was given for a model."""
        if isinstance(self.weights, Mapping):
            return self.weights.get(model)
        return self.weights


@dataclass(frozen=True, kw_only=True)
class BackendOptions(CopyOptions):
    """`extra_config` entries of the storage plugin: ``storage_plugin.<name>.<option>``.

    >>> options, _ = BackendOptions.of_plugin({
    ...     "storage_plugin.cyclone.module_path": "cyclone_kv.connectors.lmcache",
    ...     "storage_plugin.cyclone.class_name": "CycloneBackend",
    ...     "storage_plugin.cyclone.path": "kv.cyc",
    ... }, "CycloneBackend")
    >>> options.path
    'kv.cyc'
    """

    owner: ClassVar[str] = "CycloneBackend"

    @classmethod
    def of_plugin(
        cls, extra_config: Mapping[str, Any], class_name: str
    ) -> tuple[BackendOptions, CacheConfig]:
        """Find and check the options among all of `extra_config`.

        LMCache does not tell a plugin its name, so it is the one whose class is ours.
        """
        names = [
            key.removeprefix("storage_plugin.").removesuffix(".class_name")
            for key, value in extra_config.items()
            if key.startswith("storage_plugin.")
            and key.endswith(".class_name")
            and value == class_name
        ]
        if len(names) != 1:
            raise ConfigError(
                f"{len(names)} storage plugins of extra_config have the class "
                f"{class_name}; there must be one"
            )
        prefix = f"storage_plugin.{names[0]}."
        return cls.parse(
            {
                key.removeprefix(prefix): value
                for key, value in extra_config.items()
                if key.startswith(prefix) and key.removeprefix(prefix) not in _LOADER
            }
        )
