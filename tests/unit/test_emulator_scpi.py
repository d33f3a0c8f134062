"""The unit's SCPI, as a dialogue: what a client types and what it reads."""

from datetime import UTC, datetime
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivers.emulators.config import EmulatedSwitch, Faults
from drivers.emulators.faces.scpi import ScpiSession
from drivers.emulators.model import SwitchModel

WALL = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


class Client:
    """Types lines at a unit and reads what comes back."""

    def __init__(self, **config: object) -> None:
        settings = {"name": "agg0", "ports": 4, "faces": (), **config}
        self.model = SwitchModel(EmulatedSwitch(**settings), Random(0))
        self.model.boot(0)
        self.session = ScpiSession(self.model)

    def __call__(self, text: str, now_ns: int = 0) -> str:
        lines = self.session.lines(text.encode() + b"\n")
        return b"".join(self.session.answer(x, now_ns, WALL).reply for x in lines).decode()


def test_tells_who_it_is():
    unit = Client()
    assert unit("*IDN?") == "Polatis,N-VST-4x4-LU1-DMHNV,000001,6.7.3.9\r\n"
    assert unit(":OXC:SWITch:SIZE?") == "4,4\r\n"


@pytest.mark.parametrize(
    "spelling",
    [
        ":OXC:SWITch:CONNect:ADD (@1,2),(@7,5)",
        "oxc:swit:conn:add (@1,2),(@7,5)",
        ":OXC:SWIT:CONNECT:ADD (@1, 2) , (@7,5)\r",
        "\tOxc:Switch:Conn:Add\t(@1:2),(@7,5)",
    ],
)
def test_sets_are_silent_whichever_way_they_are_spelt(spelling):
    unit = Client()
    assert unit(spelling) == ""
    assert unit(":OXC:SWIT:CONN:STAT?") == "(@1,2),(@7,5)\r\n"
    assert unit("SYST:ERR?") == '0,"No error"\r\n'


def test_a_keyword_is_long_or_short_and_nothing_between():
    unit = Client()
    unit(":OXC:SWITC:CONN:ADD (@1),(@5)")
    assert unit("SYST:ERR?").startswith("-113,")
    assert unit(":OXC:SWIT:CONN:STAT?") == "(@),(@)\r\n"


def test_compound_messages_continue_the_path_and_join_the_answers():
    unit = Client()
    assert unit(":OXC:SWIT:CONN:ONLY (@1,2),(@5,6); STAT?") == "(@1,2),(@5,6)\r\n"
    assert unit("*CLS;:OXC:SWIT:CONN:PORT? 2;*OPC?;PORT? 6;:SYST:ERR?") == (
        '"6";1;"2";0,"No error"\r\n'
    )


def test_peers_are_quoted_and_empty_when_free():
    unit = Client(circuits=((2, 8),))
    assert unit("OXC:SWIT:CONN:PORT? 2") == '"8"\r\n'
    assert unit("OXC:SWIT:CONN:PORT? 1") == '""\r\n'


def test_remove_by_pair_by_one_side_and_all():
    unit = Client(circuits=((1, 5), (2, 6), (3, 7), (4, 8)))
    unit("OXC:SWIT:CONN:SUB (@1),(@5)")
    assert unit("OXC:SWIT:CONN:STAT?") == "(@2,3,4),(@6,7,8)\r\n"
    unit("OXC:SWIT:CONN:SUB (@2),(@8)")
    assert unit("OXC:SWIT:CONN:STAT?") == "(@2,3,4),(@6,7,8)\r\n"
    unit("OXC:SWIT:CONN:SUB (@2),(@)")
    unit("OXC:SWIT:CONN:SUB (@),(@7)")
    assert unit("OXC:SWIT:CONN:STAT?") == "(@4),(@8)\r\n"
    unit("OXC:SWIT:DISC:ALL")
    assert unit("OXC:SWIT:CONN:STAT?") == "(@),(@)\r\n"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("OXC:SWIT:CONN:ADD (@1,9),(@5,6)", -222),
        ("OXC:SWIT:CONN:ADD (@5),(@1)", -222),
        ("OXC:SWIT:CONN:ADD (@1,2),(@5)", -224),
        ("OXC:SWIT:CONN:ADD (@1,1),(@5,6)", -224),
        ("OXC:SWIT:CONN:ADD (@1,x),(@5,6)", -102),
        ("OXC:SWIT:CONN:ADD 1,5", -102),
        ("OXC:SWIT:CONN:ADD (@1)", -109),
        ("OXC:SWIT:CONN:ADD", -109),
        ("OXC:SWIT:CONN:ADD (@1),(@5),(@6)", -108),
        ("OXC:SWIT:CONN:PORT? x", -104),
        ("OXC:SWIT:CONN:PORT? 0", -222),
        ("OXC:SWIT:CONN:NONSENSE", -113),
        ("OXC:SWIT:CONN:ADD?", -113),
        ("*IDN? 3", -108),
        ("\x85\xf5\xfe", -101),
    ],
)
def test_what_it_cannot_obey_is_silent_changes_nothing_and_is_queued(line, code):
    unit = Client(circuits=((3, 7),))
    lines = unit.session.lines(line.encode("latin-1") + b"\n")
    assert [unit.session.answer(x, 0, WALL).reply for x in lines] == [b""]
    assert unit("OXC:SWIT:CONN:STAT?") == "(@3),(@7)\r\n"
    assert unit("*STB?") == "4\r\n"
    assert unit("SYST:ERR?").startswith(f"{code},")
    assert unit("*STB?") == "0\r\n"


