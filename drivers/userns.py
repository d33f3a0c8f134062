"""Rights over a network of one's own, for an ordinary user: a user, mount and net namespace.

``python -m drivers.userns COMMAND...`` moves itself there and becomes COMMAND; with ``--join PID``
it moves to where that process already is. A process must have one thread to move, hence the fresh
interpreter. COMMAND finds the environment variable `REASON`: empty, or why the kernel refused, and
then it runs where it was. ``--try`` only tries: exit 0, or 1 with the reason.
"""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path

from drivers.netlink import (
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWUSER,
    Request,
    Requests,
    join,
    mount_fresh_netns_folder,
    unshare,
)

REASON = "ORCHESTRL_NO_USER_NAMESPACE"
_SPACES = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET
_RTM_NEWLINK, _IFF_UP, _LOOPBACK = 16, 1, 1


def enter() -> None:
    """Move this single-threaded process into fresh namespaces, as their root; loopback is up.

    Raises `OSError` where the kernel or the system's policy refuses.
    """
    uid, gid = os.geteuid(), os.getegid()
    unshare(_SPACES)
    # The order is the kernel's: without `deny` an ordinary user may not map a group.
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"0 {uid} 1"),
        ("gid_map", f"0 {gid} 1"),
    ):
        Path("/proc/self", name).write_text(text)
    mount_fresh_netns_folder()
    requests = Requests("")
    try:
        up = struct.pack("=BxHiII", 0, 0, _LOOPBACK, _IFF_UP, _IFF_UP)
        requests.send([Request(_RTM_NEWLINK, 0, up)])
    finally:
        requests.close()


def outer_uid() -> int:
    """Return our user as the machine knows it, also from inside a user namespace."""
    uid = os.geteuid()
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        inside, outside, count = (int(field) for field in line.split())
        if inside <= uid < inside + count:
            return outside + uid - inside
    return uid


def again(member: int | None = None) -> str:
    """Start this very command over in a user namespace: of its own, or that of process `member`.

    Returns only where that has been tried before or cannot be: the reason.
    """
    if REASON in os.environ:
        return os.environ[REASON] or "a user namespace gives no further rights here"
    how = [] if member is None else ["--join", str(member)]
    command = [sys.executable, *sys.orig_argv[1:]]
    try:
        # Our own command line, no shell.
        os.execv(sys.executable, [sys.executable, "-m", __name__, *how, *command])  # noqa: S606
    except OSError as error:
        return f"{sys.executable}: {error.strerror}"


def main(arguments: list[str]) -> int:
    """Move, then become the command; see the module docstring."""
    try:
        if arguments[0] == "--join":
            pid, *arguments = arguments[1:]
            join(int(pid), _SPACES)
        else:
            enter()
    except OSError as error:
        reason = f"no user namespace: {error.strerror or error}"
        if arguments == ["--try"]:
            sys.stderr.write(reason)
            return 1
        os.environ[REASON] = reason
    os.environ.setdefault(REASON, "")
    if arguments != ["--try"]:
        os.execv(arguments[0], arguments)  # noqa: S606  # the caller's own command line, no shell
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
