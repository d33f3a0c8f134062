"""What an operator sets on the unit over TL1: meters, attenuators, pulses, clock, accounts."""

import pytest
from tl1_client import MIN, WALL, Client

from drivers.emulators.config import Optics, Timing
from drivers.emulators.faces.tl1 import Tl1Session
from drivers.emulators.settings import Account

MS = 10**6
LOSS_DB = 1.2
EXACT = Optics(loss_sd_db=0.0)


def lit(**config: object) -> Client:
    """A unit with 1 -> 5 and 2 -> 6 lit for long."""
    return Client(circuits=((1, 5), (2, 6)), optics=EXACT, **config)


def power(unit: Client, port: int, now_ns: int = MIN) -> float:
    _, (row,) = unit(f"RTRV-PORT-POWER::{port}:1:;", now_ns)
    assert row.startswith(f"{port}:")
    return float(row.partition(":")[2])


# -- meters ----------------------------------------------------------------------------------------


def test_an_offset_is_added_to_what_a_meter_shows_and_to_nothing_else():
    unit = lit()
    assert unit("SET-PORT-PMON::5&7:1:::OFFSET=-2.5;") == ("COMPLD", [])
    assert unit("RTRV-PORT-PMON::5&6:1:;")[1] == ["5:1550.0,-2.50,1", "6:1550.0,0.00,1"]
    assert power(unit, 5) == pytest.approx(-LOSS_DB - 2.5)
    assert power(unit, 6) == pytest.approx(-LOSS_DB)
    assert power(unit, 7) == pytest.approx(-62.5)


def test_a_meter_calibrated_for_another_wavelength_is_off_by_the_ratio():
    unit = lit()
    unit("set-port-pmon::1&&8:1:::wave=1310;")
    assert power(unit, 5) == pytest.approx(-LOSS_DB + 0.73, abs=0.006)
    assert power(unit, 7) == -60
    assert unit("RTRV-PORT-PMON::8:1:;")[1] == ["8:1310.0,0.00,1"]


def test_averaging_is_a_ports_own_and_can_be_changed_while_light_is_on():
    unit = lit(timing=Timing(switch_ms=0))
    unit("SET-PORT-PMON::5:1:::AVERAGE=8;")
    unit("DLT-PATCH::1&2:1:;", MIN)
    assert power(unit, 6, MIN + 640 * MS) == -60
    assert power(unit, 5, MIN + 640 * MS) == pytest.approx(-LOSS_DB - 3.01, abs=0.01)
    unit("SET-PORT-PMON::5:1:::AVERAGE=1;")
    assert power(unit, 5, MIN + 640 * MS) == -60


# -- attenuators -----------------------------------------------------------------------------------


def test_an_absolute_level_caps_the_output_and_none_frees_it():
    unit = lit()
    assert unit("SET-PORT-ATTEN::5:1:::MODE=ABSOLUTE,LEVEL=-10.0;", MIN) == ("COMPLD", [])
    assert power(unit, 5, 2 * MIN) == -10
    assert power(unit, 6, 2 * MIN) == pytest.approx(-LOSS_DB)
    assert unit("RTRV-PORT-ATTEN::5&6:1:;")[1] == ["5:ABSOLUTE,-10.0,", "6:NONE,,"]
    unit("SET-PORT-ATTEN::5:1:::MODE=ABSOLUTE,LEVEL=3;", 2 * MIN)  # an attenuator does not amplify
    assert power(unit, 5, 3 * MIN) == pytest.approx(-LOSS_DB)
    unit("SET-PORT-ATTEN::5:1:::MODE=ABSOLUTE,LEVEL=-20;", 3 * MIN)
    unit("SET-PORT-ATTEN::5:1:::MODE=NONE;", 4 * MIN)
    assert power(unit, 5, 5 * MIN) == pytest.approx(-LOSS_DB)


