"""A trace from its file or files, whatever form they have. The one module here that opens files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from harness.errors import BadFile, UsageError
from harness.rlsim.traces import chakra, json_trace
from harness.rlsim.traces.model import Ranks, Trace

OURS = b'"rlsim-trace/'
HEAD_BYTES = 4096
"""Where our schema is looked for."""
MISSING_MAX = 8
FORMS = (
    "a trace is one JSON file of schema rlsim-trace/1, or Chakra's, a file a rank:"
    " NAME.0.et, NAME.1.et, ..."
)

_OF_RANK = re.compile(r"(.+)\.(\d{1,7})\.(et|json)", re.ASCII)


def read(path: Path, groups: Path | None = None) -> Trace:
    """Read a trace: our JSON; or all files of a Chakra trace, given by one of them or its prefix.

    `groups`: ranks of Chakra's process groups. Raises `BadFile` with what is wrong with its form;
    the rest is `checks`.
    """
    if path.is_file():
        found = _OF_RANK.fullmatch(path.name)
        if path.suffix == ".json" and (OURS in _bytes(path)[:HEAD_BYTES] or not found):
            if groups is not None:
                raise UsageError("--groups: a JSON trace has its groups itself")
            return json_trace.parse(_bytes(path), str(path))
        if not found:
            raise BadFile(str(path), [f"not a name that is expected: {FORMS}"])
        return _chakra(path.parent, found[1], found[3], groups)
    for ending in ("et", "json"):
        if path.parent.is_dir() and _files(path.parent, path.name, ending):
            return _chakra(path.parent, path.name, ending, groups)
    raise BadFile(str(path), [f"no such trace: {FORMS}"])


def _files(folder: Path, prefix: str, ending: str) -> dict[int, Path]:
    """Return the files of a trace by rank, rising."""
    found = {}
    for path in folder.iterdir():
        match = _OF_RANK.fullmatch(path.name)
        if match and (match[1], match[3]) == (prefix, ending):
            found[int(match[2])] = path
    return dict(sorted(found.items()))


def _chakra(folder: Path, prefix: str, ending: str, groups: Path | None) -> Trace:
    where = str(folder / f"{prefix}.*.{ending}")
    files = _files(folder, prefix, ending)
    if missing := sorted({*range(max(files) + 1)} - {*files}):
        more = f" and {len(missing) - MISSING_MAX} more" if len(missing) > MISSING_MAX else ""
        named = ", ".join(f"{prefix}.{rank}.{ending}" for rank in missing[:MISSING_MAX])
        raise BadFile(where, [f"no file {named}{more}, though ranks go up to {max(files)}"])
    lists: Mapping[str, Ranks] = {}
    if groups is not None:
        lists = chakra.parse_groups(_bytes(groups), str(groups))
    read = [(rank, path.name, _bytes(path)) for rank, path in files.items()]
    return chakra.trace_of(where, read, lists)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise BadFile(str(path), ["no such file"]) from error
    except OSError as error:
        raise BadFile(str(path), [f"cannot be read: {error.strerror}"]) from error
