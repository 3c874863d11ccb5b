# SPDX-License-Identifier: Apache-2.0
"""The SIGBUS handler: our pages become zeros, the rest goes where it went before.

Each case is a process of its own: it may end by the signal.
"""

from __future__ import annotations

import signal
import subprocess
import textwrap
from pathlib import Path

import core_child
import pytest

PRELUDE = """
import faulthandler, mmap, os, signal, sys, threading, time
PAGE = mmap.PAGESIZE
FOLDER = sys.argv[1]
notes_kept = []

def map_file(name, pages, protection=mmap.PROT_READ):
    fd = os.open(os.path.join(FOLDER, name), os.O_RDWR | os.O_CREAT, 0o600)
    os.truncate(fd, 0)
    os.write(fd, b"x" * (pages * PAGE))
    result = ffi.new("void **")
    assert lib.ckv_os.map(
        ffi.NULL, pages * PAGE, protection, mmap.MAP_SHARED, fd, 0, result) == 0
    return fd, ffi.cast("char *", result[0])

def guard(address, pages):
    note = ffi.new("uint64_t *")
    notes_kept.append(note)  # the handler writes to it for as long as it is registered
    assert lib.ckv_guard_add(address, pages * PAGE, note, ffi.NULL) == lib.CKV_OK
    return note

def load(address):
    return lib.ckv_crc32c(0, address, PAGE)  # without the GIL

ZEROS = lib.ckv_crc32c(0, bytes(PAGE), PAGE)
"""


def run(script: str, folder: Path) -> subprocess.CompletedProcess:
    return core_child.run(PRELUDE + textwrap.dedent(script), folder)


def passes(script: str, folder: Path) -> subprocess.CompletedProcess:
    done = run(script, folder)
    assert done.returncode == 0, done.stderr
    return done


def dies(script: str, folder: Path) -> subprocess.CompletedProcess:
    done = run(script, folder)
    assert done.returncode == -signal.SIGBUS, (done.returncode, done.stderr)
    return done


# ---- our pages ----------------------------------------------------------------------


def test_lost_pages_become_counted_zeros(volume_folder):
    passes(
        """
        fd, address = map_file("file", 4)
        note = guard(address, 4)
        os.truncate(fd, PAGE)
        before = load(address)
        assert load(address + 2 * PAGE) == ZEROS
        assert load(address + 2 * PAGE) == ZEROS
        assert note[0] == 1
        assert load(address + 3 * PAGE) == ZEROS
        assert note[0] == 2
        assert load(address) == before != ZEROS
        os.pwrite(fd, b"y" * 4 * PAGE, 0)
        assert load(address + 2 * PAGE) == ZEROS  # it stays as it was handed out
        """,
        volume_folder,
    )


def test_a_store_into_a_lost_page_stays_private(volume_folder):
    passes(
        """
        fd, address = map_file("file", 2, mmap.PROT_READ | mmap.PROT_WRITE)
        note = guard(address, 2)
        os.truncate(fd, PAGE)
        ffi.memmove(address + PAGE + 8, b"abc", 3)
        assert ffi.buffer(address + PAGE, 12)[:] == bytes(8) + b"abc" + bytes(1)
        assert note[0] == 1
        assert os.fstat(fd).st_size == PAGE
        """,
        volume_folder,
    )


def test_the_table_of_a_truncated_volume_reads_as_zeros(volume_folder):
    passes(
        """
        import test_file
        files = test_file.Files(core)
        file = files.create(os.path.join(FOLDER, "kv"))
        note = ffi.new("uint64_t *")
        file.window_note = note
        files.call(lib.ckv_file_map, file)
        data = lib.ckv_file_data(file, 0)
        os.truncate(file.data_fd, 0)
        assert file.table[0].seal == 0
        assert file.lost_pages == 1
        assert load(file.head) == ZEROS
        assert file.lost_pages == 2
        assert load(data) == ZEROS
        assert note[0] == 1
        files.end()
        fd, address = map_file("other", 1)
        """,
        volume_folder,
    )


def test_many_ranges_come_and_go(volume_folder):
    """Slots are used again, and only registered ranges are guarded."""
    passes(
        """
        fd, address = map_file("file", 64)
        notes = [guard(address + i * PAGE, 1) for i in range(64)]
        for i in range(0, 64, 2):
            lib.ckv_guard_remove(address + i * PAGE)
        notes[0::2] = [guard(address + i * PAGE, 1) for i in range(0, 64, 2)]
        lib.ckv_guard_remove(ffi.NULL)
        lib.ckv_guard_remove(address + 1)  # not registered: nothing happens
        os.truncate(fd, 0)
        for i in range(64):
            assert load(address + i * PAGE) == ZEROS
        assert [note[0] for note in notes] == [1] * 64
        """,
        volume_folder,
    )


