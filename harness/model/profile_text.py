"""A latency profile as the TOML text that `harness.model.load.load_profile` reads. Pure.

It writes what this one schema has and nothing else: figures and sources one a line, grids one row a
line, and keys only where they differ from their default (but for TP, which readers look for).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from harness.model.profile import Figure, Profile, Source


def profile_text(profile: Profile, heading: Sequence[str] = ()) -> str:
    """Return the file's text, opened by `heading` as comments."""
    lines = [f"# {_plain(line)}".rstrip() for line in heading]
    lines += ["", f"model = {_value(profile.model)}"]
    lines += ["", "[sources]", *_keys(profile.sources)]
    for name in ("shape", "gpu", "roofline"):
        part = getattr(profile, name)
        if part is not None:
            lines += ["", f"[{name}]", *_keys(_fields(part)), *_groups(name, part)]
    for name in ("coefficients", "tables"):
        for measured in getattr(profile, name):
            lines += ["", f"[[{name}]]", *_keys(_fields(measured))]
    return "\n".join(lines).lstrip("\n") + "\n"


def _fields(part: msgspec.Struct) -> dict[str, Any]:
    """Return the fields that say something, degrees first as a reader looks for them."""
    found = {
        field.name: value
        for field in msgspec.structs.fields(part)
        if (value := getattr(part, field.name)) != field.default or field.name == "tp"
        if not _is_group(value)
    }
    degrees = {key: found.pop(key) for key in ("tp", "pp", "ep", "dp") if key in found}
    return degrees | found


def _is_group(value: object) -> bool:
    return isinstance(value, dict)


def _groups(name: str, part: msgspec.Struct) -> Iterator[str]:
    """Yield the tables inside a table: figures by size of the group."""
    for key in part.__struct_fields__:
        value = getattr(part, key)
        if _is_group(value) and value:
            yield from ("", f"[{name}.{key}]", *_keys(value))


def _keys(table: dict[str, Any]) -> Iterator[str]:
    for key, value in table.items():
        yield f"{_key(key)} = {_value(value)}"


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("-", "a").replace("_", "a").isalnum()
    return key if bare else _text(key)


def _value(value: object) -> str:
    match value:
        case Source() | Figure():
            return f"{{ {', '.join(_keys(msgspec.structs.asdict(value)))} }}"
        case tuple():
            return _array(value)
        case str():
            return _text(value)
        case bool():
            return str(value).lower()
        case float() if value.is_integer():
            return str(int(value))
    return repr(value)


def _array(values: tuple[Any, ...]) -> str:
    items = [_value(value) for value in values]
    if values and isinstance(values[0], tuple):
        return "[\n" + "".join(f"  {item},\n" for item in items) + "]"
    return f"[{', '.join(items)}]"


def _text(text: str) -> str:
    """Return a basic string, its escapes those of JSON."""
    return json.dumps(_plain(text), ensure_ascii=False)


def _plain(text: str) -> str:
    """Return the text with spaces instead of characters that TOML, or a profile, refuses."""
    return "".join(character if character.isprintable() else " " for character in text)
