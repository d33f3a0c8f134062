"""Pacing of computing, contents of weights, their folder, and what a node answers of its ranks."""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from msgspec.structs import replace

from agents.training.contents import words
from agents.training.crew import publishing, trained
from agents.training.folder import Folder
from agents.training.orders import Learned, Published
from agents.training.pace import Pace
from agents.training.rank import measured
from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import UsageError
from harness.model.degrees import Degrees, parse_degrees
from harness.model.load import load_profile
from harness.model.training.axes import Place, misfit, place_of
from harness.model.training.shards import layer_words, shard_of
from harness.model.training.trainer import TrainerSpec, flops_per_s, misfits

PROFILES = Path(__file__).parents[2] / "scenarios" / "profiles"
PROFILE = load_profile(PROFILES / "qwen2.5-14b-h800.toml")
SHAPE = PROFILE.shape


class Clock:
    """A clock that stands between waits, and wakes late from each."""

    def __init__(self, late_ns: int = 0) -> None:
        self.now_ns, self.late_ns = 5 * NS_PER_S, late_ns

    def sleep_until(self, until_ns: int) -> None:
        if until_ns > self.now_ns:
            self.now_ns = until_ns + self.late_ns

    def pace(self) -> Pace:
        return Pace(lambda: self.now_ns, self.sleep_until)


# -- pace ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late_ns", [0, 80_000, 3 * NS_PER_MS])
def test_what_is_late_is_caught_up(late_ns: int) -> None:
    clock = Clock(late_ns)
    began_ns, pace = clock.now_ns, clock.pace()
    for _ in range(200):
        pace.compute(NS_PER_MS)
    assert 0 <= clock.now_ns - began_ns - 200 * NS_PER_MS <= late_ns
    assert pace.computed_ns == clock.now_ns - began_ns
    assert pace.late_ns == clock.now_ns - began_ns - 200 * NS_PER_MS


def test_work_is_done_within_the_time_of_computing() -> None:
    clock = Clock()
    began_ns, pace = clock.now_ns, clock.pace()

    def work() -> None:
        clock.now_ns += 30 * NS_PER_MS

    pace.compute(0, work)
    for _ in range(10):
        pace.compute(10 * NS_PER_MS)
    assert clock.now_ns - began_ns == 100 * NS_PER_MS


def test_a_device_that_stood_does_not_catch_up() -> None:
    clock = Clock(late_ns=2 * NS_PER_S)
    pace = clock.pace()
    pace.compute(NS_PER_MS)
    assert pace.late_ns == 0


def test_the_peak_of_the_profile_is_needed() -> None:
    spec = TrainerSpec(mode="paced", degrees=Degrees(), flops_share=0.5, speed=2.0)
    assert flops_per_s(spec, PROFILE) == pytest.approx(989.4e12)
    unknown = replace(PROFILE, gpu=replace(PROFILE.gpu, peak_tflop_per_s=None))
    with pytest.raises(UsageError, match="peak_tflop_per_s"):
        flops_per_s(spec, unknown)


def test_a_model_that_cannot_be_split_so_is_refused() -> None:
    assert misfits(SHAPE, parse_degrees("TP3")) == ["TP 3 does not divide the 40 heads"]
    assert misfits(SHAPE, parse_degrees("DP2EP2")) == ["EP 2 does not divide the 0 experts"]
    assert misfits(SHAPE, parse_degrees("PP64")) == ["PP 64 is more than the 48 layers"]
    assert misfits(SHAPE, parse_degrees("DP2TP8PP4")) == []


# -- weights ---------------------------------------------------------------------------------------


def test_contents_follow_from_seed_version_and_place_alone() -> None:
    whole = words(7, 3, range(1000))
    assert (words(7, 3, range(200, 300)) == whole[200:300]).all()
    assert (words(7, 3, range(100_000))[-900:] == words(7, 3, range(99_100, 100_000))).all()
    assert len(np.unique(whole)) == 1000
    for other in (words(7, 4, range(1000)), words(8, 3, range(1000))):
        assert not (other == whole).any()
    assert crc32(whole.tobytes()) == crc32(words(7, 3, range(1000)).tobytes())


