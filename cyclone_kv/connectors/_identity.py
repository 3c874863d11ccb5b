# SPDX-License-Identifier: Apache-2.0
"""Name the setting that stored KV blocks belong to.

The bytes of a KV block are worth something only to a process that would have computed
the same ones: same weights, same element type, same layout, same share of a parallel
group, and so on.  Keys name tokens and nothing else, therefore each connector opens the
cache in a namespace that names the rest::

    Identity  ->  canonical JSON  ->  SHA-256  ->  "cyclone_kv/1/<connector>/<hex>"

I1  Two identities that differ in one field have different namespaces.
I2  Equal identities have equal namespaces in every process, Python version and machine:
    no ``hash()``, no ``repr`` of an object, no environment, no pickling.
I3  Absent is one value: None, an empty string and a field that was not given are equal.
I4  The secret part (``cache_salt``) cannot be read back from the namespace or ``repr``.

A change of the encoding moves every stored block out of reach, so it raises
``IDENTITY_FORMAT``; the golden values in the tests are there to notice it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

__all__ = ["IDENTITY_FORMAT", "Identity", "canonical_json"]

IDENTITY_FORMAT = 1

_CONNECTOR_NAME = re.compile(r"[a-z0-9_.-]{1,32}")
_TEXT_FIELDS = ("model", "weights", "kv_dtype", "layout")
_OPTIONAL_TEXT_FIELDS = ("lora", "cache_salt")
_PARALLEL_FIELDS = ("tp", "pp", "cp", "dp")


def canonical_json(value: object) -> str:
    r"""Write `value` in the one JSON spelling that this package hashes.

    Keys are sorted, there is no white space, everything outside ASCII is escaped, an
    entry of a mapping whose value is None is left out, and a float without a fraction
    is written as an integer: a configuration file may say ``10000`` in one place and
    ``10000.0`` in another and mean the same.

    >>> canonical_json({"b": 10000.0, "a": None, "c": [1, "é"]})
    '{"b":10000,"c":[1,"\\u00e9"]}'
    """
    return json.dumps(
        _plain(value),
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=True,
        allow_nan=False,
    )


def _plain(value: object) -> object:
    """Reduce `value` to what JSON knows; refuse what has no exact spelling."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} has no canonical spelling: use a finite number")
        return int(value) if value.is_integer() else float(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"mapping key {key!r} is not a str")
        return {key: _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [_plain(item) for item in value]
    raise TypeError(
        f"a {type(value).__name__} has no canonical spelling: "
        "use str, int, float, bool, None, a sequence or a mapping"
    )


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What the bytes of a block depend on besides the tokens.

    Ranks and sizes describe the share of the model whose KV the process stores.  A
    connector that stores the KV of all ranks in one block leaves them at rank 0 of 1;
    so does one whose ranks hold identical bytes (data parallel replicas, for example)
    and want to share them.  What only one engine knows goes into `extra`.

    >>> identity = Identity(
    ...     connector="example", connector_version=1, model="m", weights="sha256:00",
    ...     kv_dtype="bfloat16", layout="HND", block_tokens=256, tp_rank=1, tp_size=4,
    ... )
    >>> identity.namespace()[:21]
    'cyclone_kv/1/example/'
    """

    connector: str
    """Name of the connector: lower-case letters, digits, ``_``, ``.`` and ``-``."""
    connector_version: int
    """Version of the connector's own block format."""
    model: str
    """Name of the model, equal on all replicas (not a path of one machine)."""
    weights: str
    """Fingerprint of the weights: a digest, or a revision that never moves."""
    kv_dtype: str
    """Element type of the stored KV, for example ``bfloat16``."""
    layout: str
    """Order and shape of the elements in a block."""
    block_tokens: int
    """Tokens in a block."""
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    rope: str | Mapping[str, object] | None = ""
    """Configuration of the rotary embedding; a mapping is kept as canonical JSON."""
    lora: str | None = ""
    """Name and version of the LoRA adapter, empty for the base model."""
    cache_salt: str | None = field(default="", repr=False)
    """Separates tenants that must not see each other's prefixes."""
    group: int = 0
    """Index of the KV cache group of a model that has several."""
    extra: Mapping[str, str | int] | tuple[tuple[str, str | int], ...] = ()
    """Further facts, by name."""

    def __post_init__(self) -> None:
        if not isinstance(self.connector, str):
            raise TypeError(f"connector is {self.connector!r}: give a str")
        if not _CONNECTOR_NAME.fullmatch(self.connector):
            raise ValueError(
                f"connector is {self.connector!r}: use 1 to 32 of a-z, 0-9, _, . and -"
            )
        for name in _TEXT_FIELDS:
            value = getattr(self, name)
            if not isinstance(value, str):
                raise TypeError(f"{name} is {value!r}: give a str")
            if not value:
                raise ValueError(f"{name} is empty: blocks of any {name} would mix")
        if self.rope is None:
            object.__setattr__(self, "rope", "")
        elif isinstance(self.rope, Mapping):
            object.__setattr__(self, "rope", canonical_json(self.rope))
        elif not isinstance(self.rope, str):
            raise TypeError(f"rope is {self.rope!r}: give a str or a mapping")
        for name in _OPTIONAL_TEXT_FIELDS:
            value = getattr(self, name)
            if value is None:
                object.__setattr__(self, name, "")
            elif not isinstance(value, str):
                raise TypeError(f"{name} is a {type(value).__name__}: give a str")
        self._check_integers()
        object.__setattr__(self, "extra", _sorted_extra(self.extra))

    def _check_integers(self) -> None:
        for name, least in (
            ("connector_version", 1),
            ("block_tokens", 1),
            ("group", 0),
        ):
            _check_integer(name, getattr(self, name), least)
        for axis in _PARALLEL_FIELDS:
            rank = getattr(self, f"{axis}_rank")
            size = getattr(self, f"{axis}_size")
            _check_integer(f"{axis}_size", size, 1)
            _check_integer(f"{axis}_rank", rank, 0)
            if rank >= size:
                raise ValueError(
                    f"{axis}_rank is {rank} of {axis}_size {size}: "
                    "ranks count from 0 to size - 1"
                )

    def canonical(self) -> str:
        """Return the text that is hashed; it contains the salt, so do not log it."""
        facts: dict[str, object] = {
            item.name: getattr(self, item.name) for item in fields(self)
        }
        facts["extra"] = dict(self.extra)
        facts["format"] = IDENTITY_FORMAT
        return canonical_json(facts)

    def namespace(self) -> str:
        """Return the namespace to open the cache with; about 90 ASCII characters."""
        digest = hashlib.sha256(self.canonical().encode("ascii")).hexdigest()
        return f"cyclone_kv/{IDENTITY_FORMAT}/{self.connector}/{digest}"


def _check_integer(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}: give an int")
    if value < least:
        raise ValueError(f"{name} is {value}: the least is {least}")


def _sorted_extra(
    extra: Mapping[str, str | int] | tuple[tuple[str, str | int], ...],
) -> tuple[tuple[str, str | int], ...]:
    """Bring `extra` into one order, so that equal identities compare and hash equal."""
    pairs = tuple(extra.items()) if isinstance(extra, Mapping) else tuple(extra)
    for name, value in pairs:
        if not isinstance(name, str):
            raise TypeError(f"extra names a fact by {name!r}: give a str")
        if not isinstance(value, (str, int)) or isinstance(value, bool):
            raise TypeError(f"extra[{name!r}] is {value!r}: give a str or an int")
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("extra names one fact twice")
    return tuple(sorted(pairs))
