# SPDX-License-Identifier: Apache-2.0
"""What lies at the paths that are opened, who owns it, and who may use what is created.

Which paths those are is held by tests/core/test_opened_paths.py.  Every open runs in a
process of its own: one that hangs or dies shows as such.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import stat
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cyclone_kv import Cache, CacheConfig

MIB = 1 << 20
NOBODY = 65534
GROUP = 54321  # nobody's by default
CONTENT = b"somebody's letters\n" * 1000
pytestmark = pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: other users")


def open_and_use(paths: list[Path], mode: str, wait: bool, config: object) -> None:
    with Cache.open(list(paths), config, mode=mode) as cache:
        if mode == "rw":
            assert cache.put(b"k" * 32, b"v" * 9000)
        print("stored" if mode == "rw" else "read", flush=True)
        if wait:
            sys.stdin.read()


class Child:
    """A process that opens a volume, as `user`; `answer` is what it says about it."""

    def __init__(
        self,
        paths: list[Path],
        *,
        mode: str = "rw",
        wait: bool = False,
        user: int | None = None,
        groups: Sequence[int] = (),
        **config: object,
    ) -> None:
        settings = CacheConfig(capacity=64 * MIB, open_timeout=3.0).replace(**config)
        read, write = os.pipe()
        go, self.go = os.pipe()
        # Not exec: the interpreter may lie where only root can go.
        self.pid = os.fork()
        if self.pid == 0:
            signal.alarm(30)
            code = 1
            try:
                os.dup2(go, 0)
                os.dup2(write, 1)
                os.close(self.go)
                sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
                if user is not None:
                    os.setgroups(list(groups))
                    os.setgid(user)
                    os.setuid(user)
                    os.umask(0o077)
                try:
                    open_and_use(paths, mode, wait, settings)
                except Exception as error:
                    print(type(error).__name__, "|", error, flush=True)
                code = 0
            finally:
                os._exit(code)
        os.close(write)
        os.close(go)
        with os.fdopen(read) as output:
            self.answer = output.readline().rstrip("\n")

    def end(self) -> None:
        os.close(self.go)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        assert code == 0, (code, self.answer)


def try_open(paths: list[Path], **settings: Any) -> str:
    """What another process says about opening; fails when it dies or hangs."""
    child = Child(paths, **settings)
    child.end()
    return child.answer


@contextmanager
def opened(paths: list[Path], user: int, **settings: Any) -> Iterator[None]:
    """Another process, of `user`, has the volume open meanwhile."""
    child = Child(paths, user=user, wait=True, **settings)
    try:
        assert child.answer == "stored"
        yield
    finally:
        child.end()


@pytest.fixture
def folder(volume_path: Path) -> Path:
    """Where nobody can go as well, as far as the modes below it let him."""
    for path in (volume_path.parent, *volume_path.parent.parents):
        if path.stat().st_mode & 0o001 == 0:
            path.chmod(path.stat().st_mode | 0o711)
    return volume_path.parent


# ---- what lies there -----------------------------------------------------------------


def plant_nothing_at_all(place: Path, letters: Path) -> None:
    place.symlink_to(letters.with_name("absent"))


def plant_foreign(place: Path, letters: Path) -> None:
    place.write_bytes(b"")
    os.chown(place, NOBODY, NOBODY)


def plant_socket(place: Path, letters: Path) -> None:
    # The name of a socket has a small limit.
    short = Path(f"/tmp/ckv-{os.getpid()}.socket")
    short.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(short))
        try:
            os.link(short, place)
        except OSError:  # another file system
            os.mknod(place, stat.S_IFSOCK | 0o600)
        short.unlink()


def plant_folder(place: Path, letters: Path) -> None:
    place.mkdir()


PLANTS: dict[str, Callable[[Path, Path], None]] = {
    "link": lambda place, letters: place.symlink_to(letters),
    "dangling link": plant_nothing_at_all,
    "link to a folder": lambda place, letters: place.symlink_to(letters.parent),
    "hard link": lambda place, letters: os.link(letters, place),
    "fifo": lambda place, letters: os.mkfifo(place),
    "socket": plant_socket,
    "device": lambda place, letters: os.mknod(
        place, stat.S_IFCHR | 0o666, os.makedev(1, 3)
    ),
    "folder": plant_folder,
    "foreign file": plant_foreign,
}
every_plant = pytest.mark.parametrize(
    "plant",
    [
        pytest.param(name, marks=as_root)
        if name in {"device", "foreign file"}
        else name
        for name in PLANTS
    ],
)


@pytest.fixture
def letters(folder: Path) -> Iterator[Path]:
    """A file that a link may lead to; nothing is ever done to it."""
    path = folder / "letters"
    path.write_bytes(CONTENT)
    path.chmod(0o640)
    yield path
    assert path.read_bytes() == CONTENT
    assert path.stat().st_mode & 0o777 == 0o640
    assert not path.with_name("absent").exists()


@every_plant
@pytest.mark.parametrize("mode", ["rw", "r"])
@pytest.mark.parametrize("second", [False, True], ids=["alone", "of a set"])
def test_a_volume_is_a_regular_file_of_our_own(
    folder: Path, letters: Path, plant: str, mode: str, second: bool
) -> None:
    place = folder / "planted.cyc"
    paths = [folder / "first.cyc", place] if second else [place]
    PLANTS[plant](place, letters)
    before = os.lstat(place)
    for mismatch in ("raise", "recreate"):
        answer = try_open(paths, mode=mode, on_mismatch=mismatch)
        kind, _, sentence = answer.partition(" | ")
        assert kind.endswith("Error"), answer
        assert len(sentence) > 20, answer
    after = os.lstat(place)
    kept = ("st_ino", "st_mode", "st_size", "st_uid", "st_nlink")
    assert [getattr(after, name) for name in kept] == [
        getattr(before, name) for name in kept
    ]


@every_plant
@pytest.mark.parametrize("apart", [False, True], ids=["beside", "apart"])
def test_what_lies_where_the_region_is_made_is_replaced(
    folder: Path, letters: Path, plant: str, apart: bool
) -> None:
    path, shm = folder / "kv.cyc", folder / "shm"
    shm.mkdir()
    config = {"shm_dir": str(shm)} if apart else {}
    assert try_open([path], **config) == "stored"
    (place,) = shm.iterdir() if apart else [folder / "kv.cyc-shm"]
    place.unlink()
    PLANTS[plant](place, letters)
    answer = try_open([path], **config)
    if plant == "folder":
        assert "remove" in answer, answer
        assert place.is_dir()
    else:
        assert answer == "stored"
        assert stat.S_ISREG(os.lstat(place).st_mode)
        assert os.lstat(place).st_nlink == 1
        assert os.lstat(place).st_uid == os.geteuid()


@every_plant
@pytest.mark.parametrize("mode", ["rw", "r"])
@pytest.mark.parametrize("apart", [False, True], ids=["beside", "apart"])
def test_what_lies_where_peers_have_the_region_is_refused(
    folder: Path, letters: Path, plant: str, mode: str, apart: bool
) -> None:
    path, shm = folder / "kv.cyc", folder / "shm"
    shm.mkdir()
    config = {"shm_dir": str(shm)} if apart else {}
    with Cache.open(path, CacheConfig(capacity=64 * MIB, **config)) as cache:
        assert cache.put(b"k" * 32, b"v" * 9000)
        (place,) = shm.iterdir() if apart else [folder / "kv.cyc-shm"]
        kept = place.rename(folder / "kept")
        PLANTS[plant](place, letters)
        kind, _, sentence = try_open([path], mode=mode, **config).partition(" | ")
        assert kind.endswith("Error"), (kind, sentence)
        assert "shared region" in sentence
        assert cache.get(b"k" * 32) == b"v" * 9000
        if plant == "folder":
            place.rmdir()
        kept.replace(place)
        assert try_open([path], mode=mode, **config) in {"stored", "read"}


# ---- whose it is ---------------------------------------------------------------------


@as_root
def test_a_volume_of_somebody_else_is_refused(folder: Path) -> None:
    home = folder / "home"
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    path = home / "kv.cyc"
    assert try_open([path], user=NOBODY) == "stored"
    assert try_open([path]).startswith("UnsafePathError")
    home.chmod(0o755)
    os.chown(home, 0, 0)
    assert "belongs to user 65534" in try_open([path])
    assert "belongs to user 65534" in try_open([path], mode="r")
    assert try_open([path], allow_shared_directory=True) == "stored"


@as_root
@pytest.mark.parametrize("owner", [NOBODY, 0])
def test_a_folder_of_regions_in_which_others_can_exchange_them_is_refused(
    folder: Path, owner: int
) -> None:
    """It was not looked at: who could write there could exchange the region."""
    shm = folder / "shm"
    shm.mkdir()
    shm.chmod(0o777 if owner == 0 else 0o755)
    os.chown(shm, owner, owner)
    path = folder / "kv.cyc"
    assert try_open([path], shm_dir=str(shm)).startswith("UnsafePathError")
    assert list(shm.iterdir()) == []
    assert not path.exists()
    assert try_open([path], shm_dir=str(shm), allow_shared_directory=True) == "stored"
    # The header of the volume names the folder, which is no better for that.
    assert try_open([path]).startswith("UnsafePathError")
    if owner == 0:
        shm.chmod(0o1777)
        assert try_open([path]) == "stored"


@as_root
def test_a_region_of_somebody_else_is_refused(folder: Path) -> None:
    """A region that another user had made was mapped without a look at its owner."""
    home = folder / "home"
    home.mkdir()
    home.chmod(0o1777)
    path = home / "kv.cyc"
    assert try_open([path], file_mode=0o666) == "stored"
    Path(f"{path}-shm").unlink()
    with opened([path], NOBODY):
        assert Path(f"{path}-shm").stat().st_uid == NOBODY
        for mode in ("rw", "r"):
            answer = try_open([path], mode=mode)
            assert answer.startswith("UnsafePathError"), answer
            assert "belongs to user 65534" in answer
        assert try_open([path], allow_shared_directory=True) == "stored"


# ---- who may use what is created -----------------------------------------------------


@as_root
def test_a_region_is_open_to_the_group_of_its_volume_alone(folder: Path) -> None:
    """It had the group of its creator, with the permissions that the volume's has."""
    home = folder / "home"
    home.mkdir()
    path, region = home / "kv.cyc", home / "kv.cyc-shm"
    assert try_open([path], file_mode=0o660) == "stored"
    region.unlink()
    home.chmod(0o775)
    for each in (home, path):
        os.chown(each, 0, GROUP)
    assert try_open([path], user=NOBODY, groups=[GROUP]) == "stored"
    found = region.stat()
    assert (found.st_uid, found.st_gid) == (NOBODY, GROUP)
    assert found.st_mode & 0o777 == 0o660


