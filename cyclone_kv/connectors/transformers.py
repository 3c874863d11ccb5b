# SPDX-License-Identifier: Apache-2.0
"""Keep the KV cache of a Hugging Face model in a cyclone_kv volume, by prefix.

A plain script (no serving engine) gets the tier with three calls::

    model_identity(model)  ->  namespace of the volume
    PrefixStore.load       ->  a DynamicCache that holds the longest stored prefix
    PrefixStore.store      <-  the DynamicCache after the prompt was computed

A *block* is the KV of `block_tokens` consecutive tokens, starting at a multiple of it;
what does not fill a block is not stored.  Its key is a link of a hash chain over all
tokens up to its end, so that equal prefixes of different prompts share their blocks::

    link[-1] = SHA-256(namespace)
    link[i]  = SHA-256(link[i-1] || tokens of block i, each as little-endian u32)

Its payload is the elements as the model holds them, in host byte order, no padding::

    for each layer
        keys    [kv head][token][element]
        values  [kv head][token][element]

H1  Nothing is staged.  A put hands the engine one segment per layer, head and K or V,
    each a piece of the tensors; a load fills the new tensors in place.
H2  Namespace and key together fix the length of a block, and the bytes of another
    model, element type, shape or block size cannot be found.
H3  A load keeps leading blocks only.  Blocks behind the first one that is absent,
    evicted or damaged are dropped, and the caller computes from there.
H4  A cache with state that a block would not hold is refused: half a state restored is
    a wrong answer without an error.

Tested with transformers 5.19.0 and torch 2.13.0, tensors in host memory, batch size 1.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ._identity import Identity, canonical_json

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

    from cyclone_kv import Cache

__all__ = [
    "BlockLayout",
    "PrefixStore",
    "chain_keys",
    "model_identity",
    "weights_fingerprint",
]

CONNECTOR = "transformers"
CONNECTOR_VERSION = 1

_AXES = "layer,kv,head,token,element"
_LAYERS_MAX = 4096
# Facts of a model configuration that say where it came from, not what it computes.
_CONFIG_NOISE = ("_name_or_path", "architectures", "dtype", "transformers_version")


@dataclass(frozen=True)
class BlockLayout:
    """Shape of the blocks of one model.

    `layers` holds for each layer its number of KV heads, the elements of a key and the
    elements of a value.
    """

    dtype: str
    block_tokens: int
    layers: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, past_key_values: DynamicCache, *, block_tokens: int) -> BlockLayout:
        """Read the layout off a cache; raise ValueError if no block can hold it."""
        _check_cache(past_key_values)
        dtypes, lengths, layers = set(), set(), []
        cache_layers: list[Any] = past_key_values.layers
        for index, layer in enumerate(cache_layers):
            _check_layer(index, layer)
            dtypes |= {layer.keys.dtype, layer.values.dtype}
            lengths.add(layer.keys.shape[2])
            layers.append(
                (layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3])
            )
        if not layers:
            raise ValueError(
                "the cache is empty: its layout is known after one forward"
            )
        if len(dtypes) != 1:
            names = ", ".join(sorted(map(str, dtypes)))
            raise ValueError(
                f"the cache mixes element types ({names}): one is supported"
            )
        if len(lengths) != 1:
            raise ValueError(
                f"the layers hold {sorted(lengths)} tokens: all must hold the same"
            )
        dtype = str(dtypes.pop()).removeprefix("torch.")
        return cls(dtype=dtype, block_tokens=block_tokens, layers=tuple(layers))

    @classmethod
    def from_identity(cls, identity: Identity) -> BlockLayout:
        """Read the layout back from an identity made by `model_identity`."""
        axes, _, runs_text = identity.layout.partition(":")
        if identity.connector != CONNECTOR or axes != _AXES:
            raise ValueError(
                f"the identity belongs to connector {identity.connector!r} with layout "
                f"{identity.layout[:80]!r}: make it with model_identity()"
            )
        if identity.connector_version != CONNECTOR_VERSION:
            raise ValueError(
                f"the identity has block format {identity.connector_version}, "
                f"this connector writes {CONNECTOR_VERSION}"
            )
        layers: list[tuple[int, int, int]] = []
        for count, heads, key_size, value_size in json.loads(runs_text):
            if len(layers) + count > _LAYERS_MAX:
                raise ValueError(f"the layout has more than {_LAYERS_MAX} layers")
            layers += [(heads, key_size, value_size)] * count
        return cls(identity.kv_dtype, identity.block_tokens, tuple(layers))

    def describe(self) -> str:
        """Write the layout as the `layout` field of an identity."""
        runs = [[len(list(run)), *layer] for layer, run in groupby(self.layers)]
        return f"{_AXES}:{canonical_json(runs)}"

    @property
    def element_bytes(self) -> int:
        """Bytes of an element."""
        import torch

        return int(getattr(torch, self.dtype).itemsize)

    @property
    def block_bytes(self) -> int:
        """Payload bytes of a block."""
        elements = sum(heads * (key + value) for heads, key, value in self.layers)
        return elements * self.element_bytes * self.block_tokens


def chain_keys(
    namespace: str, token_ids: Sequence[int], *, block_tokens: int
) -> list[bytes]:
    """Return the keys of the whole blocks of `token_ids`, head first.

    >>> keys = chain_keys("demo", [1, 2, 3, 4, 5], block_tokens=2)
    >>> len(keys), keys[0].hex()[:16]
    (2, 'd647f1d6fc683786')
    """
    link = hashlib.sha256(namespace.encode()).digest()
    pack = struct.Struct(f"<{block_tokens}I").pack
    keys = []
    for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        try:
            packed = pack(*token_ids[start : start + block_tokens])
        except struct.error as error:
            raise ValueError(
                f"token ids {start} to {start + block_tokens - 1} are not all integers "
                f"from 0 to 2**32 - 1 ({error})"
            ) from None
        link = hashlib.sha256(link + packed).digest()
        keys.append(link)
    return keys


def weights_fingerprint(model: PreTrainedModel) -> str:
    """Digest the weights that `model` holds in memory: names, types, shapes and bytes.

    It reads all of them, at the speed of SHA-256.  For a large model pass the digest or
    the revision that your model registry already has to `model_identity` instead.
    """
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        head = canonical_json([name, str(tensor.dtype), list(tensor.shape)])
        digest.update(len(head).to_bytes(4, "little") + head.encode("ascii"))
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(flat.numpy())
    return f"sha256:{digest.hexdigest()}"


def model_identity(
    model: PreTrainedModel,
    *,
    block_tokens: int = 256,
    name: str | None = None,
    weights: str | None = None,
    lora: str = "",
    cache_salt: str = "",
) -> Identity:
    """Describe what the KV blocks of `model` depend on; raise ValueError if unsuitable.

    Runs `model` over one token to see the shapes of its cache.  `name` is for people
    and must be equal on all replicas (default: the class of the model).  `weights` is a
    fingerprint of the weights (default: `weights_fingerprint`).  `lora` names the
    adapter that is switched on.  `cache_salt` separates tenants.

    ::

        identity = model_identity(model, block_tokens=256)
        with Cache.open(path, config, namespace=identity.namespace()) as cache:
            store = PrefixStore(cache, identity)
    """
    if getattr(model, "_hf_peft_config_loaded", False) and not lora:
        raise ValueError("the model has an adapter loaded: name it with lora=")
    config = model.config.get_text_config(decoder=True)
    rope = _rope(config)
    layout = BlockLayout.of(_probe(model), block_tokens=block_tokens)
    facts = json.loads(model.config.to_json_string(use_diff=True))
    for noise in _CONFIG_NOISE:
        facts.pop(noise, None)
    config_digest = hashlib.sha256(canonical_json(facts).encode("ascii")).hexdigest()
    return Identity(
        connector=CONNECTOR,
        connector_version=CONNECTOR_VERSION,
        model=name or type(model).__name__,
        weights=weights or weights_fingerprint(model),
        kv_dtype=layout.dtype,
        layout=layout.describe(),
        block_tokens=block_tokens,
        rope=rope,
        lora=lora,
        cache_salt=cache_salt,
        extra={"config": config_digest},
    )


class PrefixStore:
    """Store and restore the KV cache of one model by prefix.

    The cache must have been opened in the namespace of the identity; it stays open and
    belongs to the caller.  An instance holds no state besides its arguments, so threads
    may share it.

    ::

        past, reused = store.load(prompt[:-1])      # leave a token to compute
        rest = torch.tensor([prompt[reused:]])
        output = model(input_ids=rest, past_key_values=past, use_cache=True)
        store.store(prompt, output.past_key_values)

    Restored elements are bit for bit those that were stored.  Whether the logits behind
    them equal those of an uninterrupted run bit for bit is up to the model's
    arithmetic: it takes the same steps (prompt cut at the same tokens), element type,
    attention implementation and number of threads.
    """

    def __init__(self, cache: Cache, identity: Identity) -> None:
        self._cache = cache
        self._namespace = identity.namespace()
        self._layout = BlockLayout.from_identity(identity)

    @property
    def layout(self) -> BlockLayout:
        """Layout of the blocks."""
        return self._layout

    def keys(self, token_ids: Iterable[int] | torch.Tensor) -> list[bytes]:
        """Return the keys of the whole blocks of `token_ids`, head first."""
        return chain_keys(
            self._namespace, _as_ids(token_ids), block_tokens=self._layout.block_tokens
        )

    def lookup(self, token_ids: Iterable[int] | torch.Tensor) -> int:
        """Count the leading tokens that are stored, without reading a block.

        The blocks found are given two passes of the engine's cursor, so that a load
        that follows finds them too.  The count is a promise of presence, not of
        soundness: damage shows when the bytes are read.
        """
        found: int = self._cache.longest_prefix(self.keys(token_ids), touch=True)
        return found * self._layout.block_tokens

    def load(self, token_ids: Iterable[int] | torch.Tensor) -> tuple[DynamicCache, int]:
        """Restore the longest stored prefix of `token_ids`.

        Returns a cache of its own memory and the number of tokens that it covers, which
        is 0 with an empty cache when nothing was found.  To have at least one token
        left whose logits can be computed, pass the prompt without its last token.
        """
        from transformers import DynamicCache

        keys = self.keys(token_ids)
        found = self._cache.longest_prefix(keys, touch=True)
        if not found:
            return DynamicCache(), 0
        tensors = self._allocate(found * self._layout.block_tokens)
        pieces = self._pieces(tensors, 0, found)
        good = _leading(self._cache.get_many_into(keys[:found], pieces))
        if not good:
            return DynamicCache(), 0
        tokens = good * self._layout.block_tokens
        if good < found:
            tensors = [
                (key[:, :, :tokens].contiguous(), value[:, :, :tokens].contiguous())
                for key, value in tensors
            ]
        return _as_cache(tensors), tokens

    def store(
        self, token_ids: Iterable[int] | torch.Tensor, past_key_values: DynamicCache
    ) -> int:
        """Store the blocks of `past_key_values` that are not stored yet.

        Both arguments begin at the first token of the prompt; what the shorter of them
        covers in whole blocks is stored.  Returns the number of leading tokens that are
        stored when the call ends: fewer than given when the engine refused a block (its
        statistics say why).

        A long prompt that is computed in steps is best stored after each step: blocks
        of one call become reachable together, those of earlier calls survive a kill.
        """
        layout = BlockLayout.of(past_key_values, block_tokens=self._layout.block_tokens)
        if layout != self._layout:
            raise ValueError(
                f"the cache holds {layout.dtype} {layout.describe()}, the store was "
                f"made for {self._layout.dtype} {self._layout.describe()}: another "
                "model?"
            )
        block_tokens = self._layout.block_tokens
        ids = _as_ids(token_ids)[: past_key_values.get_seq_length()]
        keys = self.keys(ids)
        first = self._cache.longest_prefix(keys, touch=False)
        if first < len(keys):
            layers: list[Any] = past_key_values.layers
            tensors = [(layer.keys, layer.values) for layer in layers]
            pieces = self._pieces(tensors, first, len(keys))
            stored = self._cache.put_many(
                list(zip(keys[first:], pieces, strict=True)),
                chain=True,
                parent=keys[first - 1] if first else None,
            )
            first += _leading(stored)
        return first * block_tokens

    def _allocate(self, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Make the tensors that a load fills."""
        import torch

        dtype = getattr(torch, self._layout.dtype)
        return [
            (
                torch.empty(1, heads, tokens, key_size, dtype=dtype),
                torch.empty(1, heads, tokens, value_size, dtype=dtype),
            )
            for heads, key_size, value_size in self._layout.layers
        ]

    def _pieces(
        self,
        tensors: Iterable[tuple[torch.Tensor, torch.Tensor]],
        first: int,
        last: int,
    ) -> list[list[memoryview]]:
        """Cut the memory of `tensors` into the segments of blocks `first` to `last`."""
        planes = [
            (plane, len(plane) // tensor.shape[2] * self._layout.block_tokens)
            for pair in tensors
            for tensor in pair
            for plane in _planes(tensor)
        ]
        return [
            [plane[block * size : (block + 1) * size] for plane, size in planes]
            for block in range(first, last)
        ]


def _planes(tensor: torch.Tensor) -> list[memoryview]:
    """Return the memory of each KV head of `tensor` as bytes, without a copy."""
    import torch

    heads = tensor.detach()[0].view(torch.uint8)
    return [memoryview(head.numpy()).cast("B") for head in heads]


def _leading(flags: Sequence[bool]) -> int:
    """Count the True values in front."""
    return next((index for index, flag in enumerate(flags) if not flag), len(flags))


def _as_ids(token_ids: Iterable[int] | torch.Tensor) -> list[int]:
    """Accept a list, an array, or a tensor of shape [n] or [1, n]."""
    ids: Any = token_ids.tolist() if hasattr(token_ids, "tolist") else list(token_ids)
    if ids and isinstance(ids[0], list):
        if len(ids) != 1:
            raise ValueError(
                f"{len(ids)} sequences given: store and load one at a time"
            )
        ids = ids[0]
    return ids  # type: ignore[no-any-return]


def _as_cache(tensors: list[tuple[torch.Tensor, torch.Tensor]]) -> DynamicCache:
    """Wrap filled tensors; `DynamicCache.update` would copy each of them once more."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    past = DynamicCache()
    for keys, values in tensors:
        layer = DynamicLayer()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        past.layers.append(layer)
    return past


def _check_cache(past_key_values: object) -> None:
    """Refuse anything but a plain DynamicCache, in words."""
    from transformers import DynamicCache

    if type(past_key_values) is not DynamicCache:
        raise ValueError(
            f"the cache is a {type(past_key_values).__name__}: only a plain "
            "DynamicCache can be stored, others hold state that a block has no place "
            "for"
        )


def _check_layer(index: int, layer: Any) -> None:
    """Refuse a layer whose state is more, or less, than one K and one V a token."""
    from transformers.cache_utils import DynamicLayer

    if type(layer) is not DynamicLayer:
        raise ValueError(
            f"layer {index} is a {type(layer).__name__}: only full attention "
            "(DynamicLayer) can be stored; sliding windows, quantized, recurrent and "
            "indexed layers hold state that a block has no place for"
        )
    if not layer.is_initialized or {layer.keys.dim(), layer.values.dim()} != {4}:
        raise ValueError(
            f"layer {index} holds no keys and values yet: run a forward first"
        )
    for name, tensor in (("keys", layer.keys), ("values", layer.values)):
        batch, _, tokens, size = tensor.shape
        if batch != 1:
            raise ValueError(
                f"layer {index} has batch size {batch}: split it and store one "
                "sequence at a time"
            )
        if tensor.device.type != "cpu":
            raise ValueError(
                f"{name} of layer {index} are on {tensor.device}: move the cache to "
                "the CPU first"
            )
        if tokens > 1 and tensor.stride()[2:] != (size, 1):
            raise ValueError(
                f"{name} of layer {index} are not contiguous (strides "
                f"{tuple(tensor.stride())}): call .contiguous() on them first"
            )
    if layer.keys.shape[:3] != layer.values.shape[:3]:
        raise ValueError(
            f"layer {index} has keys {tuple(layer.keys.shape)} but values "
            f"{tuple(layer.values.shape)}: heads and tokens must agree"
        )


def _probe(model: PreTrainedModel) -> DynamicCache:
    """Run the model over one token and return the cache that it fills."""
    import torch

    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with torch.no_grad():
        past: DynamicCache = model(input_ids=token, use_cache=True).past_key_values
    return past


def _rope(config: PreTrainedConfig) -> dict[str, object]:
    """Collect the rotary embedding's configuration; refuse kinds that look ahead."""
    found = {
        "rope_parameters": getattr(config, "rope_parameters", None)
        or getattr(config, "rope_scaling", None),
        "rope_theta": getattr(config, "rope_theta", None),
    }
    text = canonical_json(found)
    match = re.search(r'"(?:rope_)?type":"([^"]*dynamic[^"]*|longrope)"', text)
    if match:
        raise ValueError(
            f"rotary embedding {match[1]!r} changes the keys of a prefix with the "
            "length of what follows: its blocks cannot be shared"
        )
    found["max_position_embeddings"] = getattr(config, "max_position_embeddings", None)
    return found