def test_removal_while_others_fault(volume_folder):
    """Threads fault in their ranges while ranges beside them come and go."""
    passes(
        """
        stop = threading.Event()
        failures = []

        def fault(number):
            try:
                while not stop.is_set():
                    fd, address = map_file(f"fault-{number}", 2)
                    note = guard(address, 2)
                    os.truncate(fd, 0)
                    assert load(address + PAGE) == ZEROS and note[0] == 1
                    lib.ckv_guard_remove(address)
                    lib.ckv_os.unmap(address, 2 * PAGE)
                    os.close(fd)
            except BaseException as error:
                failures.append(error)

        def churn(number):
            fd, address = map_file(f"churn-{number}", 8)
            while not stop.is_set():
                for i in range(8):
                    guard(address + i * PAGE, 1)
                for i in range(8):
                    lib.ckv_guard_remove(address + i * PAGE)

        threads = [threading.Thread(target=fault, args=(i,)) for i in range(3)]
        threads += [threading.Thread(target=churn, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(2)
        stop.set()
        for thread in threads:
            thread.join()
        assert failures == []
        """,
        volume_folder,
    )


def test_a_forked_child_has_its_own_guard(volume_folder):
    passes(
        """
        fd, address = map_file("file", 2)
        note = guard(address, 2)
        os.truncate(fd, 0)
        child = os.fork()
        if child == 0:
            ok = load(address) == ZEROS and note[0] == 1
            fd, other = map_file("child", 1)
            guard(other, 1)
            lib.ckv_guard_remove(other)
            os._exit(0 if ok else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert note[0] == 0
        """,
        volume_folder,
    )


# ---- what is not ours ---------------------------------------------------------------

FOREIGN = """
fd, ours = map_file("ours", 1)
guard(ours, 1)
fd, foreign = map_file("foreign", 1)
os.truncate(fd, 0)
print("before", flush=True)
"""


def test_a_foreign_fault_still_kills(volume_folder):
    assert "before" in dies(FOREIGN + "load(foreign)", volume_folder).stdout


def test_a_range_that_was_removed_is_not_ours(volume_folder):
    script = "fd, a = map_file('f', 1)\nguard(a, 1)\nlib.ckv_guard_remove(a)\n"
    dies(script + "os.truncate(fd, 0)\nload(a)", volume_folder)


@pytest.mark.parametrize(
    "send",
    ["os.kill(os.getpid(), signal.SIGBUS)", "signal.raise_signal(signal.SIGBUS)"],
)
def test_a_sent_signal_still_kills(volume_folder, send):
    dies(FOREIGN + send, volume_folder)


def test_an_ignored_signal_stays_ignored_but_not_a_fault(volume_folder):
    script = "signal.signal(signal.SIGBUS, signal.SIG_IGN)\n" + FOREIGN
    passes(script + "os.kill(os.getpid(), signal.SIGBUS)", volume_folder)
    dies(script + "load(foreign)", volume_folder)


def test_a_python_handler_from_before_is_called(volume_folder):
    passes(
        "seen = []\nsignal.signal(signal.SIGBUS, lambda *args: seen.append(args))\n"
        + FOREIGN
        + "os.kill(os.getpid(), signal.SIGBUS)\ntime.sleep(0.01)\n"
        "assert len(seen) == 1\n"
        "os.truncate(fd, 0)\n"
        "fd, again = map_file('again', 1)\nnote = guard(again, 1)\nos.truncate(fd, 0)\n"
        "assert load(again) == ZEROS and note[0] == 1 and len(seen) == 1\n",
        volume_folder,
    )


