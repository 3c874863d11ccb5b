# SPDX-License-Identifier: Apache-2.0
"""What the bytes of LMCache's objects depend on, as an `Identity` per kind of object.

LMCache's key names the model, the rank, the group, a hash of the tokens, and (server)
the cache salt.  Hash, salt and tags become the key of a block, see `object_key` and
`chunk_key`; the rest is the identity:

L1  model: its name, and of the folder behind the name the fingerprint of the weights,
    the configuration, and the rotary embedding.  `weights` in the options stands for
    all three.
L2  bytes: element types, shapes and (in the engine) format of an object, tokens of a
    chunk, LMCache's minor version, whose layouts are its own
L3  parallel: rank and size of the shard; group.

LMCache does not know what an engine was told on its command line beyond that: overrides
of the model's configuration, or a quantization, need a `weights` of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclone_kv.connectors._common import local_of_callers
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
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.distributed.api import ObjectKey

__all__ = [
    "ModelFacts",
    "chunk_identity",
    "chunk_key",
    "hash_algorithm_of_server",
    "object_identity",
    "object_key",
    "random_hash",
    "serde_of_server",
]

CONNECTOR = "lmcache"
CONNECTOR_VERSION = 1
_WHOLE_HASH_BYTES = 32
_PROCESS_LOCAL_HASH_BYTES = 8  # LMCache writes an int of Python's hash() so


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known about a model besides its name (L1)."""

    model: str
    weights: str
    config: str
    rope: str

    @classmethod
    def of(cls, name: str, *, model: str | None, weights: str | None) -> ModelFacts:
        """Collect them; ValueError when the weights cannot be told from others."""
        label = model or Path(name).name or name
        if weights is not None:
            return cls(label, weights, "", "")
        fingerprint = weights_of(name)
        config = config_of_folder(model_folder(name))
        rope = canonical_json(rope_of(config.get("text_config") or config))
        return cls(label, fingerprint, digest(without_noise(config)), rope)


def object_identity(
    facts: ModelFacts,
    *,
    kv_rank: int,
    group: int,
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[object],
) -> Identity:
    """Return the identity of objects of the server."""
    # The packing of ObjectKey.ComputeKVRank(); what it leaves out is 0.
    world_size, rank = (kv_rank >> 24) & 0xFF, (kv_rank >> 16) & 0xFF
    fits = rank < world_size
    return _identity(
        facts,
        shapes=shapes,
        dtypes=dtypes,
        rank=rank if fits else 0,
        size=world_size if fits else 1,
        group=group,
        extra={"form": "l2", "kv_rank": kv_rank},
    )


def chunk_identity(
    facts: ModelFacts,
    *,
    world_size: int,
    worker_id: int,
    dtype: str,
    kv_shape: Sequence[int],
    chunk_tokens: int,
    settings: Mapping[str, Any],
) -> Identity:
    """Return the identity of chunks inside an engine; `settings` change the format."""
    return Identity(
        connector=CONNECTOR,
        connector_version=CONNECTOR_VERSION,
        model=facts.model,
        weights=facts.weights,
        kv_dtype=dtype,
        layout=canonical_json({"kv_shape": list(kv_shape), **settings}),
        block_tokens=chunk_tokens,
        # Which ranks make up the shard is LMCache's own numbering of workers.
        tp_rank=worker_id if worker_id < world_size else 0,
        tp_size=world_size,
        rope=facts.rope,
        extra=_extra(facts, {"form": "chunk", "worker_id": worker_id}),
    )


def _identity(
    facts: ModelFacts,
    *,
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[object],
    rank: int,
    size: int,
    group: int,
    extra: dict[str, str | int],
) -> Identity:
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    plain = [[int(length) for length in shape] for shape in shapes]
    return Identity(
        connector=CONNECTOR,
        connector_version=CONNECTOR_VERSION,
        model=facts.model,
        weights=facts.weights,
        kv_dtype="+".join(dict.fromkeys(names)) or "none",
        layout=canonical_json({"shapes": plain, "dtypes": names}),
        # [2, layers, tokens, hidden]; recurrent state has no tokens in its shape.
        block_tokens=max(plain[0][-2], 1) if plain and len(plain[0]) > 1 else 1,
        tp_rank=rank,
        tp_size=size,
        rope=facts.rope,
        group=group,
        extra=_extra(facts, extra),
    )


