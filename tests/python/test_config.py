# SPDX-License-Identifier: Apache-2.0
"""Options and paths: accepted as documented, or refused in words."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from cyclone_kv import (
    Cache,
    CacheConfig,
    ConfigError,
    FormatError,
    MismatchError,
    MissingPathError,
    UnsafePathError,
    VolumeError,
    _core,
    parse_size,
)

from .conftest import CAPACITY, OpenCache, key_of


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64GiB", 64 << 30),
        ("512 MiB", 512 << 20),
        ("1kib", 1024),
        ("2TiB", 2 << 40),
        ("64GB", 64 * 10**9),
        ("1.5KiB", 1536),
        ("0.1GiB", 107_374_182),
        ("4096", 4096),
        ("4096B", 4096),
        (" 7 MB ", 7_000_000),
        (12345, 12345),
    ],
)
def test_sizes_are_read_as_people_write_them(text: int | str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "1G", "GiB", "-1GiB", "1e6", "1,5GiB", "64 Gi B", "0x10", -1, 2**63]
)
def test_sizes_that_could_mean_two_things_are_refused(text: int | str) -> None:
    with pytest.raises(ConfigError, match="capacity is"):
        parse_size(text, "capacity")


@pytest.mark.parametrize("value", [1e6, None, True, b"1GiB", [1]])
def test_sizes_of_other_types_are_type_errors(value: Any) -> None:
    with pytest.raises(TypeError, match="64GiB"):
        parse_size(value)


def test_unknown_options_are_type_errors() -> None:
    """An option that is accepted and ignored is found out when nothing is offloaded."""
    with pytest.raises(TypeError):
        CacheConfig(capactiy="1GiB")
    with pytest.raises(TypeError, match="did you mean 'capacity'"):
        CacheConfig.from_dict({"capactiy": "1GiB"})
    with pytest.raises(TypeError, match="not an option"):
        CacheConfig.for_kv_tier("1GiB", zstd=True)
    with pytest.raises(TypeError):
        CacheConfig("1GiB")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("verify", "sometimes"),
        ("verify", True),
        ("on_mismatch", "delete"),
        ("stripes", -1),
        ("stripes", 2**32),
        ("io_threads", 257),
        ("admission", "never"),
        ("admission", 2),
        ("event_capacity", 1000),
        ("event_capacity", 32),
        ("event_capacity", 2**25),
        ("open_timeout", 0),
        ("open_timeout", -1.0),
        ("open_timeout", float("nan")),
        ("sync_interval", float("inf")),
        ("file_mode", 0o1777),
        ("capacity", 0),
        ("expected_object_size", -1),
        ("expected_object_size", 4095),
        ("shm_dir", ""),
        ("shm_dir", "file:///dev/shm"),
    ],
)
def test_impossible_values_are_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        CacheConfig.from_dict({name: value})


def test_numbers_too_long_to_print_are_impossible_values_too() -> None:
    """The message about them failed in the interpreter, as a bare ValueError."""
    for name, value in (
        ("capacity", 10**5000),
        ("capacity", "9" * 5000),
        ("capacity", "0." + "1" * 5000 + "GiB"),
        ("stripes", 10**5000),
        ("file_mode", -(10**5000)),
        ("open_timeout", 10**5000),
    ):
        with pytest.raises(ConfigError, match=name) as caught:
            CacheConfig.from_dict({name: value})
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stripes", 1.0),
        ("stripes", True),
        ("write_behind", "yes"),
        ("degraded", 1),
        ("open_timeout", "10s"),
        ("capacity", 1e6),
        ("shm_dir", b"/dev/shm"),
    ],
)
def test_values_of_another_type_are_type_errors(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=name):
        CacheConfig.from_dict({name: value})


def test_a_configuration_survives_json() -> None:
    config = CacheConfig.for_kv_tier(
        "1GiB", stripes=4, shm_dir=Path("/dev/shm"), sync_interval=None
    )
    values = json.loads(json.dumps(config.to_dict()))
    assert values["capacity"] == 1 << 30
    again = CacheConfig.from_dict(values)
    assert again == config.replace(shm_dir="/dev/shm")
    assert again.replace(stripes=8).stripes == 8


def test_a_configuration_is_immutable() -> None:
    config = CacheConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.stripes = 3
    assert not hasattr(config, "__dict__")


def test_the_preset_can_be_changed() -> None:
    config = CacheConfig.for_kv_tier("1GiB")
    assert config.write_behind
    assert config.admission == "adaptive"
    assert CacheConfig().admission == "always"
    assert not CacheConfig.for_kv_tier("1GiB", write_behind=False).write_behind


@pytest.mark.parametrize(
    ("path", "error", "words"),
    [
        ("", ConfigError, "empty"),
        ("a\0b", ConfigError, "NUL"),
        ("file:///x/kv.cyc", ConfigError, "'/x/kv.cyc'"),
        ("file://x", ConfigError, "URL"),
        ("file:/x", ConfigError, "URL"),
        ("s3://bucket/x", ConfigError, "URL"),
        ("~no-such-user/kv.cyc", ConfigError, "no such user"),
        (b"/x/kv.cyc", TypeError, "os.fsdecode"),
        (None, TypeError, "os.PathLike"),
        (7, TypeError, "os.PathLike"),
        (("a", "b"), TypeError, "list"),
        ([], ConfigError, "1 to 16"),
        (["a"] * 17, ConfigError, "1 to 16"),
        (["a", "a"], ConfigError, "twice"),
        ([("a", "1GiB")], ConfigError, "capacity is given twice"),
    ],
)
def test_paths_that_are_no_paths_are_refused(
    path: Any, error: type[Exception], words: str
) -> None:
    """A path like file://~/cache must not make a directory with that name."""
    with pytest.raises(error, match=words):
        Cache.open(path, CacheConfig(capacity=CAPACITY))


