# SPDX-License-Identifier: Apache-2.0
"""What the bytes of a page of SGLang's host pool depend on, as an `Identity`.

SGLang's page hash names the tokens of a prefix and the request's extra key (LoRA) and
cache salt; it is the key.  The rest is the identity:

S1  model: name, fingerprint of the weights, and what the server was told about the
    model: overrides, quantization, context length
S2  bytes: class and layout of the host pool, element type, layers, heads, widths, bytes
    of each region of a page, tokens of a page, SGLang's minor version
S3  parallel: rank and size of tp, pp and cp.  Pools that hold the same bytes on every
    tp rank (MLA) are shared by them; so are data parallel replicas.

The server's arguments lie in SGLang's runtime context.  Where they cannot be read, a
warning says what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclone_kv.connectors._identity import Identity, canonical_json
from cyclone_kv.connectors._model import (
    config_of_folder,
    digest,
    model_folder,
    rope_of,
    weights_of,
    without_noise,
)

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

__all__ = ["page_identity"]

CONNECTOR = "sglang"
CONNECTOR_VERSION = 1

# What changes the bytes of a page without a trace in the pool's geometry.
_SERVER_FACTS = (
    "attention_backend",
    "context_length",
    "dtype",
    "json_model_override_args",
    "kv_cache_dtype",
    "quantization",
    "quantization_param_path",
    "revision",
)
_GEOMETRY = (
    "start_layer",
    "end_layer",
    "layer_num",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "head_group_num",
    "storage_format_tag",
)


def page_identity(
    config: HiCacheStorageConfig,
    pool: Any,
    *,
    regions: Sequence[int],
    model: str | None,
    weights: str | None,
    warn: Callable[[str], None],
) -> Identity:
    """Return the identity of the pages of `pool`; `regions` are the bytes of one.

    `model` and `weights`, when given, replace the name of the model and the fingerprint
    of its weights.  ValueError when the weights cannot be told apart from others.
    """
    server = _server_arguments(warn)
    name = getattr(server, "model_path", None) or config.model_name or ""
    revision = getattr(server, "revision", None)
    facts = {fact: getattr(server, fact, None) for fact in _SERVER_FACTS}
    replicated = config.is_mla_model
    folder = model_folder(name, revision=revision) if name else None
    settings = config_of_folder(folder)
    return Identity(
        connector=CONNECTOR,
        connector_version=CONNECTOR_VERSION,
        model=model or Path(config.model_name or name).name or "unnamed",
        weights=weights or weights_of(name, revision=revision),
        kv_dtype=str(pool.dtype).removeprefix("torch."),
        layout=canonical_json(
            {
                "pool": type(pool).__name__,
                "layout": pool.layout,
                "regions": list(regions),
                **{fact: getattr(pool, fact, None) for fact in _GEOMETRY},
            }
        ),
        block_tokens=pool.page_size,
        tp_rank=0 if replicated else config.tp_rank,
        tp_size=1 if replicated else config.tp_size,
        pp_rank=config.pp_rank,
        pp_size=config.pp_size,
        cp_rank=config.attn_cp_rank,
        cp_size=config.attn_cp_size,
        rope=rope_of(settings.get("text_config") or settings),
        extra={
            "dcp_rank": config.dcp_rank,
            "dcp_size": config.dcp_size,
            "logical_page_size": config.logical_page_size or 0,
            "config": digest(without_noise(settings)),
            "server": digest(
                {k: None if v is None else str(v) for k, v in facts.items()}
            ),
            "sglang": ".".join(metadata.version("sglang").split(".")[:2]),
        },
    )


def _server_arguments(warn: Callable[[str], None]) -> Any | None:
    try:
        from sglang.srt.runtime_context import get_server_args

        found = get_server_args()
    except Exception:  # SGLang moves it about, and refuses it before its start
        found = None
    if found is None:
        warn(
            "the server's arguments are not visible to the storage: overrides of the "
            "model's configuration and its quantization are not part of the identity"
        )
    return found
