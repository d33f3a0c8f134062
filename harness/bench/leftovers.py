"""What a bench made on this machine, on record before it was made, so that anyone can clean it up.

One JSON file per emulated bench, in ``/run/orchestrl-harness`` (for an ordinary user, in a folder
of their own under the temporary folder). Tearing down works by recorded names and processes, from
any process, any number of times. `sweep` cleans what dead owners left, and leaves alone what a
living owner holds and what a run still needs to be recovered.

Raises `InfrastructureError` where something refuses to go.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from drivers.netlink import delete_namespace, namespace_path, namespaces, run_in
from drivers.userns import outer_uid
from harness import memory
from harness.errors import InfrastructureError
from harness.processes import GRACE_NS, Process, end

NO_NETWORK = -1


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What one bench holds. `network` is its control network's number."""

    prefix: str
    boot: str
    owner: Process
    network: int
    namespaces: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    """Links in the starting namespace."""
    processes: tuple[Process, ...] = ()
    keep_for: str | None = None
    """Run folder whose switches still wait to be restored; swept only on demand."""

    def is_of_this_boot(self) -> bool:
        """Whether anything recorded here can still exist."""
        return self.boot == boot_id()

    def has_owner(self) -> bool:
        """Whether the process that made the bench still runs."""
        return self.is_of_this_boot() and self.owner.is_alive()

    def is_waiting(self) -> bool:
        """Whether a run folder that is still there wants this bench for its recovery."""
        return self.keep_for is not None and Path(self.keep_for).is_dir()


def boot_id() -> str:
    """Return what tells this boot of the machine from every other."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def record_folder() -> Path:
    """Return (and make) the folder of records: only this user may write there."""
    uid = outer_uid()
    if uid == 0:
        folder = Path("/run/orchestrl-harness")
    else:  # not under /run: a user namespace has a /run of its own, which ends with it
        folder = Path(tempfile.gettempdir()) / f"orchestrl-harness-{uid}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        raise InfrastructureError(f"{folder} belongs to somebody else: remove it")
    return folder


def reserve(folder: Path | None = None) -> Path:
    """Put a bench without a network on record, for the processes that it will start."""
    folder = folder or record_folder()
    prefix = f"h{secrets.token_hex(3)}"
    path = folder / f"{prefix}.json"
    owner = Process.of(os.getpid(), "owner")
    with locked(folder):
        write_record(path, Record(prefix=prefix, boot=boot_id(), owner=owner, network=NO_NETWORK))
    return path


def read_record(path: Path) -> Record:
    """Read one record; raise `InfrastructureError` naming the file where it is not one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except (OSError, msgspec.MsgspecError) as error:
        raise InfrastructureError(f"{path}: not a record of an emulated bench: {error}") from error


def _read_if_there(path: Path) -> Record | None:
    """Read a record that another process may be tearing down at this moment."""
    try:
        return read_record(path)
    except InfrastructureError:
        if path.exists():
            raise
        return None


def write_record(path: Path, record: Record) -> None:
    """Replace the record; readers see the old or the new one, never half."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
    fresh.replace(path)


def add_process(path: Path, pid: int, name: str) -> Process:
    """Put a process on record as ours to end; it is asked before namespaces go."""
    process = Process.of(pid, name)
    with locked(path.parent):
        record = read_record(path)
        write_record(path, msgspec.structs.replace(record, processes=(*record.processes, process)))
    return process


def keep_for(path: Path, run_folder: Path | None) -> None:
    """Keep the bench after its owner's death until `run_folder` is recovered; None: no longer."""
    with locked(path.parent):
        record = read_record(path)
        wanted = None if run_folder is None else str(run_folder.resolve())
        write_record(path, msgspec.structs.replace(record, keep_for=wanted))


def private_folder(path: Path) -> Path:
    """Return (and make) the folder of a bench's keys and passwords; it goes with the record."""
    folder = path.with_suffix("")
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def kept_for(run_folder: Path) -> dict[Path, Record]:
    """Return the benches that still stand for `run_folder`."""
    wanted = str(run_folder.resolve())
    return {
        path: record
        for path, record in records(record_folder()).items()
        if record.is_of_this_boot() and record.keep_for == wanted
    }


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock: one writer at a time, across processes. Held for milliseconds."""
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def records(folder: Path) -> dict[Path, Record]:
    """Read all records; one that is torn down meanwhile is left out."""
    found = {path: _read_if_there(path) for path in sorted(folder.glob("*.json"))}
    return {path: record for path, record in found.items() if record is not None}


def tear_down(path: Path, *, grace_ns: int = GRACE_NS) -> None:
    """Undo all that the record at `path` names, then remove it; nothing there is no error.

    Processes get `grace_ns` to end by themselves. Raises `InfrastructureError` naming the processes
    that would not die; the record then stays for another attempt.
    """
    record = _read_if_there(path)
    if record is None:
        return
    if record.is_of_this_boot():
        if standing := end(record.processes, grace_ns=grace_ns):
            names = ", ".join(
                f"{process.name or 'process'} ({process.pid})" for process in standing
            )
            raise InfrastructureError(f"bench {record.prefix}: {names} survived SIGKILL")
        memory.sweep()  # what agents that were killed held of weights
        _remove_links(record.links)
        for name in record.namespaces:
            delete_namespace(name)
    shutil.rmtree(path.with_suffix(""), ignore_errors=True)
    path.unlink(missing_ok=True)


def sweep(folder: Path | None = None, *, include_unrecovered: bool = False) -> tuple[str, ...]:
    """Tear down what dead owners left; return the prefixes of the benches that were removed."""
    swept = []
    for path, record in records(folder or record_folder()).items():
        if record.has_owner() or (record.is_waiting() and not include_unrecovered):
            continue
        tear_down(path)
        swept.append(record.prefix)
    return tuple(swept)


def inhabitants(record: Record) -> dict[int, str]:
    """Return the processes that live in the bench's namespaces: pid -> namespace."""
    name_of = {
        os.stat(namespace_path(name)).st_ino: name for name in set(record.namespaces) & namespaces()
    }
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            inode = os.stat(entry / "ns" / "net").st_ino
        except OSError:  # it has just ended, or is not ours to look at
            continue
        if inode in name_of:
            found[int(entry.name)] = name_of[inode]
    return found


def _remove_links(names: tuple[str, ...]) -> None:
    # Imported late: pyroute2 takes a tenth of a second, and with nothing to sweep none is needed.
    from drivers.interfaces import Interfaces  # noqa: PLC0415

    def remove() -> None:
        with Interfaces() as interfaces:
            for name in names:
                interfaces.delete(name)

    if names:
        run_in("", remove)
