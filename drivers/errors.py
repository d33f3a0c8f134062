"""Everything a driver can raise, in two families: yours and the device's.

`Misuse` means the caller asked for what cannot be; nothing was sent. `DeviceFault` means the line
or the device misbehaved. Only `Indeterminate` leaves the map unknown: read it back before trusting
anything. Foreign exceptions (paramiko's, pyserial's, the socket's) are translated once, in the
transports, and kept as the cause.
"""


class DriverError(Exception):
    """Root of both families; never raised itself."""


class Misuse(DriverError):
    """The caller's mistake: nothing was sent to the device."""


class BadAddress(Misuse):
    """A device URL that names no transport, or lacks what its transport needs."""


class BadMatching(Misuse):
    """A map that is not one-to-one, leaves the unit's ports, or touches ports that are not ours."""


class DeviceFault(DriverError):
    """The device's or the line's mistake."""


class Unreachable(DeviceFault):
    """The line could not be opened: no such host or tty, refused, or held by another process."""


class Untrusted(DeviceFault):
    """The SSH host key is unknown or has changed. Never accepted silently."""


class AccessDenied(DeviceFault):
    """The device refused the credentials."""


class LinkLost(DeviceFault):
    """The line closed under an open session."""


class DeadlineExpired(DeviceFault):
    """No complete answer within the exchange's own deadline."""


class Garbled(DeviceFault):
    """Bytes that are not the protocol: wrong baud rate, wrong dialect, or a broken line."""


class Refused(DeviceFault):
    """The device understood and said no.

    `code` is the device's own (TL1 `IDNV`, SCPI `-222`), `text` its own words.
    """

    def __init__(self, code: str, text: str, command: str = "") -> None:
        self.code, self.text, self.command = code, text, command
        what = f" {command!r}" if command else ""
        super().__init__(f"device refused{what}: {code} {text}".rstrip())


class Indeterminate(DeviceFault):
    """A change was sent and its outcome is not known. The map is unknown until read back."""


class Mismatch(DeviceFault):
    """The map read back is not the map asked for; `missing` and `unexpected` are circuits."""

    def __init__(
        self,
        missing: frozenset[tuple[int, int]],
        unexpected: frozenset[tuple[int, int]],
        reason: str = "",
    ) -> None:
        self.missing, self.unexpected = missing, unexpected
        parts = [f"{a}->{b} missing" for a, b in sorted(missing)]
        parts += [f"{a}->{b} unexpected" for a, b in sorted(unexpected)]
        super().__init__("; ".join(parts) + (f" ({reason})" if reason else ""))


class NoLight(DeviceFault):
    """Circuits are made but no light passes; `ports` maps each dark egress port to its dBm."""

    def __init__(self, ports: dict[int, float]) -> None:
        self.ports = ports
        listed = ", ".join(f"{port} ({dbm:.1f} dBm)" for port, dbm in sorted(ports.items()))
        super().__init__(f"no light on egress ports {listed}")