def test_a_relative_level_is_measured_from_the_reference_input():
    unit = lit()
    unit("SET-PORT-ATTEN::5&6:1:::MODE=RELATIVE,LEVEL=(-7.5),REFS=2&3;", MIN)
    assert power(unit, 5, 2 * MIN) == -7.5
    assert unit("RTRV-PORT-ATTEN::5&&7:1:;")[1] == [
        "5:RELATIVE,-7.5,2",
        "6:RELATIVE,-7.5,3",
        "7:NONE,,",
    ]
    unit("SET-PORT-ATTEN::5:1:::MODE=RELATIVE,LEVEL=-7;", 2 * MIN)
    assert unit("RTRV-PORT-ATTEN::5:1:;")[1] == ["5:RELATIVE,-7.0,1"]  # its own input


def test_a_converged_attenuation_stays_when_the_input_changes_and_an_absolute_one_follows():
    unit = Client(circuits=((1, 5), (2, 6)), optics=Optics(loss_sd_db=0.5))
    held, followed = power(unit, 5), power(unit, 6)
    unit("SET-PORT-ATTEN::5:1:::MODE=CONVERGED,LEVEL=-8;", MIN)
    unit("SET-PORT-ATTEN::6:1:::MODE=ABSOLUTE,LEVEL=-8;", MIN)
    assert power(unit, 5, 2 * MIN) == power(unit, 6, 2 * MIN) == -8
    unit("ENT-PATCH::3&4,5&6:1:;", 2 * MIN)
    assert power(unit, 6, 3 * MIN) == -8 != followed
    moved = power(unit, 5, 3 * MIN)
    unit("SET-PORT-ATTEN::5:1:::MODE=NONE;", 3 * MIN)
    assert power(unit, 5, 4 * MIN) - moved == pytest.approx(held + 8, abs=0.011)
    assert moved != -8


def test_attenuation_is_there_when_the_light_comes():
    unit = Client(optics=EXACT)
    unit("SET-PORT-ATTEN::5:1:::MODE=ABSOLUTE,LEVEL=-10;", 0)
    unit("ENT-PATCH::1,5:1:;", MS)
    unit("SET-PORT-ATTEN::5:1:::MODE=ABSOLUTE,LEVEL=-12;", 2 * MS)
    assert power(unit, 5, 20 * MS) == -60
    assert power(unit, 5, MIN) == -12


# -- pulses ----------------------------------------------------------------------------------------


