# SPDX-License-Identifier: Apache-2.0
"""A namespace does not see, guess, count, change or clear what another one has.

Every public name of Cache is in one of three lists below: what works on the namespace
of the handle, what shows the whole volume on purpose, and what touches no block.  A new
name fails here until it is in one of them.
"""

from __future__ import annotations

import hashlib
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from cyclone_kv import Cache, CacheConfig
from cyclone_kv.cli import cli

MIB = 1 << 20
NAMES = ["", "tenant", "tenant2", b"\0", b"\0" * 16, "tenant\0", b"\xff" * 300]
OWN = {
    *(
        "contains",
        "contains_many",
        "get",
        "get_into",
        "get_many_into",
        "longest_prefix",
    ),
    *("locate", "prefetch", "put", "put_many", "read", "remove", "reserve", "touch"),
    *("clear", "__contains__", "__len__"),
}
# These go through _pin_many, _copy_many and put_many.
DEVICE = {"put_from_device", "upload", "upload_async"}
VOLUME = {"events", "info", "ls", "recover", "stats", "sync", "verify"}
NEITHER = {
    *("close", "closed", "config", "mode", "namespace_tag", "open", "paths"),
    *("cuda_registration", "register_cuda", "unregister_cuda"),
}


def key(number: int) -> bytes:
    return number.to_bytes(8, "little") * 4


def payload(name: str | bytes, number: int) -> bytes:
    text = name.encode() if isinstance(name, str) else name
    return hashlib.sha256(text + key(number)).digest() * (1 + number * 17 % 200)


@pytest.fixture
def caches(volume_path: Path) -> Iterator[dict[str | bytes, Cache]]:
    config = CacheConfig(capacity=64 * MIB)
    opened = {n: Cache.open(volume_path, config, namespace=n) for n in NAMES}
    yield opened
    for cache in opened.values():
        cache.close()


def test_every_public_name_is_in_a_list() -> None:
    public = {name for name in dir(Cache) if not name.startswith("_")}
    # Names that connectors or helpers add to the class are names, too.
    assert public == (OWN | DEVICE | VOLUME | NEITHER) - {"__contains__", "__len__"}


def test_what_goes_to_a_device_is_a_block_of_ones_own(
    caches: dict[str | bytes, Cache],
) -> None:
    mine, other = list(caches.values())[:2]
    assert mine.put(key(1), b"mine" * 1000)
    target = bytearray(4000)
    assert other._pin_many([key(1)], None) == [None]
    assert other._copy_many([key(1)], [target]) == [-1]
    assert target == bytes(4000)
    assert mine._copy_many([key(1)], [target]) == [4000]


def test_the_same_keys_are_different_blocks(caches: dict[str | bytes, Cache]) -> None:
    for name, cache in caches.items():
        for number in range(20):
            assert cache.put(key(number), payload(name, number), header=b"of " + key(1))
    for name, cache in caches.items():
        assert len(cache) == 20
        for number in range(20):
            assert cache.get(key(number)) == payload(name, number)


def lookups(cache: Cache, names: list[bytes]) -> list[tuple[str, object]]:
    """What each call that works on a namespace answers about keys it must not see."""
    target = bytearray(9000)
    answers: list[tuple[str, object]] = [
        ("len", len(cache) == 0),
        ("contains_many", not any(cache.contains_many(names))),
        ("longest_prefix", cache.longest_prefix(names) == 0),
        ("longest_prefix touch", cache.longest_prefix(names, touch=True) == 0),
        ("prefetch", cache.prefetch(names) == 0),
        ("touch", cache.touch(names) == 0),
        (
            "get_many_into",
            not any(cache.get_many_into(names, [bytearray(9000) for _ in names])),
        ),
    ]
    for name in names:
        answers += [
            ("contains", not cache.contains(name)),
            ("in", name not in cache),
            ("get", cache.get(name) is None),
            ("read", cache.read(name) is None),
            ("get_into", cache.get_into(name, target) is None),
            ("locate", cache.locate(name) is None),
            ("remove", not cache.remove(name)),
        ]
    answers.append(("target", target == bytes(9000)))
    answers.append(("clear", cache.clear() == 0))
    return answers


@pytest.mark.parametrize("mode", ["rw", "r"])
def test_no_call_finds_a_block_of_another_namespace(
    volume_path: Path, mode: str
) -> None:
    config = CacheConfig(capacity=64 * MIB)
    with Cache.open(volume_path, config, namespace="tenant") as owner:
        names = [key(number) for number in range(8)]
        long = [b"a long name %d" % number * 5 for number in range(4)]
        for number, name in enumerate(names + long):
            assert owner.put(name, payload("tenant", number))
        # As the file has them: digests, and the tag of the namespace in front.
        tag = hashlib.sha256(b"tenant").digest()[:16]
        guesses = [
            *names,
            *long,
            *(hashlib.sha256(name).digest() for name in long),
            *(tag + name for name in names),
            *(tag + name[:16] for name in names),
            *(b"tenant" + name for name in names),
        ]
        before = owner.verify()
        for other in ("", "other", "tenant\0", tag, tag.hex(), "tenan", "Tenant"):
            with Cache.open(volume_path, config, namespace=other, mode=mode) as cache:
                if mode == "rw":
                    answers = lookups(cache, guesses)
                else:
                    answers = [
                        ("contains_many", not any(cache.contains_many(guesses))),
                        ("get", all(cache.get(name) is None for name in guesses)),
                        ("len", len(cache) == 0),
                    ]
                assert [what for what, right in answers if not right] == [], other
        assert len(owner) == len(names + long)
        for number, name in enumerate(names + long):
            assert owner.get(name) == payload("tenant", number)
        assert owner.verify().entries_checked == before.entries_checked


