"""How the units of a bench file behave where nobody has them: emulated and simulated ones alike."""

from __future__ import annotations

import msgspec

from drivers.emulators import config
from harness.model.bench import Links, Switch


def behaviour_of(
    name: str,
    switch: Switch,
    links: Links,
    *,
    faces: tuple[config.Face, ...] = (),
    light: config.Light | None = None,
) -> config.EmulatedSwitch:
    """Return what a unit is told at its start; `faces`: where one can log in to it, if anywhere."""
    emulate = switch.emulate
    return config.EmulatedSwitch(
        name=name,
        ports=emulate.ports,
        model=f"N-VST-{emulate.ports}x{emulate.ports}-LU1-DMHNV",
        timing=config.Timing(
            switch_ms=emulate.switch_ms,
            switch_sd_ms=emulate.switch_sd_ms,
            distribution="normal" if emulate.switch_sd_ms else "fixed",
            answer_ms=emulate.answer_ms,
            boot_ms=emulate.reboot_ms,
        ),
        optics=config.Optics(
            insertion_loss_db=emulate.insertion_loss_db, averaging=switch.power_averaging
        ),
        faces=faces,
        light=msgspec.structs.replace(light or config.Light(), hold_ms=links.nic_hold_ms),
        faults=config.Faults(
            failed_ports=emulate.failed_ports,
            stuck_ports=emulate.stuck_ports,
            deny_ports=emulate.deny_ports,
            swapped=tuple((a, b) for a, b in emulate.swapped_ports),
            die_on_command=emulate.die_on_command,
            reboot_on_command=emulate.reboot_on_command,
            cut_reply=emulate.cut_reply,
            lose_reply=emulate.lose_reply,
        ),
    )