def test_a_tilde_is_the_home_directory(
    volume_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(volume_path.parent))
    with Cache.open("~/kv.cyc", CacheConfig(capacity=CAPACITY)) as cache:
        assert cache.paths == (str(volume_path),)
        assert "kv.cyc" in repr(cache)
    assert volume_path.exists()


def test_a_path_may_have_any_name_that_files_can_have(volume_path: Path) -> None:
    for name in ("a b", "ü", "$HOME", "x\ny", os.fsdecode(b"\xff\xfe"), "-", "%s%n"):
        path = volume_path.parent / name
        with Cache.open(path, CacheConfig(capacity=CAPACITY)) as cache:
            assert cache.put(key_of(1), b"x")
            assert cache.info().paths[0].path == str(path)
        path.unlink()
        for rest in volume_path.parent.iterdir():
            rest.unlink()


def test_a_missing_volume_without_capacity_says_so(volume_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no capacity was given") as caught:
        Cache.open(volume_path)
    assert isinstance(caught.value, VolumeError)
    assert caught.value.filename == str(volume_path)
    for options in ({"create": False}, {"mode": "r"}):
        with pytest.raises(FileNotFoundError, match="not created"):
            Cache.open(volume_path, CacheConfig(capacity=CAPACITY), **options)
    assert not volume_path.exists()


def test_an_existing_volume_keeps_its_geometry(
    open_cache: OpenCache, volume_path: Path
) -> None:
    open_cache().put(key_of(1), b"x")
    assert open_cache(CacheConfig()).get(key_of(1)) == b"x"
    with pytest.raises(MismatchError):
        open_cache(CacheConfig(capacity=2 * CAPACITY))
    assert open_cache(create=False).get(key_of(1)) == b"x"


def test_several_paths_share_the_capacity(volume_path: Path) -> None:
    paths = [volume_path.parent / name for name in ("one.cyc", "two.cyc")]
    with Cache.open(paths, CacheConfig(capacity=2 * CAPACITY)) as cache:
        assert cache.stats().volume.capacity_bytes <= 2 * CAPACITY
        assert cache.put(key_of(1), b"x")
    for path in paths:
        assert path.exists()


def test_several_paths_may_have_capacities_of_their_own(volume_path: Path) -> None:
    one, two = (volume_path.parent / name for name in ("one.cyc", "two.cyc"))
    with Cache.open([(one, CAPACITY), (str(two), "128MiB")]) as cache:
        assert cache.stats().volume.capacity_bytes > CAPACITY
        assert cache.put(key_of(1), b"x")
    with pytest.raises(ConfigError, match="is 0"):
        Cache.open([(one, 0)])


def test_open_refuses_other_types(volume_path: Path) -> None:
    with pytest.raises(TypeError, match="from_dict"):
        Cache.open(volume_path, {"capacity": "1GiB"})
    for mode in ("w", b"rw", None, []):
        with pytest.raises(ConfigError, match="mode"):
            Cache.open(volume_path, mode=mode)
    for member in ((), (volume_path,), (volume_path, 1, 2)):
        with pytest.raises(TypeError, match=r"\(path, capacity\)"):
            Cache.open([member], CacheConfig(capacity=CAPACITY))
    with pytest.raises(TypeError):
        Cache.open(volume_path, CacheConfig(capacity=CAPACITY), namespace=7)
    with pytest.raises(TypeError):
        Cache.open(volume_path, capacity="1GiB")


def test_a_share_of_less_than_a_page_is_not_taken_for_no_capacity(
    volume_path: Path,
) -> None:
    paths = [volume_path, volume_path.with_suffix(".2")]
    with pytest.raises(ConfigError, match="less than a page"):
        Cache.open(paths, CacheConfig(capacity=8191))


def test_a_set_with_a_member_missing_can_be_opened_degraded(
    volume_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was "not found" unless a capacity was given, and always with mode="r"."""
    paths = [volume_path, volume_path.with_suffix(".2")]
    Cache.open(paths, CacheConfig(capacity=2 * CAPACITY)).close()
    for path in volume_path.parent.iterdir():
        if path != volume_path:
            path.unlink()
    for options in ({}, {"create": False}, {"mode": "r"}):
        with Cache.open(paths, CacheConfig(degraded=True), **options) as cache:
            assert [path.present for path in cache.info().paths] == [True, False]
        with pytest.raises(MissingPathError, match="degraded"):
            Cache.open(paths, **options)


def test_raw_options_of_other_types_are_type_errors() -> None:
    """They were SystemError, and a NUL ended the path."""
    for paths, options in (
        ([], {}),
        ((5,), {}),
        (((b"kv.cyc",),), {}),
        (((5, 5),), {}),
        ((), []),
        (((b"kv.cyc", 1),), {1: 2}),
        (((b"kv.cyc", 1),), {"shm_directory": "text"}),
    ):
        with pytest.raises(TypeError):
            _core.Cache()._open(paths, options)
    with pytest.raises(ValueError, match="null"):
        _core.Cache()._open(((b"kv.cyc\0", 64 << 20),), {})


BAD_CAPACITIES = [1, 10, 4095, 2**47, 2**62]
BAD_STRIPES = [10**6]


@pytest.mark.parametrize("capacity", BAD_CAPACITIES)
def test_absurd_capacities_are_errors_and_leave_nothing(
    volume_path: Path, capacity: int
) -> None:
    with pytest.raises((ConfigError, OSError)):
        Cache.open(volume_path, CacheConfig(capacity=capacity))
    assert not list(volume_path.parent.iterdir())
    with Cache.open(volume_path, CacheConfig(capacity=CAPACITY)) as cache:
        assert cache.put(key_of(1), b"x")


@pytest.mark.parametrize("stripes", BAD_STRIPES)
def test_absurd_stripes_are_errors_and_leave_nothing(
    volume_path: Path, stripes: int
) -> None:
    with pytest.raises((ConfigError, OSError)):
        Cache.open(volume_path, CacheConfig(capacity=CAPACITY, stripes=stripes))
    assert not list(volume_path.parent.iterdir())


def test_an_empty_file_is_an_unfinished_creation(volume_path: Path) -> None:
    volume_path.write_bytes(b"")
    with Cache.open(volume_path, CacheConfig(capacity=CAPACITY)) as cache:
        assert cache.put(key_of(1), b"x")


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "kind",
    ["directory", "fifo", "device", "link", "dangling", "no folder", "text"],
)
def test_things_that_are_no_volume_are_refused_unharmed(
    volume_path: Path, kind: str
) -> None:
    path = volume_path
    text = b"somebody's notes " * 10_000
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/null")
    elif kind == "link":
        target = volume_path.parent / "target"
        target.write_bytes(text)
        path.symlink_to(target)
    elif kind == "dangling":
        path.symlink_to(volume_path.parent / "nowhere")
    elif kind == "no folder":
        path = volume_path.parent / "missing" / "kv.cyc"
    elif kind == "text":
        path.write_bytes(text)
    expected: Any = {
        "text": FormatError,
        "no folder": FileNotFoundError,
    }.get(kind, UnsafePathError)
    with pytest.raises(expected):
        Cache.open(path, CacheConfig(capacity=CAPACITY))
    if kind == "text":
        assert path.read_bytes() == text
    elif kind == "link":
        assert target.read_bytes() == text
    elif kind == "dangling":
        assert not (volume_path.parent / "nowhere").exists()
    elif kind == "device":
        assert stat.S_ISCHR(path.stat().st_mode)
    other = volume_path.parent / "other.cyc"
    with Cache.open(other, CacheConfig(capacity=CAPACITY)) as cache:
        assert cache.put(key_of(1), b"x")
