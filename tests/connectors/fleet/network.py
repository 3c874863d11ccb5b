# SPDX-License-Identifier: Apache-2.0
"""Two hosts on one machine: network namespaces, each behind a cable of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Host:
    """Where a node runs: how to start a command there, and how its sockets are named.

    `bind` are the endpoints that the node opens, `connect` the same seen from here.
    """

    command: tuple[str, ...]
    bind: tuple[str, str]
    connect: tuple[str, str]


@contextlib.contextmanager
def hosts(count: int, folder: Path) -> Iterator[list[Host]]:
    """Give `count` hosts; without the right to make namespaces, sockets in `folder`."""
    with contextlib.ExitStack() as undo:
        try:
            yield [_namespace(index, undo) for index in range(count)]
            return
        except _NotAllowed as error:
            print(f"no network namespaces ({error}): sockets in {folder}")
        yield [
            Host((), endpoints, endpoints)
            for endpoints in (
                (f"ipc://{folder}/events{index}", f"ipc://{folder}/replay{index}")
                for index in range(count)
            )
        ]


class _NotAllowed(Exception):
    pass


def _namespace(index: int, undo: contextlib.ExitStack) -> Host:
    ip = shutil.which("ip") or "/sbin/ip"
    name, cable = f"ckv-{os.getpid()}-{index}", f"ckv{os.getpid()}v{index}"
    # 198.18.0.0/15 is set aside for tests of networks.
    net = f"198.18.{os.getpid() % 250}"
    here, there = f"{net}.{4 * index + 1}", f"{net}.{4 * index + 2}"

    def run(*arguments: str) -> None:
        try:
            subprocess.run([ip, *arguments], check=True, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise _NotAllowed("no command ip") from error
        except subprocess.CalledProcessError as error:
            raise _NotAllowed(error.stderr.strip()) from error

    run("netns", "add", name)
    undo.callback(run, "netns", "delete", name)  # and with it the cable
    run("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
    run("address", "add", f"{here}/30", "dev", cable)
    run("link", "set", cable, "up")
    run("-n", name, "address", "add", f"{there}/30", "dev", "eth0")
    run("-n", name, "link", "set", "eth0", "up")
    run("-n", name, "link", "set", "lo", "up")
    return Host(
        command=(ip, "netns", "exec", name),
        bind=("tcp://*:5557", "tcp://*:5558"),
        connect=(f"tcp://{there}:5557", f"tcp://{there}:5558"),
    )