PREDECESSOR = r"""
#define _GNU_SOURCE
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static int calls, code, blocked_usr1, blocked_usr2, blocked_bus;
static void *address;

static void
look(void)
{
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    blocked_usr1 = sigismember(&mask, SIGUSR1);
    blocked_usr2 = sigismember(&mask, SIGUSR2);
    blocked_bus = sigismember(&mask, SIGBUS);
    calls++;
}

static void
with_info(int number, siginfo_t *info, void *context)
{
    (void)number;
    (void)context;
    look();
    code = info->si_code;
    address = info->si_addr;
    if (code > 0) { /* repair it as a user of mappings would */
        const unsigned long size = (unsigned long)getpagesize();
        mmap((void *)((unsigned long)address & -size), size, PROT_READ,
            MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    }
}

static void
plain(int number)
{
    (void)number;
    look();
}

int
install(int info, int flags)
{
    struct sigaction action;
    memset(&action, 0, sizeof(action));
    if (info) {
        action.sa_sigaction = with_info;
        action.sa_flags = SA_SIGINFO | flags;
    } else {
        action.sa_handler = plain;
        action.sa_flags = flags;
    }
    sigaddset(&action.sa_mask, SIGUSR1);
    return sigaction(SIGBUS, &action, NULL);
}

int get(int what)
{
    const int values[] = {calls, code, blocked_usr1, blocked_usr2, blocked_bus};
    return values[what];
}
void *get_address(void) { return address; }
"""
SA_NODEFER, SA_RESETHAND = 0x40000000, -0x80000000


@pytest.fixture(scope="module")
def predecessor(tmp_path_factory) -> str:
    """Code that installs a handler of somebody else before ours."""
    folder = tmp_path_factory.mktemp("predecessor")
    (folder / "p.c").write_text(PREDECESSOR)
    library = folder / "p.so"
    command = ["cc", "-shared", "-fPIC", "-o", str(library), str(folder / "p.c")]
    subprocess.run(command, check=True)
    return (
        "import ctypes\n"
        f"other = ctypes.CDLL({str(library)!r})\n"
        "other.get_address.restype = ctypes.c_void_p\n"
    )


def test_a_handler_with_info_is_called_as_by_the_kernel(volume_folder, predecessor):
    passes(
        predecessor
        + "assert other.install(1, 0) == 0\n"
        + FOREIGN
        + "assert load(foreign) == ZEROS\n"
        "assert other.get(0) == 1 and other.get(1) > 0\n"
        "assert other.get_address() == int(ffi.cast('uintptr_t', foreign))\n"
        "assert (other.get(2), other.get(3), other.get(4)) == (1, 0, 1)\n"
        "assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()\n"
        "os.kill(os.getpid(), signal.SIGBUS)\n"
        "assert other.get(0) == 2 and other.get(1) == 0\n",
        volume_folder,
    )


def test_a_plain_handler_is_called_with_its_flags(volume_folder, predecessor):
    passes(
        predecessor
        + f"assert other.install(0, {SA_NODEFER}) == 0\n"
        + FOREIGN
        + "os.kill(os.getpid(), signal.SIGBUS)\n"
        "assert (other.get(0), other.get(2), other.get(4)) == (1, 1, 0)\n",
        volume_folder,
    )


def test_a_handler_for_one_time_is_called_one_time(volume_folder, predecessor):
    done = dies(
        predecessor
        + f"assert other.install(0, {SA_RESETHAND}) == 0\n"
        + FOREIGN
        + "os.kill(os.getpid(), signal.SIGBUS)\n"
        "print('calls', other.get(0), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGBUS)\n",
        volume_folder,
    )
    assert "calls 1" in done.stdout


# ---- copies -------------------------------------------------------------------------

COPY = """
import errno
fd, source = map_file("source", 4)
target = ffi.new("char[]", 4 * PAGE)

def copy(offset=0, length=4 * PAGE, into=None):
    return lib.ckv_guard_copy(
        target if into is None else into, source + offset, length)

guard(map_file("table", 1)[1], 1)  # as an open volume has
assert copy() == 0 and bytes(ffi.buffer(target, 4 * PAGE)) == b"x" * 4 * PAGE
os.truncate(fd, 2 * PAGE)
"""


def test_a_copy_of_a_lost_page_fails_and_replaces_nothing(volume_folder):
    passes(
        COPY
        + """
for _ in range(100):
    assert copy() == -errno.EFAULT
    assert copy(0, 2 * PAGE) == 0
    assert copy(2 * PAGE, 1) == -errno.EFAULT
assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
os.pwrite(fd, b"y" * 2 * PAGE, 2 * PAGE)
assert copy() == 0  # no zero page lies over it
assert bytes(ffi.buffer(target, 4 * PAGE)) == b"x" * 2 * PAGE + b"y" * 2 * PAGE
""",
        volume_folder,
    )


def test_a_copy_from_a_guarded_range_replaces_nothing(volume_folder):
    passes(
        COPY
        + """
note = guard(source, 4)
assert copy() == -errno.EFAULT and note[0] == 0
assert load(source + 2 * PAGE) == ZEROS and note[0] == 1
""",
        volume_folder,
    )