def _extra(facts: ModelFacts, extra: dict[str, str | int]) -> dict[str, str | int]:
    version = ".".join(metadata.version("lmcache").split(".")[:2])
    return extra | {"config": facts.config, "lmcache": version}


def object_key(key: ObjectKey) -> bytes:
    """Return the key of a server's object within its identity.

    LMCache's 32-byte hash as it is; with a salt, which the engine digests, so that it
    cannot be read back, both behind their lengths.
    """
    digest_bytes: bytes = key.chunk_hash
    if len(digest_bytes) == _WHOLE_HASH_BYTES and not key.cache_salt:
        return digest_bytes
    salt = key.cache_salt.encode()
    # Never 32 bytes in all, so it is digested and meets no hash that is used as it is.
    return b"".join(
        [
            b"lmcache object",
            len(digest_bytes).to_bytes(4, "little"),
            digest_bytes,
            len(salt).to_bytes(4, "little"),
            salt,
            b"." * 32,
        ]
    )


def chunk_key(key: CacheEngineKey) -> bytes:
    """Return the key of a chunk within its identity: hash, layer and tags."""
    facts = {
        "hash": format(int(key.chunk_hash), "x"),
        "layer": getattr(key, "layer_id", None),
        "tags": None if key.tags is None else [[k, str(v)] for k, v in key.tags],
    }
    return b"lmcache chunk in an engine: " + canonical_json(facts).encode("ascii")


# ---- what LMCache does not hand to a plugin -----------------------------------------


def hash_algorithm_of_server() -> str | None:
    """Return ``--hash-algorithm`` of the server that is being built, if visible."""
    found = local_of_callers("hash_algorithm", lambda value: isinstance(value, str))
    return found if isinstance(found, str) else None


def serde_of_server() -> bool:
    """Return whether LMCache is about to put a serializer around the adapter."""
    found = local_of_callers("config", lambda value: hasattr(value, "serde_config"))
    return getattr(found, "serde_config", None) is not None


def random_hash(algorithm: str | None, environment: Mapping[str, str]) -> str | None:
    """Say why hashes of `algorithm` differ in each process, or return None.

    LMCache takes Python's own hash() for ``builtin``, and silently for every algorithm
    but blake3 when it cannot import vLLM.
    """
    if algorithm is None or algorithm == "blake3":
        return None
    if environment.get("PYTHONHASHSEED", "random") != "random":
        return None
    if algorithm == "builtin":
        reason = "the hash algorithm is 'builtin'"
    elif algorithm.startswith("xxhash"):
        reason = f"the seed of {algorithm!r} is random"
    elif not _vllm_has(algorithm):
        reason = f"{algorithm!r} needs vLLM; without it LMCache takes Python's hash()"
    else:
        return None
    return (
        f"{reason}, and PYTHONHASHSEED is not set: each process would hash the same "
        "tokens differently, and nothing stored would be found again. "
    )


def process_local(digest_bytes: bytes, environment: Mapping[str, str]) -> bool:
    """Return whether a hash looks like one of Python's hash() with a random seed."""
    return (
        len(digest_bytes) == _PROCESS_LOCAL_HASH_BYTES
        and environment.get("PYTHONHASHSEED", "random") == "random"
    )


def _vllm_has(algorithm: str) -> bool:
    try:
        from vllm.utils.hashing import get_hash_fn_by_name
    except ImportError:
        return False
    names = {algorithm, "sha256_cbor" if "cbor" in algorithm else algorithm}
    for name in names:
        try:
            get_hash_fn_by_name(name)
        except ValueError:
            continue
        return True
    return False