def test_the_rest_of_a_message_is_obeyed_after_an_error():
    unit = Client()
    assert unit(":NO:SUCH 1;*OPC?;:SYST:ERR?") == '1;-113,"Undefined header;NO:SUCH"\r\n'


def test_errors_come_oldest_first_all_at_once_or_not_at_all():
    unit = Client()
    unit(":A;:B;:C")
    assert unit("SYST:ERR?") == '-113,"Undefined header;A"\r\n'
    assert unit("SYST:ERR:ALL?") == '-113,"Undefined header;B",-113,"Undefined header;C"\r\n'
    assert unit("SYST:ERR:ALL?") == '0,"No error"\r\n'
    unit(":A;:B")
    unit("*CLS")
    assert unit("SYST:ERR?") == '0,"No error"\r\n'


def test_a_full_queue_says_so_in_its_last_entry():
    unit = Client()
    unit(";".join([":BAD"] * 40))
    errors = unit("SYST:ERR:ALL?")
    assert errors.count("-113") == 31
    assert errors.endswith('-350,"Queue overflow"\r\n')


def test_shutters_and_port_states():
    unit = Client(faults=Faults(failed_ports=(6,)))
    unit("OXC:SWIT:PORT:DIS (@2,5)")
    assert unit("OXC:SWIT:PORT:STAT? (@1,2,6)") == "(E,D,F)\r\n"
    unit("OXC:SWIT:PORT:ENABle (@2)")
    assert unit("OXC:SWIT:PORT:STAT?") == "(E,E,E,E,D,F,E,E)\r\n"


def test_power_is_dbm_with_two_decimals_and_floor_where_dark():
    unit = Client(circuits=((1, 5),))
    lit, dark = unit("PMON:POW? (@5,6)", now_ns=10**9).strip("()\r\n").split(",")
    assert dark == "-60.00"
    assert -3 < float(lit) < 0
    assert len(lit.partition(".")[2]) == 2


def test_power_takes_256_ports_at_most():
    unit = Client(ports=200)
    assert unit("PMON:POW? (@1:256)").count(",") == 255
    assert unit("PMON:POW? (@1:257)") == ""
    assert unit("SYST:ERR?").startswith("-223,")


def test_a_unit_without_meters_says_hardware_missing():
    unit = Client(model="I-OST-4x4-LU1-DMHNS")
    assert unit("PMON:POW? (@5)") == ""
    assert unit("SYST:ERR?").startswith("-241,")


def test_a_denied_pair_is_queued_and_the_others_are_made():
    unit = Client(faults=Faults(deny_ports=(6,)))
    unit("OXC:SWIT:CONN:ADD (@1,2,3),(@5,6,7)")
    assert unit("SYST:ERR?") == '-200,"Execution error;cannot connect 2,6"\r\n'
    assert unit("OXC:SWIT:CONN:STAT?") == "(@1,3),(@5,7)\r\n"


def test_reset_drops_circuits_and_opens_shutters():
    unit = Client(circuits=((1, 5),))
    unit("OXC:SWIT:PORT:DIS (@1)")
    unit("*RST")
    assert unit("OXC:SWIT:CONN:STAT?;:OXC:SWIT:PORT:STAT? (@1)") == "(@),(@);(E)\r\n"


def test_tells_its_network_address():
    assert unit_address() == unit_address("NETW2")
    assert unit_address().startswith('IP="')


def unit_address(interface: str = "NETW") -> str:
    return Client()(f":SYST:COMM:{interface}:ADDR?")


def test_commands_may_arrive_in_any_pieces():
    session = Client().session
    arrived = [session.lines(bytes([byte])) for byte in b"*IDN?\r\n*OPC?\n"]
    assert [x for lines in arrived for x in lines] == [b"*IDN?\r", b"*OPC?"]


def test_an_endless_line_is_thrown_away_with_an_error():
    unit = Client()
    for _ in range(3):
        assert unit.session.lines(b"x" * 40_000) == []
    unit("")
    assert unit("SYST:ERR?").startswith("-223,")


PORTS = st.lists(st.integers(-1, 9), max_size=4).map(lambda p: "(@" + ",".join(map(str, p)) + ")")
COMMANDS = st.one_of(
    st.builds(
        "OXC:SWIT:CONN:{} {},{}".format, st.sampled_from(["ADD", "ONLY", "SUB"]), PORTS, PORTS
    ),
    st.builds("OXC:SWIT:PORT:{} {}".format, st.sampled_from(["DIS", "ENAB"]), PORTS),
    st.sampled_from(["OXC:SWIT:DISC:ALL", "*RST", "*CLS", ""]),
    st.text(st.characters(min_codepoint=1, max_codepoint=255, exclude_characters="\n"), max_size=9),
)


@given(st.lists(COMMANDS, max_size=12))
def test_whatever_is_typed_the_map_is_one_to_one_and_told_the_same_both_ways(lines):
    unit = Client(circuits=((1, 5), (2, 6)))
    for line in lines:
        unit(line)
    told = unit("*CLS;:OXC:SWIT:CONN:STAT?").strip()
    ingress, egress = (side.split(",") for side in told[2:-1].split("),(@"))
    pairs = dict(zip(ingress, egress, strict=True)) if told != "(@),(@)" else {}
    assert len(set(pairs.values())) == len(pairs)
    for port in range(1, 5):
        assert unit(f"OXC:SWIT:CONN:PORT? {port}") == f'"{pairs.get(str(port), "")}"\r\n'