def test_a_pulse_closes_and_opens_a_port_as_often_as_told():
    unit = lit()
    assert unit("RTRV-PORT-FLAP::1&2:1:;")[1] == ["1:10,500,1", "2:10,500,1"]
    assert unit("ENT-PORT-FLAP::1:1::300,200,2;") == ("COMPLD", [])
    assert unit("RTRV-PORT-FLAP::1&2:1:;")[1] == ["1:300,200,2", "2:10,500,1"]
    assert unit.model.due_ns is None
    assert unit("OPR-PORT-FLAP::1:1:;", MIN) == ("COMPLD", [])
    seen = []
    while (due_ns := unit.model.due_ns) is not None:
        change = unit.model.advance(due_ns)
        seen.append(((due_ns - MIN) // MS, change.dark, tuple(x.egress for x in change.light)))
    assert seen == [(300, (), (5,)), (500, (1,), ()), (800, (), (5,))]
    assert power(unit, 5, MIN + 290 * MS) == power(unit, 5, MIN + 700 * MS) == -60
    assert power(unit, 5, MIN + 400 * MS) == pytest.approx(-LOSS_DB)
    assert power(unit, 6, MIN + 290 * MS) == pytest.approx(-LOSS_DB)
    assert unit("RTRV-PATCH:::1:;")[1] == ["1,5", "2,6"]
    assert unit("RTRV-PORT-SHUTTER::1:1:;")[1] == ["1:OPEN"]


def test_a_released_pulse_leaves_the_port_open_and_a_closed_shutter_closed():
    unit = lit()
    unit("ENT-PORT-FLAP::1&2:1::300,200,50;")
    unit("OPR-PORT-SHUTTER::2:1:;", MIN)
    unit("OPR-PORT-FLAP::1&2:1:;", MIN)
    assert unit("RLS-PORT-FLAP::1&2:1:;", MIN + 100 * MS) == ("COMPLD", [])
    assert unit.model.due_ns is None
    assert power(unit, 5, 2 * MIN) == pytest.approx(-LOSS_DB)
    assert power(unit, 6, 2 * MIN) == -60


def test_a_pulse_late_by_several_edges_ends_where_it_should():
    unit = lit()
    unit("ENT-PORT-FLAP::5:1::10,10,3;")
    unit("OPR-PORT-FLAP::5:1:;", MIN)
    late = unit.model.advance(MIN + 45 * MS)
    assert (late.dark, late.light) == ((1,), ())
    end = unit.model.advance(MIN + 500 * MS)
    assert (end.dark, [x.ingress for x in end.light]) == ((), [1])


def test_a_pulse_opens_no_mirror_that_still_moves():
    unit = lit(timing=Timing(switch_ms=25))
    unit("ENT-PORT-FLAP::1:1::5,500,1;")
    unit("ENT-PATCH::1,7:1:;", MIN)
    unit("OPR-PORT-FLAP::1:1:;", MIN + MS)
    (back,) = unit.model.advance(MIN + 6 * MS).light
    assert (back.at_ns, back.egress) == (MIN + 25 * MS, 7)


def test_a_restart_ends_pulses():
    unit = lit()
    unit("ENT-PORT-FLAP::1:1::100,100,9;")
    unit("OPR-PORT-FLAP::1:1:;", MIN)
    unit("INIT-SYS::SYSTEM:1::10;", MIN + 10 * MS)
    assert unit.model.due_ns is None
    assert power(unit, 5, 2 * MIN) == pytest.approx(-LOSS_DB)


# -- clock -----------------------------------------------------------------------------------------


def test_the_clock_can_be_set_and_goes_on():
    unit = Client()
    assert unit("ED-DAT:::1::30-12-31,23-59-58;") == ("COMPLD", [])
    assert unit("RTRV-TOD:::1:;")[1] == ["30-12-31,23-59-58"]
    assert unit.raw("RTRV-HDR:::1:;").startswith("\r\n\n   agg0 30-12-31 23:59:58\r\n")
    watcher = Tl1Session(unit.model)
    assert b"30-12-31" in watcher.report(unit.model.connect([(1, 5)], 0), WALL)
    unit("ED-DAT:::1::27-01-02;")
    assert unit("RTRV-TOD:::1:;")[1] == ["27-01-02,23-59-58"]


@pytest.mark.parametrize(
    ("command", "code", "text"),
    [
        ("SET-PORT-PMON::5:1:::WAVE=850;", "SSTP", "out of range"),
        ("SET-PORT-PMON::5:1:::WAVE=green;", "IPNV", "Parameter not valid: green"),
        ("SET-PORT-PMON::5:1:::AVERAGE=9;", "SSTP", "out of range"),
        ("SET-PORT-PMON::5:1:;", "IPMS", "Too few parameters"),
        ("SET-PORT-ATTEN::5:1:;", "IPMS", "Too few parameters"),
        ("SET-PORT-ATTEN::1:1:::MODE=NONE;", "IDNV", "Invalid OXC port: 1"),
        ("SET-PORT-ATTEN::5:1:::MODE=SOFT;", "IDNV", "Invalid value SOFT"),
        ("SET-PORT-ATTEN::5:1:::MODE=ABSOLUTE;", "IPMS", "Too few parameters (1/2) in block 2"),
        ("SET-PORT-ATTEN::5:1:::MODE=ABSOLUTE,LEVEL=nan;", "SSTP", "out of range"),
        ("SET-PORT-ATTEN::5:1:::MODE=NONE,LEVEL=1;", "IPNV", "Unexpected parameter LEVEL"),
        ("SET-PORT-ATTEN::5:1:::MODE=ABSOLUTE,LEVEL=1,REFS=1;", "IPNV", "parameter REFS"),
        ("SET-PORT-ATTEN::5:1:::MODE=RELATIVE,LEVEL=1,REFS=1&2;", "IPNV", "2 refs, 1 ports"),
        ("ENT-PORT-FLAP::1:1::10,500;", "IPMS", "Too few parameters (2/3) in block 1"),
        ("ENT-PORT-FLAP::1:1::0,500,1;", "SSTP", "out of range"),
        ("ENT-PORT-FLAP::1:1::10,5e2,1;", "IPNV", "Parameter not valid: 5e2"),
        ("ENT-PORT-FLAP::9:1::10,500,1;", "IDNV", "Invalid OXC port: 9"),
        ("ED-DAT:::1::2038-08-16;", "SSTP", "out of range"),
        ("ED-DAT:::1::16-13-16;", "IDNV", "Bad parameter value"),
        ("ED-DAT:::1::16-08-16,25-00-00;", "IDNV", "Bad parameter value"),
        ("ED-DAT:::1::tomorrow;", "IPNV", "Parameter not valid"),
        ("ED-DAT::1::31-2016-12;", "IICT", "Parse error at offset 10"),
    ],
)
def test_what_cannot_be_set_is_denied_and_changes_nothing(command, code, text):
    unit = lit()
    completion, body = unit(command, MIN)
    assert (completion, body[0]) == ("DENY", code)
    assert text in body[1]
    assert power(unit, 5, 2 * MIN) == pytest.approx(-LOSS_DB)


def test_a_unit_without_meters_has_none_to_set_up():
    unit = Client(model="I-OST-4x4-L")
    for command in ("SET-PORT-PMON::5:1:::WAVE=1310;", "SET-PORT-ATTEN::5:1:::MODE=NONE;"):
        assert unit(command) == ("DENY", ["IIAC", "/* No power monitors */"])


# -- accounts --------------------------------------------------------------------------------------

ADMIN = Account("admin", "secret")
NOT_ADMIN = "/* User not in the admin group */"
PERMISSION = ("DENY", ["PICC", "/* Permission denied */"])


def office(role: str) -> Client:
    """A unit on which the user `bob` of this role is logged in."""
    unit = Client(ADMIN, logged_in=True, circuits=((1, 5),))
    assert unit(f"ENT-USER-SECU::bob:1::word,,{role};") == ("COMPLD", [])
    assert unit("CANC-USER::admin:1:;") == ("COMPLD", [])
    assert unit("ACT-USER::bob:1::word;") == ("COMPLD", [])
    return unit


def test_an_administrator_makes_reads_changes_and_deletes_users():
    unit = Client(ADMIN, logged_in=True)
    unit("ENT-USER-SECU::bob:1::word,,view;")
    unit("ENT-USER-SECU::eve:1::word,,;")
    assert unit("RTRV-USER-SECU:::1:;")[1] == ["admin,,ADMIN", "bob,,VIEW", "eve,,USER"]
    assert unit("ED-USER-SECU::bob:1::rob,other,,admin;") == ("COMPLD", [])
    assert unit("RTRV-USER-SECU::rob:1:;")[1] == ["rob,,ADMIN"]
    assert unit("DLT-USER-SECU::eve:1:;") == ("COMPLD", [])
    unit("CANC-USER::admin:1:;")
    assert unit("ACT-USER::bob:1::word;")[1][0] == "PICC"
    assert unit("ACT-USER::eve:1::word;")[1][0] == "PICC"
    assert unit("ACT-USER::rob:1::other;") == ("COMPLD", [])


def test_a_password_left_out_is_an_empty_one():
    unit = Client(ADMIN, logged_in=True)
    unit("ENT-USER-SECU::bob:1::word,,user;")
    unit("ED-USER-SECU::bob:1::,,,admin;")
    unit("CANC-USER::admin:1:;")
    assert unit("ACT-USER::bob:1:;") == ("COMPLD", [])
    assert unit("RTRV-USER-SECU:::1:;")[0] == "COMPLD"


def test_a_viewer_may_look_and_nothing_else():
    unit = office("view")
    assert unit("RTRV-PATCH:::1:;") == ("COMPLD", ["1,5"])
    for command in ("DLT-PATCH::ALL:1:;", "ENT-PATCH::2,6:1:;", "OPR-PORT-SHUTTER::1:1:;"):
        assert unit(command) == PERMISSION
    assert unit("DLT-USER-SECU::admin:1:;") == ("DENY", ["PICC", NOT_ADMIN])
    assert unit("RTRV-PATCH:::1:;") == ("COMPLD", ["1,5"])


def test_a_user_may_switch_light_and_not_run_the_unit():
    unit = office("user")
    assert unit("ENT-PATCH::2,6:1:;") == ("COMPLD", [])
    for command in (
        "ENT-USER-SECU::eve:1::word,,admin;",
        "ED-USER-SECU::bob:1::,,,admin;",
        "INIT-SYS::SYSTEM:1::10;",
        "SET-SID:::1::mine;",
        "ED-EQPT::BOOT:1:::MODE=DARK;",
        "ED-DAT:::1::30-01-01;",
        "CANC-USER::admin:1:;",
    ):
        assert unit(command) == PERMISSION
    assert unit("DLT-USER-SECU::admin:1:;") == ("DENY", ["PICC", NOT_ADMIN])
    assert unit("RTRV-USER-SECU::admin:1:;") == ("DENY", ["SRCN", NOT_ADMIN])
    assert unit("RTRV-USER-SECU:::1:;") == ("DENY", ["SRCN", NOT_ADMIN])
    assert unit("RTRV-USER-SECU::bob:1:;") == ("COMPLD", ["bob,,USER"])
    assert unit("RTRV-PATCH:::1:;")[1] == ["1,5", "2,6"]


@pytest.mark.parametrize(
    ("command", "code", "text"),
    [
        ("ENT-USER-SECU::admin:1::word,,user;", "IDNV", "User exists"),
        ("ENT-USER-SECU::bob:1::word,,king;", "IPNV", "Invalid user access privilege"),
        ("ENT-USER-SECU::b@b:1::word,,user;", "PICC", "Permission denied"),
        ("ENT-USER-SECU::bob:1::@$,,user;", "PICC", "Permission denied"),
        ("ENT-USER-SECU:::1::word,,user;", "IIAC", "Empty parameters"),
        ("DLT-USER-SECU::5147:1:;", "IDNV", "User does not exist"),
        ("RTRV-USER-SECU::abcd:1:;", "IDNV", "User does not exist"),
        ("ED-USER-SECU::abcd:1::,word,,;", "IDNV", "User does not exist"),
        ("ED-USER-SECU::admin:1::,,,abcd;", "IPNV", "Invalid user access privilege"),
        ("ED-USER-SECU::admin:1::@rob,,,admin;", "PICC", "Permission denied"),
    ],
)
def test_what_is_wrong_with_a_user_is_told(command, code, text):
    unit = Client(ADMIN, logged_in=True)
    assert unit(command) == ("DENY", [code, f"/* {text} */"])
    assert unit("RTRV-USER-SECU:::1:;")[1] == ["admin,,ADMIN"]


def test_a_deleted_user_is_logged_out():
    unit = office("user")
    unit.model.settings.accounts.pop("bob")
    assert unit("RTRV-PATCH:::1:;")[1] == ["PLNA", "/* Not logged in */"]


def test_idle_logout_goes_by_role():
    unit = office("view")
    unit.model.settings.timeout_min.update(ADMIN=1, USER=10)
    assert unit("RTRV-HDR:::1:;", 5 * MIN)[0] == "COMPLD"
    assert unit("RTRV-HDR:::1:;", 16 * MIN)[1][0] == "PLNA"


def test_a_full_restart_ends_every_session_and_a_reset_of_the_switching_does_not():
    unit = Client(ADMIN, logged_in=True)
    assert unit("INIT-SYS::SYSTEM:1::1;")[0] == "COMPLD"
    assert unit("INIT-SYS::SYSTEM:1::10;")[0] == "COMPLD"
    assert unit("RTRV-HDR:::1:;")[1] == ["PLNA", "/* Not logged in */"]
    assert unit("ACT-USER::admin:1::secret;") == ("COMPLD", [])
