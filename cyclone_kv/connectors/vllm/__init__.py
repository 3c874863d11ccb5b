# SPDX-License-Identifier: Apache-2.0
"""A storage tier for vLLM's KV offloading: blocks in a cyclone_kv volume.

vLLM 0.30 to 0.33 load it by name, without a patch::

    --kv-transfer-config '{
      "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 10737418240,
        "block_size": 256,
        "secondary_tiers": [{
          "type": "CycloneTier", "module_path": "cyclone_kv.connectors.vllm",
          "path": "/nvme/kv.cyc", "capacity": "512GiB"}]}}'

docs/connectors/vllm.md has the options, the identity, and what was proven.
"""

try:
    import vllm.v1.kv_offload.tiering.base  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        "cyclone_kv.connectors.vllm needs vLLM 0.30 to 0.33 in this environment "
        f"(no module named {error.name!r})"
    ) from error

from cyclone_kv.connectors.vllm.tier import CycloneTier

__all__ = ["CycloneTier"]
