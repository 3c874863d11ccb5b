# SPDX-License-Identifier: Apache-2.0
"""Commands to create, look at, check and clear volumes.

Exit codes: 0 fine, 1 ``verify`` found damage, 2 the command could not be carried out.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

from cyclone_kv import _core, results
from cyclone_kv.cache import Cache
from cyclone_kv.config import CacheConfig
from cyclone_kv.errors import ConfigError, CycloneError

__all__ = ["cli"]

_Command = TypeVar("_Command", bound=Callable[..., Any])
_Mode = Literal["rw", "r"]

_EXIT_DAMAGED = 1
_EXIT_FAILED = 2


class _Failure(click.ClickException):
    exit_code = _EXIT_FAILED


def _reports_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Turn errors of the package into one line and exit code 2."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (CycloneError, TypeError) as error:
            raise _Failure(str(error)) from error

    return wrapper


def _volume_options(command: _Command) -> _Command:
    """Add what every command needs to open a volume."""
    decorators = [
        click.argument("paths", nargs=-1, required=True, metavar="PATH..."),
        click.option(
            "--shm-dir", metavar="DIR", help="Directory of the shared region."
        ),
        click.option(
            "--degraded", is_flag=True, help="Open although paths are missing."
        ),
        click.option(
            "--allow-shared-directory",
            is_flag=True,
            help="Accept a directory that others can write to.",
        ),
        click.option(
            "--allow-network-fs", is_flag=True, help="Accept NFS, FUSE and the like."
        ),
    ]
    for decorate in reversed(decorators):
        command = decorate(command)
    return command


_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_namespace_option = click.option(
    "--namespace", default="", help="Namespace; the default one if not given."
)


def _open(
    paths: tuple[str, ...],
    mode: _Mode,
    *,
    namespace: str = "",
    create: bool = False,
    **options: Any,
) -> Cache:
    config = CacheConfig.from_dict(options)
    return Cache.open(
        list(paths), config, mode=mode, namespace=namespace, create=create
    )


def _print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2, default=_to_json))


def _to_json(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    return str(value)


def _console() -> Console:
    # Into a file or a pipe, lines are as long as they need to be.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 400)


def human_bytes(value: int) -> str:
    """Return a size for people: ``1.5 GiB``.

    >>> human_bytes(1536)
    '1.5 KiB'
    """
    size = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{value} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


@click.group()
@click.version_option(package_name="cyclone-kv")
def cli() -> None:
    """Create, look at, check and clear cyclone_kv volumes."""


@cli.command()
@_volume_options
@click.option(
    "--capacity",
    required=True,
    metavar="SIZE",
    help="Room for payloads of all paths together, such as 64GiB.",
)
@click.option("--expected-object-size", default="0", metavar="SIZE")
@click.option("--stripes", default=0, metavar="N", help="Per path; 0 chooses.")
@click.option("--file-mode", default="600", metavar="OCTAL", help="Of the files.")
@click.option("--allow-sparse", is_flag=True, help="Accept that space is not reserved.")
@_json_option
@_reports_errors
def create(
    paths: tuple[str, ...], file_mode: str, *, as_json: bool, **options: Any
) -> None:
    """Create a volume in PATH..., one file per device."""
    for path in paths:
        if os.path.lexists(os.path.expanduser(path)):
            raise ConfigError(f"{path} exists; create makes new volumes only")
    try:
        mode_bits = int(file_mode, 8)
    except ValueError:
        raise ConfigError(f"--file-mode is {file_mode!r}; give octal digits") from None
    with _open(paths, "rw", create=True, file_mode=mode_bits, **options) as cache:
        _show_info(cache.info(), as_json=as_json)


@cli.command()
@_volume_options
@_json_option
@_reports_errors
def info(paths: tuple[str, ...], *, as_json: bool, **options: Any) -> None:
    """Show what a volume is like."""
    with _open(paths, "r", **options) as cache:
        _show_info(cache.info(), as_json=as_json)


def _show_info(volume: results.Info, *, as_json: bool) -> None:
    if as_json:
        _print_json(dataclasses.asdict(volume))
        return
    table = Table(show_header=False, box=None)
    table.add_row("set of paths", volume.set_id.hex())
    table.add_row("format version", str(volume.format_version))
    table.add_row("largest block", human_bytes(volume.payload_max_bytes))
    table.add_row("overhead", human_bytes(volume.overhead_bytes))
    where = volume.shm_path or "memory, since no process has the volume open"
    table.add_row("shared region", f"{human_bytes(volume.shm_bytes)} in {where}")
    table.add_row("checksum", volume.crc32c_kernel)
    _console().print(table)
    files = Table("path", "file system", "data", "free there", "stripes", "state")
    for path in volume.paths:
        states = [
            name
            for name, value in (
                ("missing", not path.present),
                ("failed", path.failed),
                ("detached", path.detached),
            )
            if value
        ]
        files.add_row(
            path.path,
            path.file_system,
            human_bytes(path.data_bytes),
            human_bytes(path.free_bytes),
            str(path.stripes),
            ", ".join(states) or "good",
        )
    _console().print(files)


@cli.command()
@_volume_options
@click.option("--watch", type=float, metavar="SECONDS", help="Repeat until stopped.")
@_json_option
@_reports_errors
def stats(
    paths: tuple[str, ...], watch: float | None, *, as_json: bool, **options: Any
) -> None:
    """Show the statistics of a volume, of all processes."""
    if watch is not None and watch <= 0:
        raise ConfigError(f"--watch is {watch}; give seconds above 0")
    with _open(paths, "r", **options) as cache:
        while True:
            _show_stats(cache.stats(), as_json=as_json)
            if watch is None:
                return
            sys.stdout.flush()
            time.sleep(watch)


def _show_stats(statistics: results.Stats, *, as_json: bool) -> None:
    volume = statistics.volume
    if as_json:
        click.echo(json.dumps(dict(volume)))
        return
    table = Table("name", "value", "unit", "meaning")
    table.columns[1].justify = "right"
    for _, name, unit, sentence in _core.STATISTICS:
        value = volume[name]
        text = human_bytes(value) if unit == "bytes" else f"{value:,}"
        table.add_row(name, text, unit, sentence)
    _console().print(table)
    looked_up = volume.hits + volume.misses
    if looked_up:
        click.echo(f"hit ratio {volume.hits / looked_up:.4f}")


@cli.command()
@_volume_options
@click.option("--repair", is_flag=True, help="Remove what is damaged.")
@_json_option
@_reports_errors
def verify(
    paths: tuple[str, ...], *, repair: bool, as_json: bool, **options: Any
) -> None:
    """Read every block and check it.  Exit code 1 when something is damaged."""
    with _open(paths, "rw", **options) as cache:
        if as_json:
            report = cache.verify(repair=repair)
            _print_json(dataclasses.asdict(report) | {"ok": report.ok})
        else:
            report = _verify_with_bar(cache, repair=repair)
            _show_report(report)
    if not report.ok:
        sys.exit(_EXIT_DAMAGED)


def _verify_with_bar(cache: Cache, *, repair: bool) -> results.VerifyReport:
    columns = (TextColumn("verify"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("verify", total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        return cache.verify(progress=advance, repair=repair)


def _show_report(report: results.VerifyReport) -> None:
    click.echo(
        f"{report.entries_checked:,} blocks checked, "
        f"{human_bytes(report.bytes_checked)}"
    )
    if report.ok:
        click.echo("no damage")
        return
    click.echo(
        f"damaged payloads {report.damaged_payloads}, unreadable {report.unreadable}, "
        f"structure faults {report.structure_faults}, repaired {report.repaired}"
    )
    click.echo(f"first: {report.first_fault}")


@cli.command()
@_volume_options
@click.option("--limit", type=int, default=None, help="Stop after so many blocks.")
@_json_option
@_reports_errors
def ls(
    paths: tuple[str, ...], limit: int | None, *, as_json: bool, **options: Any
) -> None:
    """List the stored blocks of all namespaces, one a line."""
    with _open(paths, "r", **options) as cache:
        for count, entry in enumerate(cache.ls()):
            if limit is not None and count >= limit:
                return
            if as_json:
                click.echo(json.dumps(entry._asdict(), default=_to_json))
                continue
            tag = entry.namespace_tag.hex() if any(entry.namespace_tag) else "-"
            click.echo(
                f"{entry.key.hex()}{' digested' if entry.digested else ''} "
                f"namespace={tag} nbytes={entry.nbytes} header={entry.header_nbytes} "
                f"path={entry.path_index} offset={entry.offset} heat={entry.heat}"
            )


@cli.command()
@_volume_options
@_namespace_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@_json_option
@_reports_errors
def clear(
    paths: tuple[str, ...],
    namespace: str,
    *,
    yes: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Remove every block of one namespace."""
    with _open(paths, "rw", namespace=namespace, **options) as cache:
        if not yes:
            where = f"namespace {namespace!r}" if namespace else "the default namespace"
            click.confirm(f"Remove {len(cache):,} blocks of {where}?", abort=True)
        removed = cache.clear()
    if as_json:
        _print_json({"removed": removed})
    else:
        click.echo(f"{removed:,} blocks removed")


