"""Polatis units, replayed from dialogues in the vendor's framing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from drivers.address import NO_CREDENTIALS, Credentials, parse
from drivers.base import Delta, Matching, PortState, PowerMonitor, Rewires, Shutters
from drivers.errors import (
    AccessDenied,
    DeadlineExpired,
    Garbled,
    Indeterminate,
    LinkLost,
    Misuse,
    Refused,
)
from drivers.ocs.line import Access
from drivers.ocs.polatis import PolatisScpi, PolatisTl1
from drivers.transports.faulty import Faulty
from drivers.transports.replay import Dialogue, Replay, load_dialogue

DIALOGUES = Path(__file__).parents[1] / "dialogues"
SECRET = Credentials(user="admin", password="secret")
SERIAL, TCP, SSH = "serial:///dev/ttyUSB0", "tcp://h:5025", "ssh://admin@h:6252"


def access(
    *lines: Replay | Faulty, url: str = TCP, credentials: Credentials = NO_CREDENTIALS
) -> Access:
    """Lines that are opened one after the other; the clock ticks 1 us at each look."""
    left = list(lines)
    ticks = iter(range(0, 10**12, 1000))
    return Access(
        "agg0",
        parse(url),
        lambda _: left.pop(0),
        exchange_timeout_ns=10**9,
        open_timeout_ns=10**9,
        credentials=credentials,
        now_ns=lambda: next(ticks),
    )


def dialogue(name: str) -> Dialogue:
    return load_dialogue(DIALOGUES / name)


@pytest.mark.parametrize("chunks", [(), (1,), (3, 7, 2)])
def test_serial_scpi_dialogue(chunks: tuple[int, ...]) -> None:
    replay = Replay(dialogue("polatis_scpi_24x24_ost.txt"))
    ocs = PolatisScpi(access(Faulty(replay, chunks=chunks), url=SERIAL))
    who = ocs.identify()
    assert (who.serial, who.firmware) == ("002414", "6.5.2.18")
    assert (who.ingress, who.egress) == (range(1, 25), range(25, 49))
    assert ocs.read() == Matching.of([(1, 25), (2, 26), (3, 27)])
    receipt = ocs.rewire([(1, 25), (2, 26)], [(1, 26), (2, 25)])
    assert receipt.after == Matching.of([(1, 26), (2, 25), (3, 27)])
    assert 0 < receipt.sent_ns < receipt.acknowledged_ns
    with pytest.raises(Refused) as caught:
        ocs.rewire([], [(4, 28), (5, 29)])
    assert (caught.value.code, caught.value.text) == (
        "-200",
        "Execution error;cannot connect 5,29",
    )
    assert ocs.port_states([1, 2, 30]) == {
        1: PortState.ENABLED,
        2: PortState.DISABLED,
        30: PortState.FAILED,
    }
    ocs.set_shutter([1, 2], closed=True)
    ocs.connect([(9, 33)])
    with pytest.raises(Refused, match="-113 Undefined header"):
        ocs.disconnect([(9, 33)])
    replay.finish()
    with pytest.raises(Misuse, match="I-OST-24x24-LU1-DMHNS has no power monitors"):
        ocs.power_dbm([25])


def test_tcp_scpi_dialogue() -> None:
    replay = Replay(dialogue("polatis_scpi_192x192_tcp.txt"))
    ocs = PolatisScpi(access(replay))
    assert ocs.identify().egress == range(193, 385)
    assert ocs.read() == Matching.of([])
    assert ocs.power_dbm([193, 194]) == {193: -3.21, 194: -60.0}
    replay.finish()


@pytest.mark.parametrize("chunks", [(), (1,), (5, 11)])
def test_tl1_dialogue(chunks: tuple[int, ...]) -> None:
    replay = Replay(dialogue("polatis_tl1_ssh.txt"))
    ocs = PolatisTl1(access(Faulty(replay, chunks=chunks), url=SSH, credentials=SECRET))
    who = ocs.identify()
    assert (who.serial, who.ingress, who.egress) == ("010203", range(1, 193), range(193, 385))
    assert ocs.read() == Matching.of([(1, 193), (2, 194)])
    assert [(e.severity, e.what, e.rows) for e in ocs.events()] == [
        ("**", "REPT ALM EQPT", ("PSU1:MJ",))
    ]
    assert ocs.events() == []
    receipt = ocs.rewire([(1, 193), (2, 194)], [(1, 194), (2, 193)])
    assert receipt.after == Matching.of([(1, 194), (2, 193)])
    ocs.connect([(3, 195)])
    with pytest.raises(Refused, match="'ENT-PATCH::4,1000': IDNV Invalid OXC port: 1000"):
        ocs.connect([(4, 1000)])
    with pytest.raises(Refused, match="SROF 5,197"):
        ocs.connect([(4, 196), (5, 197), (6, 198)])
    assert ocs.power_dbm([193, 194]) == {193: -3.21, 194: -60.0}
    assert ocs.port_states([1, 2, 3]) == {
        1: PortState.ENABLED,
        2: PortState.DISABLED,
        3: PortState.ENABLED,
    }
    ocs.set_shutter([1, 2, 3], closed=True)
    replay.finish()


def test_a_unit_that_wants_a_login_we_lack_says_where_it_goes() -> None:
    replay = Replay(dialogue("polatis_tl1_tcp_refused.txt"))
    with pytest.raises(AccessDenied, match="name the user in the URL or the credentials"):
        PolatisTl1(access(replay))
    replay.finish()


IDN = (b"*CLS\n*IDN?\n", b"Polatis,N-VST-16x16-LU1-DMHNV,1,6.7\n")
HDR = b"\r\n\n   s 26-01-31 12:00:00\r\nM  %d COMPLD\r\n%s;\r\n>"


def open_tl1() -> Dialogue:
    return [
        (b"RTRV-HDR:::1:;\n", HDR % (1, b"")),
        (b"RTRV-NETYPE:::2:;\n", HDR % (2, b'   "Polatis,N-VST-16x16-LU1,OCS,6.7"\r\n')),
        (b"RTRV-INV::OCS:3:;\n", HDR % (3, b"")),
    ]


def test_a_lost_reply_to_a_change_is_indeterminate_and_the_late_one_is_not_believed() -> None:
    add = b":OXC:SWIT:CONN:ADD (@1),(@17);:SYST:ERR?\n"
    late = b'0,"No error"\nPolatis,N-VST-16x16-LU1-DMHNV,1,6.7\n'
    replay = Replay([IDN, (add, b""), (IDN[0], late), (b":OXC:SWIT:CONN:STAT?\n", b"(@1),(@17)\n")])
    ocs = PolatisScpi(access(Faulty(replay, chunks=(13,))))  # the late reply comes by itself
    with pytest.raises(Indeterminate, match="agg0: the outcome of a change is not known"):
        ocs.connect([(1, 17)])
    assert ocs.read() == Matching.of([(1, 17)])
    replay.finish()


def test_a_line_that_cannot_be_resynchronised_is_opened_again() -> None:
    first = Replay([IDN, (b":OXC:SWIT:CONN:STAT?\n", b""), (IDN[0], b"")])
    second = Replay([IDN, (b":OXC:SWIT:CONN:STAT?\n", b"(@),(@)\n")])
    ocs = PolatisScpi(access(first, second))
    with pytest.raises(DeadlineExpired):
        ocs.read()
    assert len(ocs.read()) == 0
    first.finish()
    second.finish()


def test_a_line_cut_in_a_reply_is_lost_and_opened_again_for_the_next_question() -> None:
    reply = b"(@1,2),(@17,18)\n"
    first = Replay([IDN, (b":OXC:SWIT:CONN:STAT?\n", reply)])
    second = Replay([IDN, (b":OXC:SWIT:CONN:STAT?\n", reply)])
    cut = Faulty(first, cut_after=len(IDN[1]) + 7)
    ocs = PolatisScpi(access(cut, second))
    with pytest.raises(LinkLost):
        ocs.read()
    assert ocs.read() == Matching.of([(1, 17), (2, 18)])


def test_a_tl1_answer_to_an_earlier_ctag_is_passed_over() -> None:
    replay = Replay(
        [
            *open_tl1(),
            (b"ENT-PATCH::1,17:4:;\n", b""),
            (b"RTRV-HDR:::5:;\n", HDR % (4, b"") + HDR % (5, b"")),
            (b"RTRV-PATCH:::6:;\n", HDR % (4, b"") + HDR % (6, b'   "1,17"\r\n')),
        ]
    )
    ocs = PolatisTl1(access(replay))
    with pytest.raises(Indeterminate):
        ocs.connect([(1, 17)])
    assert ocs.read() == Matching.of([(1, 17)])
    replay.finish()


@pytest.mark.parametrize(
    ("opens", "make"),
    [([(b"*CLS\r\n*IDN?\r\n", b"")], PolatisScpi), ([(b"RTRV-HDR:::1:;\n", b"")], PolatisTl1)],
)
def test_noise_of_a_wrong_baud_rate_is_called_that(
    opens: Dialogue, make: Callable[[Access], object]
) -> None:
    noisy = [(opens[0][0], b"\xf8\x00\xe3\x9f\x7e")]
    with pytest.raises(Garbled, match=r"check .*baud rate"):
        make(access(Replay(noisy), url=SERIAL))


@pytest.mark.parametrize("reply", [b"(@1,2),(@17,17)\n", b"(@1,2),(@17)\n", b'0,"No error"\n'])
def test_a_map_that_makes_no_sense_is_garbled_and_after_a_change_unknown(reply: bytes) -> None:
    stat = (b":OXC:SWIT:CONN:STAT?\n", reply)
    change = (b":OXC:SWIT:CONN:ADD (@1),(@17);STAT?\n", reply)
    ocs = PolatisScpi(access(Replay([IDN, stat, IDN, change])))
    with pytest.raises(Garbled):
        ocs.read()
    with pytest.raises(Indeterminate):
        ocs.rewire([], [(1, 17)])


def test_the_size_is_asked_where_the_model_does_not_tell() -> None:
    idn = (IDN[0], b"Polatis,OPTICAL-X,1,6.7\n")
    scpi = PolatisScpi(access(Replay([idn, (b":OXC:SWIT:SIZE?\n", b"8,12\n")])))
    assert (scpi.identify().ingress, scpi.identify().egress) == (range(1, 9), range(9, 21))
    opens = open_tl1()
    opens[1] = (opens[1][0], HDR % (2, b'   "Polatis,OPTICAL-X,OCS,6.7"\r\n'))
    size = (b"RTRV-EQPT::SYSTEM:4:::PARAMETER=SIZE;\n", HDR % (4, b'   "SYSTEM:SIZE=8x12"\r\n'))
    tl1 = PolatisTl1(access(Replay([*opens, size])))
    assert tl1.identify().egress == range(9, 21)


def test_power_of_many_ports_is_asked_256_at_a_time() -> None:
    idn = (IDN[0], b"Polatis,N-VST-512x512-LA1-DMHNV-701,1,6.7\n")
    ports = list(range(513, 813))
    asks = [
        (
            f":PMON:POW? (@{','.join(map(str, part))})\n".encode(),
            f"({','.join(f'-{p / 100:.2f}' for p in part)})\n".encode(),
        )
        for part in (ports[:256], ports[256:])
    ]
    replay = Replay([idn, *asks])
    found = PolatisScpi(access(replay)).power_dbm(ports)
    assert found == {port: -port / 100 for port in ports}
    replay.finish()


def test_preview_shows_what_rewire_sends() -> None:
    delta = Delta(drop=((1, 17), (2, 18)), make=((1, 18),), keep=((3, 19),))
    change = ":OXC:SWIT:CONN:SUB (@1,2),(@17,18);ADD (@1),(@18);STAT?"
    replay = Replay([IDN, (f"{change}\n".encode(), b"(@1,3),(@18,19)\n")])
    scpi = PolatisScpi(access(replay))
    assert scpi.preview(delta) == [change]
    scpi.rewire(delta.drop, delta.make)
    replay.finish()
    tl1 = PolatisTl1(access(Replay(open_tl1())))
    assert tl1.preview(delta) == [
        "DLT-PATCH::1&2:<ctag>:;",
        "ENT-PATCH::1,18:<ctag>:;",
        "RTRV-PATCH:::<ctag>:;",
    ]


def test_a_change_larger_than_a_batch_is_split_and_only_its_last_part_reads_back() -> None:
    idn = (IDN[0], b"Polatis,N-VST-192x192-LU1-DMHNV-801,1,6.7\n")
    circuits = [(a, a + 192) for a in range(1, 131)]
    first, last = PolatisScpi(access(Replay([idn]))).preview(Delta((), tuple(circuits), ()))
    assert first.startswith(":OXC:SWIT:CONN:ADD (@1,2,")
    assert first.endswith(",320);:SYST:ERR?")
    assert last == ":OXC:SWIT:CONN:ADD (@129,130),(@321,322);STAT?"


def test_the_optional_protocols_are_satisfied() -> None:
    for ocs in (PolatisScpi(access(Replay([IDN]))), PolatisTl1(access(Replay(open_tl1())))):
        assert isinstance(ocs, PowerMonitor)
        assert isinstance(ocs, Shutters)
        assert isinstance(ocs, Rewires)


def test_after_close_the_line_stays_closed() -> None:
    ocs = PolatisScpi(access(Replay([IDN]), Replay([IDN])))
    ocs.close()
    ocs.close()
    with pytest.raises(LinkLost, match="used after it was closed"):
        ocs.read()