@pytest.mark.parametrize("text", ["DP1", "DP2TP2", "DP2TP2PP2", "DP3PP5", "DP4EP2"])
def test_every_word_has_one_owner(text: str) -> None:
    degrees = parse_degrees(text)
    layers = layer_words(SHAPE, 1e-4)
    assert len(layers) == SHAPE.layers
    assert 8 * layers[-1].stop == pytest.approx(SHAPE.parameter_bytes * 1e-4, abs=8)
    owned = [
        word
        for rank in range(degrees.ranks)
        for part in shard_of(place_of(rank, degrees), degrees, layers)
        for word in part
    ]
    assert sorted(owned) == list(range(layers[-1].stop))


def test_even_a_tiny_scale_leaves_something_of_each_layer() -> None:
    assert {len(part) for part in layer_words(SHAPE, 1e-12)} == {1}
    assert shard_of(Place(0, 0, 0, 0), Degrees(), layer_words(SHAPE, 1e-12))[0] == range(1)


def test_the_last_two_versions_are_kept(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for version in (1, 2, 3, 10):
        folder.place(version).write_bytes(b"w")
        folder.forget_older(version)
    place = folder.place(10).parent
    names = sorted(path.name for path in place.glob("*.safetensors"))
    assert names == ["10.safetensors", "3.safetensors"]
    folder.remove()
    assert list(tmp_path.iterdir()) == []
    folder.remove()


def test_a_file_is_measured_as_it_lies_there(tmp_path: Path) -> None:
    data = bytes(range(256)) * (5 << 12)
    (tmp_path / "f").write_bytes(data)
    assert measured(tmp_path / "f") == (len(data), crc32(data))


# -- answers ---------------------------------------------------------------------------------------


def learned(dp: int, begin_ns: int, compute_ns: int, tokens: int) -> Learned:
    return Learned(
        dp=dp,
        tokens=tokens,
        micro_batches=2,
        begin_ns=begin_ns,
        end_ns=begin_ns + 100,
        compute_ns=compute_ns,
        communicate_ns=90 - compute_ns,
        figures={"loss": float(begin_ns)},
    )


def test_tokens_of_a_shard_count_once_and_the_slowest_computing_shows() -> None:
    ranks = [learned(0, 10, 40, 500), learned(0, 12, 60, 500), learned(1, 11, 50, 700)]
    answer = trained(4, ranks, leads=True)
    assert (answer.version, answer.tokens, answer.micro_batches) == (4, 1200, 2)
    assert answer.figures == {"loss": 10.0}
    spans = {span.stage: (span.begin_ns, span.end_ns) for span in answer.spans}
    assert spans == {"compute": (12, 72), "communicate": (82, 112)}
    assert trained(4, ranks, leads=False).figures == {}


def test_gathering_ends_when_the_last_has_given() -> None:
    def part(begin_ns: int, end_ns: int) -> Published:
        return Published(begin_ns=begin_ns, end_ns=end_ns, bytes=0, checksum=0)

    writer, givers = part(5, 90), [part(6, 40), part(4, 30)]
    spans = publishing([writer, *givers], writer)
    assert [(s.stage, s.begin_ns, s.end_ns) for s in spans] == [
        ("gather", 4, 40),
        ("write", 40, 90),
    ]
    assert [span.stage for span in publishing(givers, None)] == ["gather"]
    assert [span.stage for span in publishing([writer], writer)] == ["write"]


def test_ranks_that_do_not_fit_the_degrees_are_refused() -> None:
    degrees = parse_degrees("DP2TP2")
    assert misfit((0, 1), 4, degrees) == ""
    assert misfit((0, 1), 2, degrees) == "DP2TP2 is 4 ranks, not world_size 2"
    assert misfit((3, 4), 4, degrees) == "ranks [4] are none of 4"
    assert "no rank" in misfit((), 4, degrees)