def test_no_call_changes_a_block_of_another_namespace(
    caches: dict[str | bytes, Cache], rng: random.Random
) -> None:
    """Any calls of all the others, and all blocks of one are what they were."""
    victim, *others = caches.values()
    for number in range(30):
        assert victim.put(key(number), payload("", number))
    names = [name for name in NAMES if name != ""]
    for _ in range(2000):
        place = rng.randrange(len(others))
        other, number = others[place], rng.randrange(30)
        data = payload(names[place], number)
        action = rng.randrange(8)
        if action <= 2:
            other.put(key(number), data, overwrite=True)
        elif action == 3:
            other.put_many(
                [(key(number), data), (key(number + 1), data)],
                chain=True,
                parent=key(rng.randrange(30)),
                overwrite=True,
            )
        elif action == 4:
            other.remove(key(number))
        elif action == 5 and rng.randrange(10) == 0:
            other.clear()
        elif action == 6:
            other.touch([key(n) for n in range(30)])
        else:
            with other.reserve(key(number), 100, overwrite=True) as slot:
                slot.view[:4] = b"mine"
    assert len(victim) == 30
    for number in range(30):
        assert victim.get(key(number)) == payload("", number)
    report = victim.verify()
    assert report.ok, report.first_fault


def test_a_put_in_flight_says_nothing_in_another_namespace(
    volume_path: Path,
) -> None:
    """A hint names the writer of a key: another namespace must not meet it."""
    config = CacheConfig(capacity=64 * MIB)
    with (
        Cache.open(volume_path, config, namespace="a") as one,
        Cache.open(volume_path, config, namespace="b") as two,
    ):
        stop = threading.Event()
        data = bytes(8 * MIB)

        def store() -> None:
            while not stop.is_set():
                one.put(key(1), data, overwrite=True)

        thread = threading.Thread(target=store)
        thread.start()
        try:
            for _ in range(300):
                assert two.put(key(1), b"x", overwrite=True)
        finally:
            stop.set()
            thread.join()
        assert two.stats().process.puts_in_flight == 0


def test_what_the_ghost_knows_of_a_namespace_is_its_own(volume_path: Path) -> None:
    """A refusal must not turn into an admission because another asked for the key."""
    config = CacheConfig(capacity=16 * MIB, admission="second-touch")
    with (
        Cache.open(volume_path, config, namespace="a") as one,
        Cache.open(volume_path, config, namespace="b") as two,
    ):
        for number in range(1000, 1100):  # full, and evicting
            one.put(key(number), bytes(MIB - 4096))
        first = [one.put(key(number), b"x") for number in range(5)]
        assert not any(first)
        assert not any(two.put(key(number), b"x") for number in range(5))
        assert all(one.put(key(number), b"x") for number in range(5))


def test_what_shows_the_volume_tells_no_names_of_namespaces(
    caches: dict[str | bytes, Cache],
) -> None:
    """Events and ls are for operators: tags and keys, neither names nor payloads."""
    cache = caches["tenant"]
    secret = b"prompt-of-a-tenant" * 3
    assert cache.put(secret, b"PAYLOAD" * 100, header=b"HEADER" * 3)
    other = caches["tenant2"]
    shown = repr(
        [list(other.ls()), other.events(), other.stats(), other.info(), other.verify()]
    )
    for word in ("tenant", "prompt", "PAYLOAD", "HEADER"):
        assert word not in shown, word
    assert {entry.namespace_tag for entry in other.ls()} == {
        hashlib.sha256(b"tenant").digest()[:16]
    }


# ---- the command line ---------------------------------------------------------------


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_line_clears_one_namespace(volume_path: Path) -> None:
    config = CacheConfig(capacity=64 * MIB)
    for name in ("", "a", "b"):
        with Cache.open(volume_path, config, namespace=name) as cache:
            assert cache.put(key(1), b"x")

    def left() -> list[int]:
        counts = []
        for name in ("", "a", "b"):
            with Cache.open(volume_path, config, namespace=name) as cache:
                counts.append(len(cache))
        return counts

    run("clear", volume_path, "--namespace", "a", "--yes")
    assert left() == [1, 0, 1]
    run("clear", volume_path, "--namespace", "nobody", "--yes")
    assert left() == [1, 0, 1]
    run("clear", volume_path, "--yes")
    assert left() == [0, 0, 1]


def commands_with_namespace() -> set[str]:
    return {
        name
        for name, command in cli.commands.items()
        if any("--namespace" in parameter.opts for parameter in command.params)
    }


def test_each_command_either_takes_a_namespace_or_shows_no_payload(
    volume_path: Path,
) -> None:
    with Cache.open(
        volume_path, CacheConfig(capacity=64 * MIB), namespace="tenant"
    ) as cache:
        assert cache.put(b"prompt" * 9, b"PAYLOAD" * 100, header=b"HEADER")
    assert commands_with_namespace() >= {"clear"}
    for name in sorted(set(cli.commands) & {"info", "stats", "ls", "verify"}):
        output = run(name, volume_path)
        assert not re.search("tenant(?!.*cyc)|prompt|PAYLOAD|HEADER", output), output
