"""Real agent processes and a real coordinator on loopback: meeting, asking, losing each other."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from harness.errors import AgentLost, AgentsMissing, InfrastructureError
from harness.wire import codec, keys
from harness.wire.asks import CommandFailed
from harness.wire.link import Link
from harness.wire.messages import (
    Beacons,
    Done,
    EndTraffic,
    Failure,
    Heard,
    Hello,
    Message,
    Refusal,
    StartBeacons,
    StopBeacons,
    StopRanks,
    Welcome,
)
from harness.wire.sockets import Doorkeeper, client_socket, server_socket

pytestmark = pytest.mark.emulated

S = 1_000_000_000
BEAT_NS, LOST_NS = S // 10, 2 * S
WAIT_NS = 20 * S
ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
NAMES = ("n0", "n1", "n2")
BEACONS = StartBeacons(devices=("lo",), interval_ns=S // 10)


class Field:
    """A key folder, and the processes started with it; all of them end with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []
        keys.make_folder(folder, NAMES)

    def link(self, **other: object) -> Link:
        options = {
            "bind": "127.0.0.1:0",
            "pair": keys.load(self.folder, keys.COORDINATOR),
            "agents": keys.allow_list(self.folder, NAMES),
            "run": "test",
            "beat_ns": BEAT_NS,
            "lost_ns": LOST_NS,
        }
        return Link(**(options | other))

    def start(self, *command: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        self.processes.append(process)
        return process

    def agent(self, name: str, address: str, *more: str) -> subprocess.Popen[str]:
        fixed = ["--name", name, "--coordinator", address, "--keys", str(self.folder)]
        return self.start("-m", "agents", *fixed, *more)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.communicate(timeout=10)


@pytest.fixture
def field(tmp_path: Path) -> Iterator[Field]:
    made = Field(tmp_path / "keys")
    yield made
    made.close()


def ended(process: subprocess.Popen[str], within_s: float = 10) -> tuple[int, str]:
    _, text = process.communicate(timeout=within_s)
    return process.returncode, text


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for is a process or a file
            await asyncio.sleep(0.01)


def with_agents(field: Field, body: Callable[[Link], Awaitable[None]], **other: object) -> None:
    """Run `body` with three agents that are ready."""

    async def main() -> None:
        async with field.link(**other) as link:
            for name in NAMES:
                field.agent(name, link.address)
            await link.ready(NAMES, WAIT_NS)
            await body(link)

    asyncio.run(main())


def everyone(body: Message) -> dict[str, Message]:
    return dict.fromkeys(NAMES, body)


def test_agents_come_work_and_go(field: Field) -> None:
    async def body(link: Link) -> None:
        hellos = await link.ready(NAMES, WAIT_NS)
        assert {hello.pid for hello in hellos.values()} == {p.pid for p in field.processes}
        assert "lo" in hellos["n0"].interfaces
        await link.ask_all(everyone(StopRanks()), Done, WAIT_NS)
        await link.ask("n1", BEACONS, Done, WAIT_NS)
        assert "lo" in (await link.ask("n1", StopBeacons(), Beacons, WAIT_NS)).received
        await link.shutdown(WAIT_NS)

    with_agents(field, body)
    assert [ended(process) for process in field.processes] == [(0, "")] * 3


def test_an_agent_starts_without_the_libraries_of_its_ranks(field: Field) -> None:
    heavy = "{'torch', 'numpy', 'vllm'} & set(sys.modules)"
    program = field.start("-c", f"import sys, agents.__main__; sys.exit(str({heavy} or 'none'))")
    assert ended(program) == (1, "none\n")


def test_clocks_are_measured_before_work_and_once_more_at_the_end(field: Field) -> None:
    async def body(link: Link) -> None:
        first = dict(link.clocks)
        assert all(first[name].samples >= 200 for name in NAMES)
        # All share this machine's clock, which the probes confirm.
        assert {fit.method for fit in first.values()} == {"same clock"}
        await link.shutdown(WAIT_NS)
        assert all(link.clocks[name].samples >= first[name].samples + 200 for name in NAMES)

    with_agents(field, body)


def test_two_clocks_of_one_machine_are_found_to_be_one_by_probes_alone(
    field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.wire.link.clock_identity", lambda: "another machine")

    async def body(link: Link) -> None:
        now = time.monotonic_ns()
        for fit in link.clocks.values():
            assert fit.method == "four-stamp"
            assert abs(fit.to_coordinator(now) - now) <= fit.bound_at(now)
            assert fit.bound_ns < 2_000_000
        await link.shutdown(WAIT_NS)

    with_agents(field, body)


def test_a_failure_names_the_agent_and_what_it_said(field: Field) -> None:
    async def body(link: Link) -> None:
        nothing = StartBeacons(devices=("nosuch0",), interval_ns=S)
        with pytest.raises(CommandFailed, match=r"n2: start_beacons failed: .*nosuch0"):
            await link.ask("n2", nothing, Done, WAIT_NS)
        with pytest.raises(CommandFailed) as caught:
            await link.ask_all(everyone(EndTraffic()), Done, WAIT_NS)
        assert set(caught.value.failures) == set(NAMES)
        with pytest.raises(CommandFailed, match="n0: hello failed: NotACommand"):
            await link.ask("n0", msgspec.convert(HELLO, Hello), Done, WAIT_NS)
        await link.shutdown(WAIT_NS)

    with_agents(field, body)


HELLO = {
    "kind": "hello", "version": (1, 0), "host": "h", "pid": 1, "gpus": 0,
    "interfaces": (), "facts": {},
}  # fmt: skip


def test_a_quick_command_is_answered_while_a_slow_one_waits(field: Field) -> None:
    async def body(link: Link) -> None:
        await link.ask("n0", BEACONS, Done, WAIT_NS)
        slow = Heard(since_ns=0, expect={"lo": "nobody:lo"}, wait_ns=S // 2)
        waiting = asyncio.create_task(link.ask("n0", slow, Beacons, S // 2))
        await link.ask("n0", StopRanks(), Done, WAIT_NS)
        assert not waiting.done()
        assert (await waiting).last.get("lo") != "nobody:lo"
        await link.shutdown(WAIT_NS)

    with_agents(field, body)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_agent_that_dies_or_stops_is_lost_within_the_heartbeat_limit(
    field: Field, how: signal.Signals
) -> None:
    async def body(link: Link) -> None:
        await link.ask_all(everyone(BEACONS), Done, WAIT_NS)
        slow = Heard(since_ns=0, expect={"lo": "nobody:lo"}, wait_ns=15 * S)
        waiting = asyncio.create_task(link.ask_all(everyone(slow), Beacons, WAIT_NS))
        await asyncio.sleep(0)
        os.kill(field.processes[1].pid, how)
        began = time.monotonic_ns()
        with pytest.raises(AgentLost, match=r"^n1 fell silent: no heartbeat for [0-9.]+ s$"):
            await waiting
        assert time.monotonic_ns() - began < LOST_NS + 2 * S
        with pytest.raises(AgentLost, match="n1 fell silent"):
            await link.ask("n1", StopRanks(), Done, WAIT_NS)
        assert await link.ask("n0", StopRanks(), Done, WAIT_NS)
        name, note = link.notes.get_nowait()
        assert (name, note.level) == ("n1", "error")
        await link.shutdown(WAIT_NS)

    with_agents(field, body)
    assert [ended(field.processes[i])[0] for i in (0, 2)] == [0, 0]


def test_a_stopped_agent_that_wakes_finds_itself_given_up_and_ends(field: Field) -> None:
    async def body(link: Link) -> None:
        os.kill(field.processes[0].pid, signal.SIGSTOP)
        await until(lambda: not link.notes.empty())
        os.kill(field.processes[0].pid, signal.SIGCONT)
        code, text = await asyncio.to_thread(ended, field.processes[0])
        assert (code, text.startswith("agent n0: the coordinator was silent for")) == (3, True)
        await link.shutdown(WAIT_NS)

    with_agents(field, body)


def test_agents_end_when_their_coordinator_is_killed(field: Field) -> None:
    script = str(HERE / "wire_coordinator.py")
    coordinator = field.start(script, str(field.folder), str(LOST_NS), *NAMES)
    assert coordinator.stdout
    address = coordinator.stdout.readline().strip()
    agents = [field.agent(name, address) for name in NAMES]
    assert coordinator.stdout.readline() == "READY\n"
    coordinator.kill()
    began = time.monotonic_ns()
    for agent in agents:
        code, text = ended(agent)
        assert (code, "the coordinator was silent for" in text) == (3, True)
    assert time.monotonic_ns() - began < LOST_NS + 3 * S


def test_a_stuck_agent_kills_its_work_and_itself_when_the_coordinator_is_gone(field: Field) -> None:
    async def main() -> subprocess.Popen[str]:
        async with field.link() as link:
            script = [str(HERE / "stuck_agent.py"), "n0", link.address, str(field.folder), str(S)]
            agent = field.start(*script)
            await link.ready({"n0"}, WAIT_NS)
            waiting = asyncio.create_task(link.ask("n0", StopRanks(), Done, WAIT_NS))
            await until((field.folder / "child").exists)
            waiting.cancel()
            return agent

    code, text = ended(asyncio.run(main()))
    assert code == 3
    assert text.endswith("s; work is stuck and was killed\n")


def test_a_signal_ends_an_agent_in_order(field: Field) -> None:
    async def body(link: Link) -> None:
        field.processes[2].terminate()
        name, note = await asyncio.wait_for(link.notes.get(), 10)
        assert (name, note.text) == ("n2", "n2 ends on SIGTERM")
        assert (await asyncio.to_thread(ended, field.processes[2]))[0] == 4
        await until(lambda: not link.notes.empty())
        assert "n2 fell silent" in link.notes.get_nowait()[1].text
        await link.shutdown(WAIT_NS)

    with_agents(field, body)


class Proxy:
    """A TCP forwarder in front of the coordinator whose connections can be cut and kept out."""

    def __init__(self, address: str) -> None:
        self.target = address.split(":")
        self.open: list[asyncio.StreamWriter] = []
        self.shut = False
        self.turned_away = 0

    async def serve(self) -> str:
        self.server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return "127.0.0.1:{1}".format(*self.server.sockets[0].getsockname())

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.shut:
            self.turned_away += 1
            writer.close()
            return
        far_reader, far_writer = await asyncio.open_connection(*self.target)
        self.open += [writer, far_writer]
        await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if self.shut:
                break  # what is on its way when the line is cut is gone
            writer.write(data)
        writer.close()

    def cut(self) -> None:
        self.shut = True
        for writer in self.open:
            writer.transport.abort()
        self.open.clear()

    async def close(self) -> None:
        self.cut()
        self.server.close()
        await self.server.wait_closed()


def test_a_cut_connection_delays_commands_and_answers_but_loses_none(field: Field) -> None:
    async def main() -> None:
        async with field.link(lost_ns=20 * S) as link:
            proxy = Proxy(link.address)
            field.agent("n0", await proxy.serve())
            await link.ready({"n0"}, WAIT_NS)
            await link.ask("n0", BEACONS, Done, WAIT_NS)
            slow = Heard(since_ns=0, expect={"lo": "nobody:lo"}, wait_ns=S)
            answer = asyncio.create_task(link.ask("n0", slow, Beacons, S))
            await asyncio.sleep(0.1)
            proxy.cut()
            late = asyncio.create_task(link.ask("n0", StopRanks(), Done, WAIT_NS))
            await until(lambda: proxy.turned_away > 1)
            assert not late.done()
            proxy.shut = False
            await late
            assert isinstance(await answer, Beacons)
            # The beacons are still the ones started once: nothing was done twice.
            assert isinstance(await link.ask("n0", StopBeacons(), Beacons, WAIT_NS), Beacons)
            await link.shutdown(WAIT_NS)
            await proxy.close()

    asyncio.run(main())


# -- meetings that must not succeed ------------------------------------------------------------


def test_missing_agents_are_named_with_those_seen(field: Field) -> None:
    async def main() -> None:
        async with field.link() as link:
            field.agent("n1", link.address)
            await link.ready({"n1"}, WAIT_NS)
            with pytest.raises(AgentsMissing, match=r"after 0.2 s: n0, n2 \(seen: n1\)"):
                await link.ready(NAMES, S // 5)
            await link.shutdown(WAIT_NS)

    asyncio.run(main())


def test_a_key_that_is_not_on_the_list_is_refused_with_the_cure(field: Field) -> None:
    async def main() -> tuple[int, str]:
        keys.save(field.folder, keys.make_pair("n9"))
        async with field.link() as link:
            return await asyncio.to_thread(ended, field.agent("n9", link.address))

    code, text = asyncio.run(main())
    assert code == 3
    assert "does not know this key: copy n9.pub" in text


def test_an_agent_refuses_a_coordinator_without_the_right_key(field: Field) -> None:
    async def main() -> tuple[int, str]:
        other = field.folder / "n1.pub"
        async with field.link() as link:
            agent = field.agent("n0", link.address, "--server-key", str(other))
            return await asyncio.to_thread(ended, agent)

    code, text = asyncio.run(main())
    assert code == 3
    assert "does not hold the coordinator's key: copy its coordinator.pub" in text


def test_a_key_makes_only_its_own_name(field: Field) -> None:
    (field.folder / "n1.key").write_bytes((field.folder / "n0.key").read_bytes())

    async def main() -> tuple[int, str]:
        async with field.link() as link:
            return await asyncio.to_thread(ended, field.agent("n1", link.address))

    code, text = asyncio.run(main())
    assert (code, "the key of n0 does not make a process n1" in text) == (3, True)


def test_a_second_process_of_one_name_is_refused_and_the_first_works_on(field: Field) -> None:
    async def body(link: Link) -> None:
        first = (await link.ready({"n0"}, WAIT_NS))["n0"].pid
        code, text = await asyncio.to_thread(ended, field.agent("n0", link.address))
        assert code == 3
        assert f"the name n0 is taken by process {first} on" in text
        await link.ask("n0", StopRanks(), Done, WAIT_NS)
        assert "refused an agent" in link.notes.get_nowait()[1].text
        await link.shutdown(WAIT_NS)

    with_agents(field, body)


def test_a_name_is_free_again_once_its_process_is_lost(field: Field) -> None:
    async def body(link: Link) -> None:
        field.processes[0].kill()
        await until(lambda: not link.notes.empty())
        again = field.agent("n0", link.address)
        assert (await link.ready(NAMES, WAIT_NS))["n0"].pid == again.pid
        await link.ask_all(everyone(StopRanks()), Done, WAIT_NS)
        await link.shutdown(WAIT_NS)

    with_agents(field, body)


def test_nobody_there_is_said_after_the_wait(field: Field) -> None:
    code, text = ended(field.agent("n0", "127.0.0.1:9", "--max-wait", "0.3"))
    assert code == 3
    assert "no coordinator answered at 127.0.0.1:9" in text


@pytest.mark.parametrize(
    ("address", "name", "says"),
    [("nowhere", "n0", "write HOST:PORT"), ("127.0.0.1:9", "n7", "n7.key is missing")],
)
def test_a_wrong_argument_is_one_line_and_exit_2(
    field: Field, address: str, name: str, says: str
) -> None:
    code, text = ended(field.agent(name, address))
    assert (code, text.count("\n"), says in text) == (2, 1, True)


def test_an_agent_of_another_protocol_is_refused_naming_both_versions(field: Field) -> None:
    async def main() -> None:
        async with field.link() as link:
            pair, server = keys.load(field.folder, "n0"), link._pair.public
            with zmq.Context() as context:
                old = client_socket(context, pair, server, b"old")
                old.connect(f"tcp://{link.address}")
                hello = msgspec.convert(HELLO, Hello)
                data = codec.encode(hello, run="", node="n0", epoch=0, seq=0, t_mono_ns=0)
                fields = msgspec.msgpack.decode(data)
                fields[0] = [0, 9]
                old.send(msgspec.msgpack.encode(fields))
                both = r"n0 speaks protocol 0\.9, the coordinator 1\.0"
                with pytest.raises(InfrastructureError, match=both):
                    await link.ready({"n0"}, WAIT_NS)
                assert await asyncio.to_thread(old.poll, 5_000)
                answer = codec.decode_body(codec.decode(old.recv()))
                assert isinstance(answer, Refusal)
                assert "0.9" in answer.reason
                old.close(0)

    asyncio.run(main())


@pytest.mark.parametrize("part", ["harness.wire.pulse.parse_echo", "harness.wire.link.Welcome"])
def test_a_bug_of_ours_in_the_background_reaches_whoever_waits(
    field: Field, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def bug(*_: object, **__: object) -> None:
        raise ZeroDivisionError(part)

    monkeypatch.setattr(part, bug)

    async def main() -> None:
        async with field.link() as link:
            field.agent("n0", link.address)
            with pytest.raises(ZeroDivisionError):
                await link.ready({"n0"}, WAIT_NS)

    asyncio.run(main())


def test_an_address_in_use_is_named(field: Field) -> None:
    async def main() -> None:
        async with field.link() as first:
            with pytest.raises(InfrastructureError, match=f"cannot listen on {first.address}"):
                async with field.link(bind=first.address):
                    pass

    asyncio.run(main())


# -- commands by (epoch, seq), against a coordinator of this test's own --------------------------


class Bare:
    """A coordinator reduced to one socket, which can repeat itself and lie about its life."""

    def __init__(self, field: Field) -> None:
        self.context: zmq.Context = zmq.Context()
        self.door = Doorkeeper(self.context, keys.allow_list(field.folder, NAMES))
        self.door.start()
        self.socket = server_socket(self.context, keys.load(field.folder, keys.COORDINATOR))
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.agent = field.agent("n0", f"127.0.0.1:{port}")
        self.route = b""
        assert isinstance(self.hear(), Hello)
        # No pulse is served at port 9 (discard); the agent would miss it after a minute.
        self.say(Welcome(beat_ns=S, lost_ns=60 * S, pulse_port=9), seq=0, epoch=5)

    def hear(self) -> Message:
        assert self.socket.poll(10_000), "the agent did not answer"
        self.route, data = self.socket.recv_multipart()
        self.answer = codec.decode(data)
        return codec.decode_body(self.answer)

    def say(self, body: Message, seq: int, epoch: int, kind: str = "") -> None:
        kind, data = kind or codec.kind_of(body), codec.encode_body(body)
        message = codec.encode(
            data, kind=kind, run="r", node="n0", epoch=epoch, seq=seq, t_mono_ns=0, deadline_ns=S
        )
        self.socket.send_multipart([self.route, message])

    def close(self) -> None:
        self.door.stop()
        self.context.destroy(0)


@pytest.fixture
def bare(field: Field) -> Iterator[Bare]:
    made = Bare(field)
    yield made
    made.close()


def test_a_repeated_command_is_answered_from_memory_and_not_done_again(bare: Bare) -> None:
    bare.say(BEACONS, seq=1, epoch=5)
    first = bare.hear()
    bare.say(BEACONS, seq=1, epoch=5)
    assert isinstance(first, Done)
    assert (bare.hear(), bare.answer.re) == (first, 1)
    bare.say(BEACONS, seq=2, epoch=5)
    again = bare.hear()
    assert isinstance(again, Failure)
    assert again.error == "Busy"


def test_what_an_older_life_of_the_coordinator_sent_is_dropped(bare: Bare) -> None:
    bare.say(BEACONS, seq=1, epoch=4)
    bare.say(StopRanks(), seq=2, epoch=5)
    assert isinstance(bare.hear(), Done)
    assert bare.answer.re == 2
    bare.say(StopRanks(), seq=1, epoch=6)
    bare.hear()
    assert (bare.answer.re, bare.answer.epoch) == (1, 6)


def test_an_unknown_kind_is_a_typed_failure_and_the_agent_works_on(bare: Bare) -> None:
    bare.say(StopRanks(), seq=1, epoch=5, kind="levitate")
    answer = bare.hear()
    assert isinstance(answer, Failure)
    assert (answer.error, "'levitate'" in answer.text) == ("UnknownKind", True)
    bare.say(StopRanks(), seq=2, epoch=5)
    assert isinstance(bare.hear(), Done)
