"""Silences, losses and far ends from beacons, without sockets."""

from agents.beacons import Beacon, Ledger, Stamper, parse

MS = 1_000_000


def ledger() -> Ledger:
    return Ledger("here", ["u1"], MS)


def hear(
    found: Ledger, at_ms: float, sequence: int, sender: str = "t1:u2", stream: int = 1
) -> None:
    found.arrived("u1", int(at_ms * MS), Beacon(sender, stream, sequence))


def test_a_payload_is_read_back_and_foreign_packets_are_not() -> None:
    stamper = Stamper("tor0:u1", 77)
    assert parse(bytes(stamper.payload(2**40))) == Beacon("tor0:u1", 77, 2**40)
    assert parse(bytes(stamper.payload(3))) == Beacon("tor0:u1", 77, 3)
    assert parse(b"") is None
    assert parse(b"NTP!" + b"\0" * 40) is None


def test_a_dark_time_is_a_gap_and_its_beacons_are_lost() -> None:
    found = ledger()
    for n in range(5):
        hear(found, n, n)
    hear(found, 29, 29)
    report = found.report(0)
    (gap,) = report.gaps
    assert (gap.last_ns, gap.first_ns) == (4 * MS, 29 * MS)
    assert (gap.before, gap.after) == ("t1:u2", "t1:u2")
    assert report.lost == {"u1": 24}
    assert report.received == {"u1": 6}


def test_three_intervals_are_not_yet_a_gap() -> None:
    found = ledger()
    hear(found, 0, 0)
    hear(found, 3, 3)
    assert found.report(0).gaps == ()
    hear(found, 6.01, 6)
    assert len(found.report(0).gaps) == 1


def test_another_far_end_or_a_restarted_one_loses_nothing() -> None:
    found = ledger()
    hear(found, 0, 10)
    hear(found, 25, 900, "t2:u1")
    hear(found, 26, 0, "t2:u1", stream=2)
    report = found.report(0)
    assert report.lost == {"u1": 0}
    assert [(gap.before, gap.after) for gap in report.gaps] == [("t1:u2", "t2:u1")]
    assert report.last == {"u1": "t2:u1"}
    assert report.first_ns == {"u1": 25 * MS}


def test_only_what_happened_since_is_told() -> None:
    found = ledger()
    hear(found, 0, 0)
    hear(found, 10, 10)
    hear(found, 11, 11)
    hear(found, 20, 13, "t1:u2")
    report = found.report(10 * MS)
    assert report.received == {"u1": 2}
    assert report.lost == {"u1": 1}
    assert [gap.first_ns for gap in report.gaps] == [20 * MS]
    assert report.first_ns == {"u1": 11 * MS}
    quiet = found.report(20 * MS)
    assert quiet.last == {"u1": "t1:u2"}
    assert quiet.first_ns == {}


def test_ones_own_beacon_is_not_heard() -> None:
    found = ledger()
    hear(found, 0, 0, "here:u1")
    assert found.report(0).last == {}
    hear(found, 1, 0, "here:u2")
    assert found.report(0).last == {"u1": "here:u2"}, "two devices of one node may be joined"


def test_a_far_end_is_heard_only_after_the_moment_asked_for() -> None:
    found = ledger()
    hear(found, 5, 0)
    assert found.heard({"u1": "t1:u2"}, 4 * MS)
    assert not found.heard({"u1": "t1:u2"}, 5 * MS)
    assert not found.heard({"u1": "t9:u9"}, 0)


def test_a_double_or_overtaken_beacon_is_no_loss() -> None:
    found = ledger()
    for at_ms, sequence in enumerate((5, 5, 4, 6)):
        hear(found, at_ms, sequence)
    assert found.report(0).lost == {"u1": 0}
    assert found.report(0).received == {"u1": 4}