@as_root
def test_without_the_group_of_its_volume_a_region_is_open_to_no_group(
    folder: Path,
) -> None:
    home = folder / "home"
    home.mkdir()
    path, region = home / "kv.cyc", home / "kv.cyc-shm"
    assert try_open([path], file_mode=0o660) == "stored"
    region.unlink()
    os.chown(home, NOBODY, 0)
    os.chown(path, NOBODY, GROUP)  # nobody is no member
    assert try_open([path], user=NOBODY) == "stored"
    found = region.stat()
    assert (found.st_uid, found.st_gid) == (NOBODY, NOBODY)
    assert found.st_mode & 0o777 == 0o600


@as_root
def test_root_makes_a_region_for_the_owner_of_the_volume(folder: Path) -> None:
    """It was root's: while root had the volume open, its owner could not open it."""
    home = folder / "home"
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    path = home / "kv.cyc"
    assert try_open([path], user=NOBODY) == "stored"
    config = CacheConfig(allow_shared_directory=True)
    with Cache.open(path, config) as cache:
        assert Path(f"{path}-shm").stat().st_uid == NOBODY
        assert try_open([path], user=NOBODY) == "stored"
        assert cache.get(b"k" * 32) == b"v" * 9000


@as_root
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_only_those_with_permission_can_open_it(folder: Path, mode: int) -> None:
    home = folder / "home"
    home.mkdir()
    home.chmod(0o755)
    path = home / "kv.cyc"
    with Cache.open(path, CacheConfig(capacity=64 * MIB, file_mode=mode)) as cache:
        assert cache.put(b"k" * 32, b"v")
        for file in home.iterdir():
            assert file.stat().st_mode & 0o777 == mode, file
        for groups, permitted in (([], mode & 0o004), ([0], mode & 0o044)):
            for access in ("rw", "r"):
                answer = try_open([path], user=NOBODY, groups=groups, mode=access)
                if access == "r" and permitted:
                    assert answer == "read"
                else:
                    assert answer.startswith("VolumeAccessError"), answer


def test_a_reader_can_hold_up_an_open_and_that_is_said(volume_path: Path) -> None:
    """Read permission is enough to lock a byte: SECURITY.md says what follows."""
    path = volume_path
    assert try_open([path]) == "stored"
    # struct flock: type, whence, start, length, pid
    lock = struct.pack("hhqqi", fcntl.F_RDLCK, os.SEEK_SET, 1 << 62, 1, 0)
    with path.open("rb") as file:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, lock)
        answer = try_open([path], open_timeout=0.2)
        assert answer.startswith("OpenTimeoutError"), answer
        assert try_open([path], mode="r") == "read"
    assert try_open([path]) == "stored"
