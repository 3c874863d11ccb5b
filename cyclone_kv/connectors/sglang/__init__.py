# SPDX-License-Identifier: Apache-2.0
"""The storage of SGLang's hierarchical cache: pages in a cyclone_kv volume.

SGLang's dynamic loader takes it by name, without a patch::

    --enable-hierarchical-cache --hicache-mem-layout page_first
    --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{
      "backend_name": "cyclone", "module_path": "cyclone_kv.connectors.sglang",
      "class_name": "CycloneHiCache", "interface_v1": 1,
      "path": "/nvme/kv.cyc", "capacity": "512GiB"}'

docs/connectors/sglang.md has the options, the identity, and what was proven.
"""

try:
    import sglang.srt.mem_cache.hicache_storage  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        "cyclone_kv.connectors.sglang needs SGLang 0.5 in this environment "
        f"(no module named {error.name!r})"
    ) from error

from cyclone_kv.connectors.sglang.hicache import CycloneHiCache

__all__ = ["CycloneHiCache"]
