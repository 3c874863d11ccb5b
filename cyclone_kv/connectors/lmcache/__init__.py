# SPDX-License-Identifier: Apache-2.0
"""LMCache over a cyclone_kv volume: as the L2 of its server, or inside the engine.

``lmcache server``, with `LMCacheMPConnector` in the engine::

    lmcache server --l1-size-gb 20 --l2-adapter '{
      "type": "plugin", "module_path": "cyclone_kv.connectors.lmcache",
      "class_name": "CycloneL2Adapter",
      "adapter_params": {"path": "/nvme/kv.cyc", "capacity": "512GiB"}}'

In the engine's own process, with `LMCacheConnectorV1` and this configuration::

    pre_caching_hash_algorithm: sha256_cbor
    storage_plugins: ["cyclone"]
    extra_config:
      storage_plugin.cyclone.module_path: cyclone_kv.connectors.lmcache
      storage_plugin.cyclone.class_name: CycloneBackend
      storage_plugin.cyclone.path: /nvme/kv.cyc
      storage_plugin.cyclone.capacity: 512GiB

docs/connectors/lmcache.md has the options, the identity, and what was proven.
"""

try:
    import lmcache.v1.memory_management  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        "cyclone_kv.connectors.lmcache needs LMCache 0.5 in this environment "
        f"(no module named {error.name!r})"
    ) from error

from cyclone_kv.connectors.lmcache.backend import CycloneBackend
from cyclone_kv.connectors.lmcache.l2_adapter import CycloneL2Adapter

__all__ = ["CycloneBackend", "CycloneL2Adapter"]