@cli.command()
@_volume_options
@click.option("--port", type=int, help="Serve on this port until stopped.")
@click.option("--address", default="127.0.0.1", help="To serve on.", show_default=True)
@click.option("--textfile", metavar="FILE", help="Write once, for the node exporter.")
@_reports_errors
def prometheus(
    paths: tuple[str, ...],
    port: int | None,
    address: str,
    textfile: str | None,
    **options: Any,
) -> None:
    """Give the statistics to Prometheus; print them when no target is given."""
    try:
        import prometheus_client
    except ModuleNotFoundError as error:
        raise _Failure(
            "this command needs 'prometheus_client'; install it with: "
            "pip install 'cyclone-kv[prometheus]'"
        ) from error
    from cyclone_kv import metrics

    if port is not None and textfile is not None:
        raise ConfigError("give --port or --textfile, not both")
    with _open(paths, "r", **options) as cache:
        if port is not None:
            registry = prometheus_client.CollectorRegistry()
            metrics.register(cache, registry=registry)
            server, thread = prometheus_client.start_http_server(
                port, addr=address, registry=registry
            )
            click.echo(f"serving on http://{address}:{server.server_port}/metrics")
            sys.stdout.flush()
            try:
                thread.join()
            finally:
                server.shutdown()
        elif textfile is not None:
            registry = prometheus_client.CollectorRegistry()
            metrics.register(cache, registry=registry)
            prometheus_client.write_to_textfile(textfile, registry)
        else:
            click.echo(metrics.exposition(cache), nl=False)
