"""The unit's TL1, as a dialogue: frames, ctags, port lists, denials, reports."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tl1_client import MIN, WALL, Client

from drivers.emulators.config import Faults
from drivers.emulators.faces.tl1 import Tl1Session
from drivers.emulators.settings import Account


def test_the_reply_frame_is_the_units():
    assert Client(circuits=((1, 5), (3, 8))).raw("RTRV-PATCH:::c7:;") == (
        '\r\n\n   agg0 26-01-02 03:04:05\r\nM  c7 COMPLD\r\n   "1,5"\r\n   "3,8"\r\n;\r\n>'
    )


def test_a_denial_is_a_code_line_and_a_text_line():
    assert Client().raw("ENT-PATCH::1,1000:9:;") == (
        "\r\n\n   agg0 26-01-02 03:04:05\r\n"
        "M  9 DENY\r\n"
        "   IDNV\r\n"
        "   /* Invalid OXC port: 1000 */\r\n"
        ";\r\n>"
    )


@pytest.mark.parametrize(
    ("sid", "shown"), [("", "( nil )"), ("node-1", "node-1"), ("my node", '"my node"')]
)
def test_the_header_shows_the_sid(sid, shown):
    assert Client(name=sid).raw("RTRV-HDR:::1:;").startswith(f"\r\n\n   {shown} 26-01-02")


def test_the_tid_must_be_ours_or_empty():
    unit = Client(name="my node")
    assert unit('RTRV-HDR:"my node"::1:;') == ("COMPLD", [])
    assert unit("RTRV-HDR:::1:;") == ("COMPLD", [])
    assert unit("RTRV-HDR:other::1:;") == ("DENY", ["IITA", "/* Mismatched TID */"])
    assert unit("SET-SID:::2::other;") == ("COMPLD", [])
    assert unit("RTRV-HDR:other::3:;") == ("COMPLD", [])


@pytest.mark.parametrize(
    ("aid", "circuits"),
    [
        ("1,5", [(1, 5)]),
        ("1&2&4,5&8&6", [(1, 5), (2, 8), (4, 6)]),
        ("1&&3,6&&8", [(1, 6), (2, 7), (3, 8)]),
        ("1&&2&4,5&7&&8", [(1, 5), (2, 7), (4, 8)]),
    ],
)
def test_ports_are_single_listed_or_ranges(aid, circuits):
    unit = Client()
    assert unit(f"ENT-PATCH::{aid}:1:;") == ("COMPLD", [])
    assert unit.model.circuits() == circuits


def test_disconnect_and_query_by_list_all_or_nothing_named():
    unit = Client(circuits=((1, 5), (2, 6), (3, 7), (4, 8)))
    assert unit("RTRV-PATCH::2&&3:1:;")[1] == ["2,6", "3,7"]
    assert unit("RTRV-PATCH::8&1:1:;")[1] == ["1,5", "4,8"]
    assert unit("DLT-PATCH::1&2:1:;") == ("COMPLD", [])
    assert unit("RTRV-PATCH::ALL:1:;")[1] == ["3,7", "4,8"]
    unit("DLT-PATCH::3:1:;")
    unit("DLT-PATCH::ALL:1:;")
    assert unit("RTRV-PATCH:::1:;") == ("COMPLD", [])


def test_a_busy_port_is_moved():
    unit = Client(circuits=((1, 5), (2, 6)))
    assert unit("ENT-PATCH::1,6:1:;") == ("COMPLD", [])
    assert unit("RTRV-PATCH:::1:;")[1] == ["1,6"]


@pytest.mark.parametrize(
    ("command", "code", "text"),
    [
        ("ENT-PATCH::1,9:1:;", "IDNV", "Invalid OXC port: 9"),
        ("ENT-PATCH::5,1:1:;", "IDNV", "Invalid OXC port: 5"),
        ("ENT-PATCH::x,5:1:;", "IDNV", "Invalid OXC port: x"),
        ("ENT-PATCH::-1,5:1:;", "IDNV", "Invalid OXC port: -1"),
        ("DLT-PATCH::5:1:;", "IDNV", "Invalid OXC port: 5"),
        ("RTRV-PORT-POWER::1&&9:1:;", "IDNV", "Invalid OXC port: 9"),
        ("ENT-PATCH:::1:;", "IIAC", "Empty parameters"),
        ("ENT-PATCH::1:1:;", "IIAC", "Bad AID"),
        ("ENT-PATCH::1&2,5:1:;", "IIAC", "2 ingress, 1 egress"),
        ("ENT-PATCH::1&1,5&6:1:;", "IIAC", "Port repeated"),
        ("ENT-PATCH::3&&1,5&&7:1:;", "IIAC", "Bad port range"),
        ("ENT-PATCH::1&,5&6:1:;", "IIAC", "Bad port list"),
        ("ENT-PATCH::1&&&3,5&&7:1:;", "IIAC", "Bad port list"),
        ("ENT-PATCH::1,5;", "IICT", "Parse error at offset 14 in command"),
        ("ENT-PATCH::1,5:;", "IICT", "Parse error at offset 15 in command"),
        ("RTRV-HDR:::1:::::;", "IICT", "Parse error at offset 15 in command"),
        ("RTRV-HDR:::1:x;", "IICT", "Parse error at offset 13 in command"),
        ("MAKE-COFFEE:::1:;", "IICT", "Parse error at offset 0 in command"),
        ("RTRV-EQPT::SYSTEM:1:::COLOUR=RED;", "IPNV", "Unexpected parameter COLOUR in block 2"),
        ("RTRV-EQPT::SYSTEM:1:::PARAMETER=MASS;", "IPNV", "Parameter not valid"),
        ("RTRV-EQPT::SHELF:1:::PARAMETER=SIZE;", "IIAC", "Bad AID"),
        ("RTRV-HDR:::1::extra;", "IPNV", "Unexpected parameter extra in block 1"),
        ("SET-SID:::1:;", "IPMS", "Too few parameters (0/1) in block 1"),
        ("ED-EQPT::TIMEOUT:1:::ADMIN=61;", "SSTP", "out of range"),
        ("ED-EQPT::TIMEOUT:1:::USER=-2;", "IPNV", "Parameter not valid: -2"),
        ("ED-EQPT::BOOT:1:::MODE=LIGHT;", "IDNV", "Invalid value LIGHT"),
        ("INIT-SYS::SYSTEM:1::2;", "IDNV", "Invalid value 2"),
        ("ED-PORT-LABEL::1&2:1:::LABEL=a;", "IPNV", "1 labels, 2 ports"),
    ],
)
def test_denials(command, code, text):
    unit = Client(circuits=((1, 5),))
    completion, body = unit(command)
    assert (completion, body[0]) == ("DENY", code)
    assert text in body[1]
    assert unit.model.circuits() == [(1, 5)]


def test_a_denial_carries_the_ctag_that_could_be_read():
    assert "\r\nM  42 DENY" in Client().raw("NO-SUCH:::42:;")
    assert "\r\nM  0 DENY" in Client().raw("NO-SUCH;")


def test_denied_pairs_leave_the_others_made_and_say_prtl():
    unit = Client(faults=Faults(deny_ports=(6,)))
    completion, body = unit("ENT-PATCH::1&2,5&6:1:;")
    assert (completion, body) == ("PRTL", ["SROF", "/* Cannot connect 2,6 */"])
    assert unit("RTRV-PATCH:::1:;")[1] == ["1,5"]
    assert unit("ENT-PATCH::2,6:1:;")[0] == "DENY"


def test_tells_who_it_is():
    unit = Client()
    model = "N-VST-4x4-LU1-DMHNV"
    assert unit("RTRV-NETYPE:::1:;")[1] == [f"Polatis,{model},OCS,6.7.3.9"]
    assert "SN=000001" in unit("RTRV-INV::OCS:1:;")[1][0]
    assert unit("RTRV-EQPT::SYSTEM:1:::PARAMETER=SIZE;")[1] == ["SYSTEM:SIZE=4x4"]
    assert unit("RTRV-EQPT::PMON:1:::PARAMETER=CONFIG;")[1][4] == "PMON::PORT=5,MODE=OUTPUT"
    assert unit("RTRV-TOD:::1:;")[1] == ["26-01-02,03-04-05"]


def test_boot_mode_and_restart():
    unit = Client(circuits=((1, 5),))
    assert unit("RTRV-EQPT::BOOT:1:::PARAMETER=MODE;")[1] == ["BOOT:MODE=RESTORE"]
    unit("ED-EQPT::BOOT:1:::MODE=DARK;")
    unit("OPR-PORT-SHUTTER::2:1:;")
    assert unit("INIT-SYS::SYSTEM:1::0;")[0] == "COMPLD"
    assert unit("RTRV-PATCH:::1:;")[1] == ["1,5"]
    assert unit("RTRV-PORT-SHUTTER::2:1:;")[1] == ["2:CLOSED"]
    assert unit("INIT-SYS::SYSTEM:1::1;")[0] == "COMPLD"
    assert unit("RTRV-PATCH:::1:;")[1] == []
    assert unit("RTRV-PORT-SHUTTER::2:1:;")[1] == ["2:OPEN"]
    unit("ED-EQPT::BOOT:1:::MODE=RESTORE;")
    unit("ENT-PATCH::1,6:1:;")
    assert unit("INIT-SYS::SYSTEM:1::10;")[0] == "COMPLD"
    assert unit("RTRV-PATCH:::1:;")[1] == ["1,6"]


def test_shutters_open_and_close():
    unit = Client()
    unit("OPR-PORT-SHUTTER::1&&3:1:;")
    unit("RLS-PORT-SHUTTER::2:1:;")
    assert unit("RTRV-PORT-SHUTTER::1&&4:1:;")[1] == ["1:CLOSED", "2:OPEN", "3:CLOSED", "4:OPEN"]


def test_labels_stay_until_deleted():
    unit = Client()
    unit('ED-PORT-LABEL::1&2:1:::LABEL="rack 3&left";')
    assert unit("RTRV-PORT-LABEL:::1:;")[1] == ["1:rack 3", "2:left"]
    unit("DLT-PORT-LABEL::1:1:;")
    assert unit("RTRV-PORT-LABEL::ALL:1:;")[1] == ["2:left"]


def test_power_and_monitors():
    unit = Client(circuits=((1, 5),))
    lit, dark = unit("RTRV-PORT-POWER::5&6:1:;", now_ns=10**9)[1]
    assert dark == "6:-60.00"
    assert re.fullmatch(r"5:-[012]\.\d\d", lit)
    assert unit("RTRV-PORT-PMON::5:1:;")[1] == ["5:1550.0,0.00,1"]
    assert Client(model="I-OST-4x4-L")("RTRV-PORT-POWER::5:1:;")[0] == "DENY"


def test_alarms_name_failed_ports():
    unit = Client(faults=Faults(failed_ports=(6,)))
    assert unit("RTRV-ALM-ALL:::1:;")[1] == ["6,EQPT:MJ,PORTFAIL,SA"]
    assert unit("RTRV-ALM-EQPT::ALL:1::cr,,sa;") == ("COMPLD", [])
    assert unit("RTRV-ALM-EQPT::ALL:1::mj,,sa;")[1] == ["6,EQPT:MJ,PORTFAIL,SA"]
    assert unit("RTRV-ALM-EQPT::1&&5:1:;") == ("COMPLD", [])
    assert unit("INIT-SYS::ALARM:1::1;") == ("COMPLD", [])
    assert unit("RTRV-ALM-EQPT::6:1:;")[1] == ["6,EQPT:MJ,PORTFAIL,SA"]  # it stands
    assert unit("RTRV-ALM-ENV:::1:;") == ("COMPLD", [])


def test_changes_are_reported_to_other_sessions_unless_inhibited():
    unit = Client(circuits=((1, 5),))
    watcher = Tl1Session(unit.model)
    (line,) = unit.session.lines(b"ENT-PATCH::1,6:1:;")
    (change,) = unit.session.answer(line, 0, WALL).changes
    assert watcher.report(change, WALL).decode() == (
        "\r\n\n   agg0 26-01-02 03:04:05\r\n"
        "A  1 REPT EVT PATCH\r\n"
        '   "1,5:DISCONNECTED"\r\n'
        '   "1,6:CONNECTED"\r\n'
        ";\r\n>"
    )
    assert b"A  2 REPT" in watcher.report(change, WALL)
    unit("OPR-ARC-EQPT::REPMGR:1::IND;")
    assert unit("RTRV-ARC-EQPT::REPMGR:1:;")[1] == ["REPMGR:IND,,"]
    assert watcher.report(change, WALL) == b""
    unit("RLS-ARC-EQPT::REPMGR:1:;")
    assert watcher.report(change, WALL) != b""


ADMIN = Account("admin", "secret")


def test_nothing_is_obeyed_before_login():
    unit = Client(ADMIN)
    assert unit("RTRV-PATCH:::1:;") == ("DENY", ["PLNA", "/* Not logged in */"])
    assert unit("ACT-USER::admin:1::wrong;")[1][0] == "PICC"
    assert unit("ACT-USER::root:1::secret;")[1][0] == "PICC"
    assert unit("ACT-USER::admin:1:;")[1][0] == "IPMS"
    assert unit("ACT-USER::admin:1::secret;") == ("COMPLD", [])
    assert unit("RTRV-PATCH:::1:;") == ("COMPLD", [])
    assert unit("CANC-USER::admin:1:;") == ("COMPLD", [])
    assert unit("RTRV-PATCH:::1:;")[0] == "DENY"


def test_a_login_over_ssh_is_already_done():
    unit = Client(ADMIN, logged_in=True)
    assert unit("ACT-USER::admin:1::secret;")[1][1] == "/* Already logged in */"
    assert unit("RTRV-PATCH:::1:;")[0] == "COMPLD"


def test_without_an_account_any_login_is_welcome():
    assert Client()("ACT-USER::anybody:1::anything;") == ("COMPLD", [])


def test_an_idle_session_is_logged_out_and_a_busy_one_is_not():
    unit = Client(ADMIN, logged_in=True)
    unit("ED-EQPT::TIMEOUT:1:::ADMIN=5;", now_ns=0)
    assert unit("RTRV-EQPT::TIMEOUT:1:::PARAMETER=ADMIN;", 4 * MIN)[1] == ["TIMEOUT:ADMIN=5"]
    assert unit("RTRV-HDR:::1:;", 8 * MIN)[0] == "COMPLD"
    assert unit("RTRV-HDR:::1:;", 14 * MIN)[1][1] == "/* Not logged in */"
    assert unit("ACT-USER::admin:1::secret;", 15 * MIN)[0] == "COMPLD"


def test_commands_may_arrive_in_any_pieces_with_line_ends_between():
    session = Client().session
    arrived = [session.lines(bytes([byte])) for byte in b"\r\nRTRV-HDR:::1:;\r\nRTRV-HDR:::2:;"]
    assert [x.strip() for lines in arrived for x in lines] == [b"RTRV-HDR:::1:", b"RTRV-HDR:::2:"]


def test_noise_on_the_line_is_a_parse_error():
    session = Client().session
    (line,) = session.lines(b"\x85\xf5ENT-PATCH::1,5:7:;")
    assert b"IICT" in session.answer(line, 0, WALL).reply


AID = st.lists(st.integers(-1, 9), max_size=4).map(lambda p: "&".join(map(str, p)))
COMMANDS = st.one_of(
    st.builds("ENT-PATCH::{},{}:1:;".format, AID, AID),
    st.builds("{}::{}:1:;".format, st.sampled_from(["DLT-PATCH", "OPR-PORT-SHUTTER"]), AID),
    st.text(st.characters(max_codepoint=255, exclude_characters=";"), max_size=12).map(
        lambda text: text + ";"
    ),
)


@given(st.lists(COMMANDS, max_size=12))
def test_whatever_is_typed_there_is_one_framed_reply_and_the_map_is_one_to_one(commands):
    unit = Client(circuits=((1, 5), (2, 6)))
    for command in commands:
        assert unit(command)[0] in {"COMPLD", "DENY"}
    rows = [row.split(",") for row in unit("RTRV-PATCH:::1:;")[1]]
    assert len({a for a, _ in rows}) == len({b for _, b in rows}) == len(rows)
    for a, b in rows:
        assert unit(f"RTRV-PATCH::{b}:1:;")[1] == [f"{a},{b}"]
