"""What the SSH drivers say to a ToR and how they read it, on transcripts of real ones."""

from collections.abc import Callable
from pathlib import Path

import pytest

from drivers.address import SshAddress
from drivers.errors import Garbled, LinkLost, Refused
from drivers.tor.base import Delta, Hop, Route
from drivers.tor.frr import FrrTor, batch
from drivers.tor.linux import LinuxTor
from drivers.tor.remote import Access
from drivers.transports.commands import Finished
from drivers.transports.replay import Dialogue, load_dialogue

DIALOGUES = Path(__file__).parents[1] / "dialogues"
A, B = Hop("198.18.128.9", "u1"), Hop("198.18.128.8", "u2")
ONE, BOTH = Route("198.19.1.0/24", (A,)), Route("198.19.2.7/32", (A, B))
NOTHING: frozenset[Route] = frozenset()


class Script:
    """A session that plays a dialogue: the command and its input, then status and output."""

    name = "ssh://root@tor0:22"

    def __init__(self, dialogue: Dialogue) -> None:
        self._dialogue, self.closed = list(dialogue), 0

    def run(self, command: str, stdin: str, deadline_ns: int) -> Finished:
        expected, answer = self._dialogue.pop(0)
        assert f"{command}\n{stdin}" == expected.decode()
        if not answer:
            raise LinkLost(f"{self.name}: gone")
        status, _, text = answer.decode().partition("\n")
        return Finished(int(status), "", text) if status != "0" else Finished(0, text, "")

    def close(self) -> None:
        self.closed += 1


def access(open_: Callable[[int], Script], user: str = "root") -> Access:
    return Access("tor0", SshAddress(user, "tor0"), open_, 1, 1, lambda: 0, lambda _: None)


def recorded(name: str, *exchanges: int) -> Script:
    dialogue = load_dialogue(DIALOGUES / name)
    return Script([dialogue[i] for i in exchanges])


def linux(*exchanges: int) -> LinuxTor:
    script = recorded("linux_ssh_ip_6_1.txt", *exchanges)
    return LinuxTor(access(lambda _: script))


def frr(*exchanges: int) -> FrrTor:
    script = recorded("frr_ssh_8_4.txt", *exchanges)
    return FrrTor(access(lambda _: script))


def test_linux_changes_and_reads_back_in_one_exchange() -> None:
    assert linux(0)._send(NOTHING, frozenset({ONE, BOTH})) == {ONE, BOTH}


def test_linux_tells_a_refusal_in_the_kernels_words_and_names_the_line() -> None:
    moved = Route.one(ONE.prefix, "198.18.128.9", "u2")
    with pytest.raises(Refused) as refused:
        linux(1)._send(frozenset({ONE, BOTH}), frozenset({moved}))
    assert str(refused.value) == (
        "device refused 'route del 198.19.2.7/32 proto 202 metric 10': exit status 1"
        " ToR tor0: RTNETLINK answers: No such process"
    )


def test_linux_reads_a_default_route_and_leaves_out_what_has_no_far_end() -> None:
    default = Route("0.0.0.0/0", (A,))
    assert linux(2).read() == {default, Route.one(ONE.prefix, "198.18.128.9", "u2")}


@pytest.mark.parametrize("text", ["Welcome!", '{"dst": 1}', '[{"gateway": "1.2.3.4"}]', "[3]"])
def test_linux_does_not_take_any_text_for_routes(text: str) -> None:
    question = b"ip -json route show table main proto 202\n"
    script = Script([(question, f"0\n{text}".encode())])
    with pytest.raises(Garbled, match="ToR tor0: no list of routes"):
        LinuxTor(access(lambda _: script)).read()


def test_whoever_is_not_root_asks_by_sudo() -> None:
    script = Script([(b"sudo -n ip -json route show table main proto 202\n", b"0\n[]")])
    assert LinuxTor(access(lambda _: script, user="cumulus")).read() == NOTHING


def test_a_session_that_was_lost_is_opened_anew_for_the_next_read() -> None:
    question = b"ip -json route show table main proto 202\n"
    scripts = [Script([(question, b"")]), Script([(question, b"0\n[]")])]
    left = iter(scripts)
    tor = LinuxTor(access(lambda _: next(left)))
    assert tor.read() == NOTHING
    assert [script.closed for script in scripts] == [1, 0]
    tor.close()
    tor.close()
    with pytest.raises(LinkLost, match="used after it was closed"):
        tor.read()


def test_frr_reads_only_what_bears_our_tag_and_is_in_force() -> None:
    tor = frr(0, 1)
    assert tor.read() == {Route(ONE.prefix, (B,))}
    assert tor._near == {A, B}


def test_frr_knows_what_is_configured_and_not_in_force() -> None:
    there = Route(ONE.prefix, (A, B))
    assert frr(0)._read() == {there, Route.one("198.19.8.0/24", A.via, "u9")}


@pytest.mark.parametrize(
    ("exchange", "words"),
    [
        (2, "exit status 1 ToR tor0: Unknown command: ip route 198.19.1.0/33"),
        (3, "exit status 0 ToR tor0: Refusing to remove a non-existent route"),
    ],
)
def test_frr_tells_a_complaint_as_a_refusal(exchange: int, words: str) -> None:
    sent, _ = load_dialogue(DIALOGUES / "frr_ssh_8_4.txt")[exchange]
    line = sent.decode().split("'")[3]
    with pytest.raises(Refused, match=words):
        frr(exchange)._configure([line])


def test_frr_makes_new_hops_before_it_breaks_old_ones() -> None:
    old, new = Route(ONE.prefix, (A,)), Route(ONE.prefix, (B,))
    delta = Delta.between(frozenset({old, BOTH}), frozenset({new}))
    assert batch(delta, frozenset({A, B}), frozenset({B})) == [
        "ip route 198.19.1.0/24 198.18.128.8 u2 tag 202 10 onlink",
        "no ip route 198.19.2.7/32 198.18.128.8 u2 tag 202 10 onlink",
        "no ip route 198.19.2.7/32 198.18.128.9 u1 tag 202 10 onlink",
        "no ip route 198.19.1.0/24 198.18.128.9 u1 tag 202 10 onlink",
        "no ip route 198.18.128.9/32 u1 tag 201 10",
    ]
