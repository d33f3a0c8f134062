"""Numbers and reports come from the journal alone, and say what they rest on."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import BadFile, InfrastructureError
from harness.model import streams
from harness.model.documents import Document, Event, RunSummary, Stop
from harness.record.figures import figure, size, with_bound
from harness.record.journal import read_journal
from harness.record.report import print_report, text_report
from harness.record.samples import metrics_of, percentile
from harness.record.store import RunFolder
from harness.record.summary import read_run, summarise, write_summary
from harness.run import stages as run_stages

SMALL = Path(__file__).parents[1] / "data/small-run"


def documents() -> list[Document]:
    return list(read_journal(SMALL / "journal.jsonl"))


def events(stream: str) -> list[Event]:
    return [d for d in documents() if isinstance(d, Event) and d.stream == stream]


def test_a_journal_gives_its_summary_and_report() -> None:
    summary = read_run(RunFolder(SMALL))
    expected = json.loads((SMALL / "run.json").read_bytes())
    assert json.loads(msgspec.json.encode(summary)) == expected
    assert msgspec.json.decode((SMALL / "run.json").read_bytes(), type=RunSummary) == summary
    assert text_report(summary) + "\n" == (SMALL / "report.txt").read_text()


def test_a_summary_that_does_not_fit_on_the_disk_leaves_the_one_before(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    summary = read_run(RunFolder(SMALL))
    write_summary(folder, summary)
    before = folder.summary.read_bytes()
    (tmp_path / "run.tmp").symlink_to("/dev/full")
    with pytest.raises(InfrastructureError, match=r"run\.json: cannot be written: No space"):
        write_summary(folder, summary)
    assert folder.summary.read_bytes() == before


def test_bandwidths_are_those_of_nccl_tests() -> None:
    row = next(e.data for e in events("collective") if e.data["op"] == "all_reduce")
    mean_ns = np.mean(row["times_ns"])  # of ranks and iterations
    found = summarise(documents()).metrics
    label = f"[path={row['path']},size={row['size_bytes']},ranks=2]"
    bus = found[f"collective.all_reduce.busbw_gb_per_s{label}"]
    assert bus.value == pytest.approx(row["size_bytes"] / mean_ns * 2 * (2 - 1) / 2)
    assert bus.n == 5
    assert bus.min <= bus.p50 <= bus.max
    slowest = found[f"collective.all_reduce.time_max_us{label}"]
    assert slowest.value == pytest.approx(np.max(row["times_ns"], axis=0).mean() / 1000)


def test_repeats_of_a_row_are_pooled_and_groups_are_not() -> None:
    row = events("collective")[0]
    slower = msgspec.structs.replace(
        row, data=row.data | {"times_ns": [[3 * t for t in rank] for rank in row.data["times_ns"]]}
    )
    pair = msgspec.structs.replace(row, data=row.data | {"group": "0-1", "wrong": 3})
    found = metrics_of([row, slower, pair])
    base = "collective.all_reduce.algbw_gb_per_s[path=electrical,size=1048576,ranks=2"
    mean_ns = np.mean([row.data["times_ns"], slower.data["times_ns"]])
    assert found[f"{base}]"].value == pytest.approx(row.data["size_bytes"] / mean_ns)
    assert found[f"{base}]"].n == 10
    assert found[f"{base},group=0-1]"].n == 5
    assert found["collective.wrong"].value == 3


def test_what_was_not_measured_is_no_metric() -> None:
    row = events("collective")[0]
    unverified = msgspec.structs.replace(row, data=row.data | {"wrong": None})
    change = events("reconfigure")[0]
    dark = msgspec.structs.replace(
        change, data=change.data | {"dark_ms": None, "dark_plus_minus_ms": None}
    )
    found = metrics_of([unverified, dark])
    assert "collective.wrong" not in found
    assert "reconfigure.dark_ms" not in found
    assert "reconfigure.cost_ms[step=3]" in found


def test_stages_are_counted_from_the_last_stamped_one() -> None:
    change = events("reconfigure")[0]
    stamps = dict.fromkeys(streams.STAGES) | {
        "intent": 1_000_000,
        "quiesced": 4_000_000,
        "command_sent": 3_990_000,  # from another node: early by less than the clock bound
        "steady": 9_000_000,
    }
    found = metrics_of([msgspec.structs.replace(change, data=change.data | {"stages": stamps})])
    took = {
        name.split(".")[2]: metric.value
        for name, metric in found.items()
        if name.startswith("reconfigure.stage.") and "[" not in name
    }
    assert took == {"quiesced_ms": 3.0, "command_sent_ms": 0.0, "steady_ms": 5.0}
    assert run_stages.STAGES == streams.STAGES


def test_a_journal_cut_short_says_so() -> None:
    cut = documents()[:-1]
    summary = summarise(cut, {"pid": 1, "start_ticks": 2})
    assert (summary.status, summary.exit_code, summary.stopped) == ("unfinished", None, None)
    assert summary.coordinator == {"pid": 1, "start_ticks": 2}
    assert "unfinished: the journal has no stop document" in text_report(summary)


def test_events_that_are_missing_are_counted(tmp_path: Path) -> None:
    lines = (SMALL / "journal.jsonl").read_bytes().splitlines(keepends=True)
    lost = [i for i, line in enumerate(lines) if b'"stream":"collective","seq"' in line][:2]
    lines[lost[0]] = lines[lost[0]][:50] + b"\n"
    del lines[lost[1]]
    (tmp_path / "journal.jsonl").write_bytes(b"".join(lines))
    notes = "\n".join(read_run(RunFolder(tmp_path)).notes)
    assert "1 line was cut short and left out" in notes
    assert "2 of 8 events of collective are missing" in notes


def test_an_empty_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").touch()
    with pytest.raises(BadFile, match="no start document"):
        read_run(RunFolder(tmp_path))


def test_a_switch_that_was_not_restored_shows_its_difference() -> None:
    (restore,) = events("restore")
    failed = msgspec.structs.replace(
        restore, data=restore.data | {"outcome": "failed", "difference": "make 1->18"}
    )
    summary = summarise([*documents(), failed])
    assert summary.restored == {"agg0": "make 1->18"}
    assert "agg0    make 1->18" in text_report(summary)


def test_warnings_come_before_the_numbers() -> None:
    noted = Event(
        stream="note", seq=1, t_ns=1, data={"level": "warning", "who": "n1", "text": "rank 3 died"}
    )
    quiet = msgspec.structs.replace(noted, data=noted.data | {"level": "info", "text": "fine"})
    summary = summarise([*documents(), noted, noted, quiet])
    assert summary.notes[-1] == "n1: rank 3 died"
    assert text_report(summary).index("n1: rank 3 died") < text_report(summary).index("Collectives")


def test_where_the_machine_was_short_of_cpu_that_comes_before_the_numbers_too() -> None:
    row = {"step": 3, "policy": "", "duration_s": 2.0, "cpu_waited_pct": 61.0}
    summary = summarise([*documents(), Event(stream="pressure", seq=1, t_ns=1, data=row)])
    assert summary.exit_code == 0
    assert summary.metrics["bench.cpu_waited_pct[step=3]"].value == 61.0
    report = text_report(summary)
    warned = report.index("note: a task waited for a CPU in 61 % of step 3: times there may be")
    told = report.index("time in which a task waited for a CPU: step 3 61 %")
    assert warned < report.index("Bench ") < told < report.index("Collectives")


class Terminal(io.StringIO):
    """Eighty columns wide, as terminals without a size are."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_the_same_numbers() -> None:
    summary = read_run(RunFolder(SMALL))
    terminal, plain = Terminal(), io.StringIO()
    print_report(summary, terminal, Path("runs/x"))
    print_report(summary, plain, Path("runs/x"))
    assert plain.getvalue() == text_report(summary, Path("runs/x")) + "\n"
    for text in ("emulated on one machine", "26 ±1", "0.01728", "[path=ring", "Run folder: runs/x"):
        assert text in terminal.getvalue()
        assert text in plain.getvalue()


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=30), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    expected = float(np.percentile(values, percent))
    assert percentile(sorted(values), percent) == pytest.approx(expected, rel=1e-9, abs=1e-6)


@pytest.mark.parametrize(
    ("value", "bound", "text"),
    [
        (25.3174, 0.4, "25.3 ±0.4"),
        (25.3174, 0.31, "25.3 ±0.4"),
        (25.3174, 0.96, "25 ±1"),
        (1234.5, 31.0, "1230 ±40"),
        (0.2, 0.4, "below ±0.4"),
        (25.3174, None, "25.32"),
        (0.0012345, None, "0.001234"),
        (0.0, None, "0"),
        (None, 1.0, "-"),
    ],
)
def test_no_more_digits_than_the_bound_allows(
    value: float | None, bound: float | None, text: str
) -> None:
    assert with_bound(value, bound) == text


def test_figures_of_counts_and_sizes() -> None:
    assert figure(0) == "0"
    assert figure(float("nan")) == "-"
    assert size(4 * 2**20) == "4 MiB"
    assert size(960) == "960 B"


def test_a_stop_document_is_the_last_word() -> None:
    first = documents()[-1]
    assert isinstance(first, Stop)
    second = msgspec.structs.replace(first, status="interrupted", exit_code=4, reason="recovered")
    assert summarise([*documents(), second]).status == "interrupted"
