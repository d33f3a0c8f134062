"""A simulated node generates as a real one does: what it answers, what it tells, and when."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from generation_world import PROFILE, SPEC, Told, lasted_s, run

from harness.clock import NS_PER_MS, NS_PER_S
from harness.model.placement import Instance
from harness.model.profile import Figure, costs_of, load_ns
from harness.model.steptime import step_ns
from harness.wire.generation import (
    Admission,
    Build,
    CloseGeneration,
    EngineSpec,
    Happened,
    KvTarget,
    MeasureSteps,
    OpenGeneration,
    Prepare,
    Prepared,
    StepTimes,
    Strategy,
    Submit,
    Submitted,
    TearDown,
    Torn,
    UpdateWeights,
    Watch,
    WeightsUpdated,
    Withdraw,
    Withdrawn,
    Work,
)  # fmt: skip
from harness.wire.messages import Done, Failure

# -- engines -----------------------------------------------------------------------------------


def test_requests_run_to_their_end_in_every_shape() -> None:
    async def test(n: Told) -> None:
        opened = await n.open()
        assert opened.facts["engine"] == "paced"
        assert opened.shape == PROFILE.shape
        assert n.now_ns == 8 * NS_PER_S
        for number, text in enumerate(("2xTP1", "1xTP2", "2xTP1")):
            instances = n.layout(text)
            built = await n.build(instances)
            of_rank = built.capacities[instances[0].name].weights_bytes / len(instances[0].gpus)
            assert lasted_s(built.spans) == pytest.approx(
                {"groups": 0.5, "weights": 0.125 + of_rank / 2e6, "kv_cache": 0.0625}
            )
            for item in instances:
                assert len(set(built.kv_peers[item.name])) == len(item.gpus)
                await n.submit(item, f"{item.name} {number}")
            await n.finished(*(f"{item.name} {number}" for item in instances))
            for item in instances:
                assert n.positions(f"{item.name} {number}") == list(range(20))
            assert lasted_s((await n.tear_down(instances)).spans) == {"teardown": 0.25}
        await n.ask(CloseGeneration(), Done)
        assert (await n.fails(Watch(after=0, wait_ns=0))).error == "NotOpen"

    run(test)


def test_weights_come_no_sooner_than_gpus_take_them_in() -> None:
    async def test(n: Told) -> None:
        gpu = msgspec.structs.replace(PROFILE.gpu, host_gb_per_s=Figure(5.0, "pcie"))
        slow = msgspec.structs.replace(PROFILE, gpu=gpu)
        (pair,) = n.layout("1xTP2")
        await n.open(msgspec.structs.replace(SPEC, profile=slow, speed=2.0), prebuild=[[pair]])
        lasts_s = load_ns(slow, pair.layout, 2.0) / NS_PER_S
        for strategy in ("rebuild", "pool"):
            built = await n.build([pair], strategy)
            assert lasted_s(built.spans)["weights"] == pytest.approx(0.125 + lasts_s)
            update = UpdateWeights(instances=(pair.name,), version=1)
            updated = await n.ask(update, WeightsUpdated)
            assert lasted_s(updated.spans)["weights"] == pytest.approx(0.5 + lasts_s)
            await n.tear_down([pair], strategy)

    run(test)


@pytest.mark.parametrize(("strategy", "again"), [("rebuild", False), ("restart", True)])
def test_only_a_restart_starts_processes_anew(strategy: Strategy, again: bool) -> None:
    async def test(n: Told) -> None:
        await n.open()
        (pair,) = n.layout("1xTP2")
        assert "processes" not in lasted_s((await n.build([pair], strategy)).spans)
        await n.tear_down([pair], strategy)
        spans = lasted_s((await n.build(n.layout("2xTP1"), strategy)).spans)
        assert spans.get("processes") == (8.0 if again else None)

    run(test)


def test_engines_of_a_pool_change_places_asleep() -> None:
    async def test(n: Told) -> None:
        ones, (pair,) = n.layout("2xTP1"), n.layout("1xTP2")
        await n.open(prebuild=[ones, (pair,)])
        prepared = await n.ask(Prepare(instances=ones, strategy="pool"), Prepared)
        assert [row.gpu for row in prepared.memory] == [0, 1]
        for number, instances in enumerate((ones, (pair,), ones)):
            built = await n.build(instances, "pool", version=number)
            assert set(lasted_s(built.spans)) == {"weights", "kv_cache"}
            await n.submit(instances[0], f"{number}")
            await n.finished(f"{number}")
            assert n.outputs[-1].version == number
            await n.tear_down(instances, "pool")
        await n.build(ones, "rebuild")
        await n.tear_down(ones, "rebuild")
        await n.build(ones, "pool")

    run(test)


def test_what_cannot_be_is_refused_with_every_reason() -> None:
    async def test(n: Told) -> None:
        vllm = OpenGeneration(spec=EngineSpec(engine="vllm"), gpus=1, address="")
        failure = await n.fails(vllm)
        assert failure.error == "UsageError"
        assert 'engine = "paced" and a profile, not engine = "vllm"' in failure.text
        ones, (pair,) = n.layout("2xTP1"), n.layout("1xTP2")
        await n.open(prebuild=[ones])
        odd = Instance(name="odd", gpus=(0, 1, 5), tp=3)
        failure = await n.fails(Prepare(instances=(odd,), strategy="rebuild"))
        assert failure.error == "Infeasible"
        assert "odd: there is no GPU 5, of 2 on this node" in failure.text.splitlines()
        assert "does not divide the 40 attention heads" in failure.text
        for asked in (Prepare, Build):
            failure = await n.fails(asked(instances=(pair,), strategy="pool"))
            assert failure.error == ("Infeasible" if asked is Prepare else "Refused")
            assert "no engine of n0:0-1 as 1xTP2 sleeps here" in failure.text
            assert "there is n0:0 as 1xTP1, n0:1 as 1xTP1" in failure.text
        await n.build([pair])
        failure = await n.fails(Build(instances=ones, strategy="rebuild"))
        assert failure.text == "there is n0:0-1 on these GPUs: tear it down first"
        missing = await n.fails(Submit(instance="n0:7", works=()))
        assert (missing.error, missing.text) == (
            "NoInstance", "no instance n0:7 is up on this node; there is n0:0-1",
        )  # fmt: skip
        await n.submit(pair, "a")
        failure = await n.fails(TearDown(instances=(pair.name,), strategy="rebuild"))
        assert failure.text == "n0:0-1 holds 1 requests: withdraw them"

    run(test)


def test_one_change_of_engines_at_a_time() -> None:
    async def test(n: Told) -> None:
        await n.open(gpus=1)
        (one,) = n.layout("1xTP1", 1)
        again = OpenGeneration(spec=SPEC, gpus=1, address="")
        assert (await n.fails(again)).error == "Busy"
        await n.build([one])
        asked = UpdateWeights(instances=(one.name,), version=1)
        updating = asyncio.create_task(n.say(asked))
        await n.clock.sleep_ns(1)
        busy = await n.fails(TearDown(instances=(one.name,), strategy="rebuild"))
        assert (busy.error, busy.text) == ("Busy", "update_weights is under way on this node")
        await n.submit(one, "a")  # it waits for the weights
        updated = await updating
        assert isinstance(updated, WeightsUpdated)
        assert n.now_ns == updated.spans[0].end_ns
        await n.finished("a")
        assert {output.version for output in n.outputs} == {1}

    run(test)


def test_what_died_is_told_until_it_is_built_upon() -> None:
    async def test(n: Told) -> None:
        await n.open()
        first, second = n.layout("2xTP1")
        await n.build([first, second])
        await n.submit(first, "a", tokens=5000)
        await n.watch()
        n.labour.die(first.name, "rank 0 was killed by signal 9")
        told = await n.watch()
        assert told.dead == {first.name: "rank 0 was killed by signal 9"}
        assert list(told.stats) == [second.name]
        failure = await n.fails(Withdraw(instances=(first.name,)))
        assert (failure.error, failure.text) == (
            "InstanceDead", f"{first.name}: rank 0 was killed by signal 9",
        )  # fmt: skip
        built = await n.build([first])
        assert "processes" in lasted_s(built.spans)
        assert (await n.watch()).dead == {}

    run(test)


def test_whoever_is_killed_while_it_is_built_leaves_the_others_unbuilt() -> None:
    async def test(n: Told) -> None:
        await n.open()
        ones = n.layout("2xTP1")
        building = asyncio.create_task(n.say(Build(instances=ones, strategy="rebuild")))
        await n.clock.sleep_ns(NS_PER_MS)
        await n.ask(TearDown(instances=(ones[0].name,), strategy="rebuild", force=True), Torn)
        failure = await building
        assert isinstance(failure, Failure)
        assert failure.error == "InstanceDead"
        spans = lasted_s((await n.build(n.layout("1xTP2"))).spans)
        assert "processes" in spans  # of the one that was killed

    run(test)


# -- requests ----------------------------------------------------------------------------------


def test_a_request_ends_when_the_profile_says() -> None:
    async def test(n: Told) -> None:
        await n.open(msgspec.structs.replace(SPEC, speed=2.0), gpus=1)
        (one,) = n.layout("1xTP1", 1)
        await n.build([one])
        begin_ns = n.now_ns
        await n.submit(one, "a", prompt=100, tokens=50)
        await n.finished("a")
        costs = costs_of(PROFILE, one.layout)
        lasts_ns = step_ns(costs, 0, 0, 100, 100 * 101 // 2)
        lasts_ns += sum(step_ns(costs, 1, 100 + i) for i in range(1, 50))
        last = n.outputs[-1]
        assert last.last_ns - begin_ns == pytest.approx(lasts_ns * 1.5 / 2, abs=50)
        assert n.now_ns == last.last_ns, "who watches is told at once"
        first = n.outputs[0]
        assert (first.start, first.count, first.first_ns) == (0, 1, first.last_ns)

    run(test, step_share=1.5)


def test_engines_of_a_slow_node_take_longer_for_each_step() -> None:
    async def test(fast: Told, slow: Told) -> None:
        nodes = slow.world.bench.nodes
        slowed = {**nodes, "n1": msgspec.structs.replace(nodes["n1"], speed=0.5)}
        slow.world.bench = msgspec.structs.replace(slow.world.bench, nodes=slowed)
        took_ns = []
        for node in (fast, slow):
            await node.open()
            (pair,) = node.layout("1xTP2")
            await node.build([pair])
            measure = MeasureSteps(
                instance=pair.name, batch=4, context_tokens=100, prefill_tokens=0, steps=8
            )
            took_ns.append(sum((await node.ask(measure, StepTimes)).times_ns))
        assert took_ns[1] == pytest.approx(2 * took_ns[0], rel=1e-6)

    run(test, nodes=2)


def test_what_leaves_has_told_all_of_its_output() -> None:
    async def test(n: Told) -> None:
        await n.open()
        (pair,) = n.layout("1xTP2")
        await n.build([pair], version=3)
        assert (await n.submit(pair, "a", "b", "c", tokens=20_000)).refused == {}
        refused = (await n.submit(pair, "huge", tokens=200_000)).refused
        assert refused == {"huge": "huge: 200010 tokens; the model takes 32768"}
        while len(n.positions("a")) < 50:
            await n.watch()
        one = await n.ask(Withdraw(instances=(pair.name,), ids=("b", "unknown")), Withdrawn)
        assert [request.id for request in one.left] == ["b"]
        rest = await n.ask(Withdraw(instances=(pair.name,), verb="export"), Withdrawn)
        assert [span.stage for span in rest.spans] == ["withdraw"]
        assert rest.sent_bytes == {}
        while n.upto < rest.upto:
            await n.watch(0)
        for request in (*one.left, *rest.left):
            assert n.positions(request.id) == list(range(request.produced_tokens))
        ends = {output.id: output.ended for output in n.outputs if output.ended}
        assert ends == {"a": "exported", "b": "aborted", "c": "exported"}
        assert {output.version for output in n.outputs} == {3}
        assert n.last is not None
        told = n.last.stats[pair.name]
        assert (told.running, told.kv_blocks_used) == (0, 0)
        assert told.generated_tokens == sum(len(n.positions(name)) for name in "abc")

    run(test)


def test_an_order_acts_at_the_end_of_the_step_under_way() -> None:
    async def test(n: Told) -> None:
        await n.open(gpus=1)
        (one,) = n.layout("1xTP1", 1)
        await n.build([one])
        await n.submit(one, "a", tokens=1000)
        await n.clock.sleep_ns(NS_PER_S + 1)
        asked_ns = n.now_ns
        left = await n.ask(Withdraw(instances=(one.name,)), Withdrawn)
        step = step_ns(costs_of(PROFILE, one.layout), 1, 10 + left.left[0].produced_tokens)
        assert 0 < n.now_ns - asked_ns <= step
        await n.watch(0)
        assert n.outputs[-1].last_ns == n.now_ns == left.spans[0].end_ns

    run(test)


def test_quiet_watches_tell_how_far_all_are_and_cost_no_more() -> None:
    async def test(n: Told) -> None:
        await n.open(gpus=1)
        (one,) = n.layout("1xTP1", 1)
        await n.build([one])
        await n.submit(one, *"abcd", tokens=2000)
        await n.clock.sleep_ns(NS_PER_S)
        await n.watch()  # the first tokens
        for _ in range(5):
            before, told = n.now_ns, await n.watch(NS_PER_S // 4)
            assert n.now_ns - before == NS_PER_S // 4
            assert sorted(output.id for output in told.outputs) == list("abcd")
            for output in told.outputs:
                assert before - 50 * NS_PER_MS < output.first_ns <= output.last_ns <= n.now_ns
        await n.submit(one, "short", tokens=2)
        told = await n.watch(NS_PER_S)
        assert [(o.id, o.count) for o in told.outputs] == [("short", 1)]
        told = await n.watch(NS_PER_S)
        assert [(o.id, o.ended) for o in told.outputs] == [("short", "finished")]

    run(test)


def test_events_are_told_once_and_in_order() -> None:
    async def test(n: Told) -> None:
        await n.open(gpus=1)
        (one,) = n.layout("1xTP1", 1)
        await n.build([one])
        assert list((await n.watch()).stats) == [one.name], "the build is news"
        assert (await n.watch(NS_PER_MS)).outputs == ()
        older = asyncio.create_task(n.say(Watch(after=0, wait_ns=60 * NS_PER_S)))
        await n.clock.sleep_ns(1)
        newer = asyncio.create_task(n.say(Watch(after=0, wait_ns=60 * NS_PER_S)))
        found = await older
        assert isinstance(found, Happened)
        assert found.outputs == ()
        await n.submit(one, "a")
        found = await newer
        assert isinstance(found, Happened)
        assert found.outputs[0].start == 0
        again = await n.watch()
        assert again.outputs[: len(found.outputs)] == found.outputs, "not forgotten yet"
        await n.finished("a")
        assert n.positions("a") == list(range(20))
        assert (await n.fails(Watch(after=0, wait_ns=0))).error == "Forgotten"
        assert (await n.fails(Watch(after=n.upto + 1, wait_ns=0))).error == "Forgotten"

    run(test)


def test_who_is_not_admitted_waits() -> None:
    async def test(n: Told) -> None:
        await n.open(gpus=1)
        (one,) = n.layout("1xTP1", 1)
        await n.build([one])
        await n.ask(Admission(instances=(one.name,), open=False), Done)
        await n.submit(one, "a")
        await n.clock.sleep_ns(NS_PER_S)
        assert (await n.watch(0)).stats[one.name].waiting == 1
        await n.ask(Admission(instances=(one.name,), open=True), Done)
        await n.finished("a")

    run(test)


# -- weights, timing and KV ----------------------------------------------------------------------


def test_weights_that_were_brought_give_the_tokens_after_them() -> None:
    async def test(n: Told) -> None:
        await n.open()
        ones = n.layout("2xTP1")
        built = await n.build(ones, version=1)
        held = [built.capacities[one.name].weights_bytes for one in ones]
        await n.submit(ones[0], "a", tokens=4000)
        await n.clock.sleep_ns(5 * NS_PER_S)
        names = tuple(one.name for one in ones)
        for path in ("/brought", "/elsewhere"):
            n.world.shared["weights", "n0" if path == "/brought" else "n1", path] = (2, 1000)
        wrong = UpdateWeights(instances=names, version=2, source="/elsewhere")
        failure = await n.fails(wrong)
        assert failure.error == "BadFile"
        assert failure.text == "/elsewhere: No such file or directory"
        asked = UpdateWeights(instances=names, version=2, source="/brought")
        updated = await n.ask(asked, WeightsUpdated)
        assert updated.moved_bytes == sum(held)
        (span,) = updated.spans  # of both, each at the end of its step
        assert span.end_ns == n.now_ns
        assert 0.5 + held[0] / 4e6 <= lasted_s([span])["weights"] < 0.55 + held[0] / 4e6
        await n.finished("a")
        versions = [output.version for output in n.outputs]
        assert sorted(set(versions)) == [1, 2]
        assert versions == sorted(versions)
        assert n.last is not None
        assert n.last.stats[ones[0].name].prefilled_tokens > 20  # its KV was computed anew
        older = await n.fails(UpdateWeights(instances=names, version=1))
        assert (older.error, older.text) == (
            "Refused", "weights 1 are older than 2, which are in use",
        )  # fmt: skip

    run(test)


def test_one_that_alone_has_not_the_weights_is_dead() -> None:
    async def test(n: Told) -> None:
        await n.open()
        first, second = n.layout("2xTP1")
        await n.build([first], version=5)
        await n.build([second], version=1)
        names = (first.name, second.name)
        failure = await n.fails(UpdateWeights(instances=names, version=3))
        assert failure.error == "InstanceDead"
        assert failure.text.startswith(f"{first.name}: its weights were not updated: weights 3")
        assert set((await n.watch()).dead) == {first.name}

    run(test)


def test_steps_are_timed_apart_from_requests() -> None:
    async def test(n: Told) -> None:
        await n.open(gpus=1)
        (one,) = n.layout("1xTP1", 1)
        await n.build([one])

        def asked(batch: int, context: int, prefill: int, steps: int) -> MeasureSteps:
            return MeasureSteps(
                instance=one.name, batch=batch, context_tokens=context, prefill_tokens=prefill,
                steps=steps,
            )  # fmt: skip

        costs, begin_ns = costs_of(PROFILE, one.layout), n.now_ns
        timed = (await n.ask(asked(8, 100, 0, 5), StepTimes)).times_ns
        assert list(timed) == [step_ns(costs, 8, 8 * (100 + i)) for i in range(5)]
        assert n.now_ns - begin_ns == sum(timed)
        timed = (await n.ask(asked(0, 0, 512, 3), StepTimes)).times_ns
        assert list(timed) == [step_ns(costs, 0, 0, 512, 512 * 513 // 2)] * 3
        failure = await n.fails(asked(0, 0, 4096, 1))
        assert failure.text == "4096 tokens are not prefilled in one step, which takes 2048"
        await n.submit(one, "a", tokens=500)
        assert (await n.fails(asked(1, 100, 0, 1))).text.startswith("n0:0 holds requests")
        assert (await n.watch()).stats[one.name].steps < 10

    run(test)


@pytest.mark.parametrize(("one", "other"), [("2xTP1", "1xTP2"), ("1xTP2", "2xTP1")])
def test_requests_go_on_elsewhere_from_sent_kv_without_losing_a_token(one: str, other: str) -> None:
    async def test(n: Told, m: Told) -> None:
        await n.open()
        await m.open()
        source, target = n.layout(one)[0], m.layout(other)[0]
        await n.build([source])
        built = await m.build([target])
        await n.submit(source, *"abc", tokens=3000)
        await n.clock.sleep_ns(10 * NS_PER_S)
        to = KvTarget(transfer="t", instance=target, peers=built.kv_peers[target.name])
        left = await n.ask(Withdraw(instances=(source.name,), verb="export", to=to), Withdrawn)
        of_token = PROFILE.shape.kv_bytes_per_token * SPEC.bytes_scale
        for request in left.left:
            expected = request.kv_tokens * of_token
            assert left.sent_bytes[request.id] == pytest.approx(expected, rel=0.01)
        total = sum(left.sent_bytes.values())
        assert lasted_s(left.spans) == {"kv_send": pytest.approx(total / 1e9)}  # the network's
        works = tuple(Work(carried=request, kv_transfer="t") for request in left.left)
        came = await m.ask(Submit(instance=target.name, works=works), Submitted)
        assert came == Submitted(refused={}, with_kv=("a", "b", "c"))
        begin_ns = m.now_ns
        first = (await m.watch()).outputs or (await m.watch()).outputs
        assert {output.id: output.cached_tokens for output in first} == {
            request.id: request.kv_tokens for request in left.left
        }
        batch = sum(request.prompt_tokens + request.produced_tokens for request in left.left)
        assert first[0].first_ns - begin_ns == step_ns(costs_of(PROFILE, target.layout), 3, batch)
        await n.watch(0)
        await m.finished(*"abc")
        for name in "abc":
            assert n.positions(name) + m.positions(name) == list(range(3000))
        assert m.last is not None
        assert m.last.stats[target.name].prefilled_tokens == 0
        again = await m.ask(Submit(instance=target.name, works=works[:1]), Submitted)
        assert again.with_kv == (), "KV is claimed once"

    run(test, nodes=2)


def test_kv_that_cannot_be_sent_or_came_too_late_is_computed_anew() -> None:
    async def test(n: Told) -> None:
        await n.open()
        source, target = n.layout("2xTP1")
        built = await n.build([source, target])
        await n.submit(source, "a", "b", tokens=3000)
        await n.clock.sleep_ns(NS_PER_S)

        async def moved(name: str, peer: str) -> Withdrawn:
            to = KvTarget(transfer=name, instance=target, peers=(peer,))
            asked = Withdraw(instances=(source.name,), ids=(name,), verb="export", to=to)
            return await n.ask(asked, Withdrawn)

        assert (await moved("a", "127.0.0.1:1")).sent_bytes == {}
        left = await moved("b", built.kv_peers[target.name][0])
        assert left.sent_bytes["b"] > 0
        await n.clock.sleep_ns(61 * NS_PER_S)
        work = Work(carried=left.left[0], kv_transfer="b")
        came = await n.ask(Submit(instance=target.name, works=(work,)), Submitted)
        assert came == Submitted(refused={})
        await n.finished("b")

    run(test)
