# SPDX-License-Identifier: Apache-2.0
"""What the bytes of vLLM's offloaded chunks depend on, as an `Identity` per group.

vLLM's block hash names the tokens of a prefix, its LoRA adapter (name and path),
multimodal inputs and the cache salt; it is the key.  The rest is the identity:

V1  model: name, fingerprint of the weights (and of a draft model's), the model's
    configuration as the engine runs it (after overrides), rotary embedding,
    quantization
V2  bytes: element type, layout, bytes of a chunk, tokens of a chunk and of a hash,
    layers of each group, attention backend, vLLM's minor version (its layouts are its
    own)
V3  parallel: sizes of tp, pp and both kinds of cp.  A chunk is one row with the KV of
    all workers, so ranks are 0; data parallel replicas hold equal bytes and share.

A tier is handed V2 and V3 by the engine, and of V1 the name of the model only.  What
is missing stands in the engine's `VllmConfig`, which lies in the frames of the callers
while the tier is built: `engine_config` looks for it there.  Without it the
configuration file in the model's folder is taken, and a warning says that overrides
are not seen.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from cyclone_kv.connectors._common import local_of_callers
from cyclone_kv.connectors._identity import Identity, canonical_json
from cyclone_kv.connectors._model import (
    config_of_folder,
    digest,
    rope_of,
    weights_of,
    without_noise,
)

__all__ = ["engine_config", "group_identities", "random_hash_seed"]

CONNECTOR = "vllm"
CONNECTOR_VERSION = 1
_SEEDED_HASHES = ("xxhash", "xxhash_cbor")


def engine_config() -> Any | None:
    """Return the `VllmConfig` of the engine that is building the tier, if visible."""
    return local_of_callers(
        "vllm_config", lambda value: type(value).__name__ == "VllmConfig"
    )


def random_hash_seed(vllm_config: Any | None, environment: Any) -> str | None:
    """Return the hash algorithm whose seed is random in each process, if it is so."""
    if vllm_config is None or environment.get("PYTHONHASHSEED") is not None:
        return None
    name = str(vllm_config.cache_config.prefix_caching_hash_algo)
    return name if name in _SEEDED_HASHES else None


def group_identities(
    config: Any,
    *,
    chunk_bytes: int,
    vllm_config: Any | None,
    model: str | None,
    weights: str | None,
    warn: Callable[[str], None],
) -> dict[int, Identity]:
    """Return the identity of each KV cache group.

    `config` is vLLM's `OffloadingConfig`.  `model` and `weights`, when given, replace
    the name of the model and the fingerprint of its weights.  ValueError when the
    weights cannot be told apart from others.
    """
    name = config.model.name
    facts = _model_facts(vllm_config, name, warn)
    parallel, cache = config.parallel, config.cache
    extra = {
        "config": digest(facts.pop("config")),
        "chunk_bytes": chunk_bytes,
        "tokens_per_hash": cache.tokens_per_hash,
        "blocks_per_chunk": cache.blocks_per_chunk,
        "worker_bytes_per_block": config.worker_kv_bytes_per_block,
        "groups": digest(
            [[g.group_id, g.tokens_per_block, g.layer_names] for g in config.groups]
        ),
        "rank": parallel.rank,
        "world_size": parallel.world_size,
        "dcp_size": parallel.dcp_size,
        "vllm": ".".join(_vllm_version().split(".")[:2]),
        "engine": digest(facts.pop("engine")),
    }
    layout = canonical_json(
        {
            "kv_cache_layout": getattr(config, "kv_cache_layout", None),
            "canonical": config.canonical_layout,
            "replicated": config.replicated_layout,
        }
    )
    weights = weights or _weights(vllm_config, name)
    return {
        group.group_id: Identity(
            connector=CONNECTOR,
            connector_version=CONNECTOR_VERSION,
            model=model or Path(name).name,
            weights=weights,
            kv_dtype=config.model.dtype,
            layout=layout,
            block_tokens=group.tokens_per_block * cache.blocks_per_chunk,
            tp_size=parallel.tp_size,
            pp_size=parallel.pp_size,
            cp_size=parallel.pcp_size,
            rope=facts["rope"],
            group=group.group_id,
            extra=extra,
        )
        for group in config.groups
    }


def _vllm_version() -> str:
    import vllm

    version = getattr(vllm, "__version__", None)
    return version if isinstance(version, str) else metadata.version("vllm")


def _model_facts(
    vllm_config: Any | None, name: str, warn: Callable[[str], None]
) -> dict[str, Any]:
    """Collect what the model computes: its configuration, rope, and engine settings."""
    if vllm_config is not None:
        model = vllm_config.model_config
        facts = json.loads(model.hf_config.to_json_string(use_diff=False))
        text = json.loads(model.hf_text_config.to_json_string(use_diff=False))
        speculative = getattr(vllm_config, "speculative_config", None)
        attention = getattr(vllm_config, "attention_config", None)
        engine = {
            "dtype": str(model.dtype),
            "quantization": model.quantization,
            "kv_scales": getattr(vllm_config.cache_config, "calculate_kv_scales", None),
            "attention": str(getattr(attention, "backend", None)),
            "draft": speculative
            and [
                str(getattr(speculative, "method", None)),
                _weights_of(getattr(speculative, "draft_model_config", None)),
            ],
        }
        length = model.max_model_len
    else:
        warn(
            "the engine's configuration is not visible to the tier: overrides of the "
            "model's configuration on the command line are not part of the identity"
        )
        folder = Path(name)
        facts = config_of_folder(folder if folder.is_dir() else None)
        text, engine, length = facts.get("text_config") or facts, None, None
    rope = rope_of(text)
    if any(kind in canonical_json(rope) for kind in ("longrope", "dynamic")):
        rope["length"] = length  # such embeddings depend on the engine's limit
    return {"config": without_noise(facts), "engine": engine, "rope": rope}


def _weights(vllm_config: Any | None, name: str) -> str:
    """Return the fingerprint of the weights that the engine runs."""
    if vllm_config is not None:
        return _weights_of(vllm_config.model_config, vllm_config.load_config)
    return weights_of(name)


def _weights_of(model: Any | None, load: Any | None = None) -> str:
    if model is None:
        return ""
    # A "model" that was fetched from an object store has its folder in `model_weights`.
    name = getattr(model, "model_weights", None) or model.model
    return weights_of(
        name,
        revision=model.revision,
        download=getattr(load, "download_dir", None),
    )
