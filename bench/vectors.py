# SPDX-License-Identifier: Apache-2.0
"""What the generators must produce; a run whose machine disagrees measures nothing."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Iterator

from bench import generators
from cyclone_kv import _core

__all__ = ["Vector", "check"]

_KIB = 1 << 10
_MIB = 1 << 20

_KEYS = {
    0: "d0f3364baf2685e5b5fc6d8e20fbca3f36cb1a28e3877fc2030e564e4e14dd40",
    1: "44fcc049028e832fd0dd9078d6122820a063511fa15e936f6465a12df080b4ba",
    2: "c5603a48a6f4dc38417f54394b4f6c5b1d37a9275e9d1207f8784e31bf3c0999",
}
_HEADS = {
    0: "763b8d943658586901959330cf55f881",
    1: "dbd16c0535cee447db09b73d23d6c47e",
    2: "b6a3d90a6a9cc98fb6136e7b46ac89fd",
}
_ZIPF = {  # of 2048 ranks, by seed
    42: "8 12 44 22 6 0 0 38 28 389",
    43: "88 817 1930 566 4 2 381 0 26 13",
}
_STREAMS = {  # (universe, thread, scan): index/first four bytes of the key
    (24576, 0, False): "7700/c2a3658d 13615/2358d785 15692/f5863216 4926/54e0669b "
    "10997/c6add4fa 23573/677bbff9 23573/677bbff9 22519/01a05535 10549/d01ed625 "
    "16656/03258f4e 6506/1525ef69 3338/f3d62629",
    (24576, 1, False): "12554/1ecaeb65 13478/ec6073a9 22844/19799a46 7190/072f0877 "
    "16279/258fda28 8277/acdf06e1 5305/7df2fd1f 23573/677bbff9 14761/ef5e0531 "
    "12242/8c3cbd7d 9396/4f79cd21 7700/c2a3658d",
    (24576, 0, True): "7700/c2a3658d 13615/2358d785 15692/f5863216 4926/54e0669b "
    "10997/c6add4fa 23573/677bbff9 23573/677bbff9 1099511627776/6fdf167b "
    "22519/01a05535 10549/d01ed625 16656/03258f4e 1099511627777/f11f5dc2",
    (24576, 1, True): "12554/1ecaeb65 13478/ec6073a9 22844/19799a46 7190/072f0877 "
    "16279/258fda28 8277/acdf06e1 5305/7df2fd1f 23573/677bbff9 14761/ef5e0531 "
    "1103806595072/5cb8bfa5 1103806595073/dafeb106 1103806595074/bf4b5300",
    (98304, 0, False): "84739/184dafb2 50997/938a3c20 59484/c63a699c 56966/fb335274 "
    "80018/18fc92ee 89418/926f3af2 89418/926f3af2 12401/dd7ac3f7 67495/84941ca3 "
    "65617/374f7c02 68293/28a83ba0 35061/ae6a0c2f",
    (98304, 1, False): "69145/507b4be7 29999/f7571761 88332/a4323fb7 79470/c211bb2a "
    "60302/58e45cf3 9459/bcca9cbc 42919/7588f4f8 89418/926f3af2 11501/7838a300 "
    "11482/7cbcf8b9 80666/a2853027 75783/6d672647",
    (98304, 0, True): "84739/184dafb2 50997/938a3c20 59484/c63a699c 56966/fb335274 "
    "80018/18fc92ee 89418/926f3af2 89418/926f3af2 1099511627776/6fdf167b "
    "12401/dd7ac3f7 67495/84941ca3 65617/374f7c02 1099511627777/f11f5dc2",
    (98304, 1, True): "69145/507b4be7 29999/f7571761 88332/a4323fb7 79470/c211bb2a "
    "60302/58e45cf3 9459/bcca9cbc 42919/7588f4f8 89418/926f3af2 11501/7838a300 "
    "1103806595072/5cb8bfa5 1103806595073/dafeb106 1103806595074/bf4b5300",
}
_CHECKSUMS = {  # (bytes, index): CRC-32, CRC-32C, CRC-32C of metadata + value, the end
    (64 * _KIB, 0): "bcbc541b 48be9f53 34846070 3361f5df76bcda5f",
    (512 * _KIB, 0): "c5287f95 29238764 5dcf0252 ff6125a20da6e922",
    (512 * _KIB, 1): "09996d31 e98744aa 9c00a619 d486436a3da11daf",
    (512 * _KIB, 2): "fa0230d3 65bc790a 13806e4f 0f74c2608b492292",
    (2 * _MIB, 0): "e3ebb55b 9d4eb04d 82675acd 1505beecf287549f",
    (2 * _MIB, 1): "516a7149 8099b664 f443ffd0 6f1685777950b834",
    (2 * _MIB, 2): "f7a51604 946a227a 3c8c71c8 e498411838477a1f",
    (2 * _MIB, 2**40): "007f526c e7bc8135 a0361162 0aba51e9a98ca946",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Vector:
    """One value that was recomputed."""

    name: str
    expected: str
    found: str

    @property
    def matches(self) -> bool:
        """Whether it came out as it must."""
        return self.expected == self.found


def _zipf_head(seed: int, count: int) -> str:
    ranks = generators.Zipf(2048)
    random = generators.XorShift(seed)
    return " ".join(str(ranks.rank(random)) for _ in range(count))


def _head(stream: Iterator[int], count: int) -> str:
    return " ".join(
        f"{index}/{generators.key(index)[:4].hex()}"
        for index in itertools.islice(stream, count)
    )


def _checksums(nbytes: int, index: int) -> str:
    payload = generators.value(index, nbytes)
    with_metadata = _core.crc32c(payload, _core.crc32c(generators.metadata(index)))
    return (
        f"{zlib.crc32(payload):08x} {_core.crc32c(payload):08x} "
        f"{with_metadata:08x} {payload[-8:].hex()}"
    )


def _recompute() -> Iterator[tuple[str, str, str]]:
    """Yield name, expected and found."""
    for index, text in _KEYS.items():
        yield f"key {index}", text, generators.key(index).hex()
    for index, text in _HEADS.items():
        yield f"value {index}", text, generators.value(index, 16).hex()
    for seed, text in _ZIPF.items():
        yield f"zipf(2048) seed {seed}", text, _zipf_head(seed, len(text.split()))
    for (universe, thread, scan), text in _STREAMS.items():
        name = f"stream of {universe}, thread {thread}{', scan' if scan else ''}"
        stream = generators.churn_stream(universe, thread, scan=scan)
        yield name, text, _head(stream, len(text.split()))
    for (nbytes, index), text in _CHECKSUMS.items():
        name = f"checksums of value {index}, {nbytes // _KIB} KiB"
        yield name, text, _checksums(nbytes, index)


def check() -> list[Vector]:
    """Recompute every vector."""
    return [Vector(*row) for row in _recompute()]