def test_copies_of_many_threads_fail_each_for_itself(volume_folder):
    passes(
        COPY
        + """
def work(number):
    own = ffi.new("char[]", 4 * PAGE)
    for i in range(2000):
        lost = (i + number) % 2
        wanted = -errno.EFAULT if lost else 0
        results.append(copy(0, (3 if lost else 2) * PAGE, own) == wanted)

results = []
threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(results) == 8000 and all(results)
""",
        volume_folder,
    )


def test_a_copy_to_a_lost_page_fails_and_replaces_nothing(volume_folder):
    passes(
        COPY
        + """
fd2, other = map_file("other", 2, mmap.PROT_READ | mmap.PROT_WRITE)
os.truncate(fd2, PAGE)
assert copy(0, 2 * PAGE, into=other) == -errno.EFAULT
assert copy(0, PAGE, into=other) == 0
os.truncate(fd2, 2 * PAGE)
assert copy(0, 2 * PAGE, into=other) == 0
assert os.pread(fd2, 2 * PAGE, 0) == b"x" * 2 * PAGE
""",
        volume_folder,
    )


def test_a_fault_beside_the_copied_ranges_is_not_ours(volume_folder):
    dies(COPY + "copy()\nload(source + 2 * PAGE)\n", volume_folder)


def test_whether_a_copy_may_be_made(volume_folder):
    passes(
        COPY
        + """
assert lib.ckv_guard_ready()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGBUS])
assert not lib.ckv_guard_ready()
thread = threading.Thread(target=signal.pthread_sigmask,
    args=(signal.SIG_UNBLOCK, [signal.SIGBUS]))
thread.start(); thread.join()
assert not lib.ckv_guard_ready()  # it counts for each thread
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGBUS])
assert lib.ckv_guard_ready()
faulthandler.enable()
assert not lib.ckv_guard_ready()
faulthandler.disable()
assert lib.ckv_guard_ready()
for other in (signal.SIG_DFL, signal.SIG_IGN, lambda *_: None):
    signal.signal(signal.SIGBUS, other)
    assert not lib.ckv_guard_ready()
""",
        volume_folder,
    )


def test_a_copy_under_faulthandler(volume_folder):
    passes("faulthandler.enable()\n" + COPY + "assert copy() == -14\n", volume_folder)
    passes(COPY + "faulthandler.enable()\nassert copy() == -14\n", volume_folder)


# ---- Python's faulthandler ----------------------------------------------------------


def test_faulthandler_before_us(volume_folder):
    script = "faulthandler.enable()\n" + FOREIGN
    ours = "fd, a = map_file('a', 1)\nnote = guard(a, 1)\nos.truncate(fd, 0)\n"
    done = passes(script + ours + "assert load(a) == ZEROS == load(a)", volume_folder)
    assert "Bus error" not in done.stderr
    done = dies(script + "load(foreign)", volume_folder)
    assert done.stderr.count("Fatal Python error: Bus error") == 1


@pytest.mark.parametrize("again", [False, True])
def test_faulthandler_after_us(volume_folder, again):
    """It reports, hands down to us by raising the signal, and the process goes on."""
    script = FOREIGN + "faulthandler.enable()\n"
    script += "guard(foreign, 1)\nlib.ckv_guard_remove(foreign)\n" if again else ""
    ours = f"note = guard(ours, 1) if {again} else None\n"
    ours += "os.truncate(os.path.join(FOLDER, 'ours'), 0)\nassert load(ours) == ZEROS\n"
    passes(script + ours, volume_folder)
    done = dies(script + "load(foreign)", volume_folder)
    assert done.stderr.count("Fatal Python error: Bus error") == 1


def test_faulthandler_after_us_in_another_thread(volume_folder):
    """A thread has no signal stack; what tells is that our handler was replaced."""
    passes(
        FOREIGN
        + "faulthandler.enable()\nfd, a = map_file('a', 1)\nnote = guard(a, 1)\n"
        "os.truncate(fd, 0)\n"
        "thread = threading.Thread(target=lambda: load(a))\n"
        "thread.start()\nthread.join()\nassert note[0] == 1\n",
        volume_folder,
    )


def test_faulthandler_that_takes_us_along(volume_folder):
    """Disabling it puts back what was before it; our next range installs us again."""
    script = "faulthandler.enable()\n" + FOREIGN + "faulthandler.disable()\n"
    script += "fd, a = map_file('a', 1)\nnote = guard(a, 1)\nos.truncate(fd, 0)\n"
    passes(script + "assert load(a) == ZEROS and note[0] == 1", volume_folder)
    dies(script + "load(foreign)", volume_folder)
