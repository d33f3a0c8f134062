"""The file that a simulated bench takes its times from."""

from pathlib import Path

import pytest

from harness.errors import BadFile
from harness.model.load import load_calibration
from harness.model.simulation import beyond, figures

SHIPPED = sorted((Path(__file__).parents[2] / "scenarios" / "calibrations").glob("*.toml"))


def changed(tmp_path: Path, old: str, new: str) -> Path:
    text = SHIPPED[-1].read_text()
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new, 1))
    return path


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_are_sound_and_every_figure_has_a_source(path: Path) -> None:
    found = load_calibration(path)
    assert all(figure.source or found.runs for _, figure in figures(found))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("link_share = { value = 0.92", "link_share = { value = 0.0", "network.link_share.value"),
        ("value = 200.0", "value = -1.0", "control.message_us.value = -1: expected 0 or more"),
        ('source = "chosen"', 'source = ""', "source: say where"),
        ("[control]", "[contol]", "contol"),
        ('backend = "nccl"', 'backend = "gloo"', "collectives.gpu: only NCCL differs by GPU"),
        (
            'name = "h800"',
            'name = "h800"\nfitted = { rank = { low = 1, high = 2 } }',
            "fitted.rank",
        ),
    ],
)
def test_what_is_wrong_is_named_by_its_key(tmp_path: Path, old: str, new: str, told: str) -> None:
    with pytest.raises(BadFile, match=told):
        load_calibration(changed(tmp_path, old, new))


def test_a_file_that_is_not_there_or_is_another_says_so(tmp_path: Path) -> None:
    with pytest.raises(BadFile):
        load_calibration(tmp_path / "none.toml")
    path = tmp_path / "scenario.toml"
    path.write_text('question = "?"\nsteps = []\n')
    with pytest.raises(BadFile, match="scenario"):
        load_calibration(path)


def test_loads_beyond_what_was_fitted_are_told(tmp_path: Path) -> None:
    path = changed(
        tmp_path, 'name = "h800"', 'name = "h800"\nfitted = { nodes = { low = 2, high = 8 } }'
    )
    found = load_calibration(path)
    assert beyond(found, [("nodes", 8), ("ranks", 1e6)]) == []
    assert beyond(found, [("nodes", 256)]) == ["nodes 256 (fitted on 2 to 8)"]
