"""Compare a parsed TOML table with a schema and list *every* problem, each with its key path.

msgspec stops at the first problem of a file; a person wants all of them at once. The schema is
still msgspec's (the structs themselves, through `msgspec.inspect`): this module only walks it.
Values are never quoted in a message, save where a fixed set of words is expected: a file may hold
a secret in the wrong place. Pure.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
import msgspec.inspect as mi

T = TypeVar("T")

INTEGER_MAX = 2**63 - 1
DURATIONS_MAX = {"s": 1e9, "ms": 1e12}
"""By the unit that a duration's key ends with; beyond it, nanoseconds would not fit 64 bits."""

_BARE = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
_DURATION = re.compile(r"(?<!_per)_(m?s)(\[\d+\])*$", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_SECRET = re.compile(r"(?i)^(pass(word|wd|phrase)?|secret|token|api_?key)$")
_WORDS = {
    mi.StrType: "text in quotes",
    mi.IntType: "a whole number",
    mi.FloatType: "a number",
    mi.BoolType: "true or false",
}
_FOUND = (
    (bool, "true or false"),  # before int, which it is too
    (int, "a whole number"),
    (float, "a number with a decimal point"),
    (str, "text"),
    (dict, "a table"),
    (list, "a list"),
)


def examine(table: dict[str, Any], struct: type[T]) -> tuple[T | None, list[str]]:
    """Return the value and all problems of the table; the value is None where none can be built.

    A misspelt key is a problem, and is read as the key it most resembles, so that what depends on
    it can still be checked and one slip gives one message.
    """
    walk = _Walk()
    mended = walk.value(table, mi.type_info(struct), "")
    if walk.unreadable:
        return None, walk.problems
    return msgspec.convert(mended, struct), walk.problems


def dotted(path: str, key: str) -> str:
    """Append `key` to a key path as TOML writes it, quoted where it must be."""
    shown = key if _BARE.fullmatch(key) else json.dumps(key, ensure_ascii=False)
    return f"{path}.{shown}" if path else shown


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"``, or all that is known where nothing is near."""
    names = sorted(known)
    if near := difflib.get_close_matches(word, names, n=1):
        return f"; did you mean {near[0]!r}?"
    if not names:
        return "; there is none"
    shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    return f"; there is {shown}" if len(names) == 1 else f"; there are {shown}"


class _Walk:
    """One walk over a table. `unreadable` once a value is missing or has the wrong type."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.unreadable = False

    def value(self, found: object, kind: mi.Type, path: str) -> object:
        """Examine any value; return it with misspelt keys mended."""
        if isinstance(kind, mi.StructType):
            return self.struct(found, kind, path)
        if isinstance(kind, mi.UnionType) and isinstance(kind.types[0], mi.StructType):
            kinds = [t for t in kind.types if isinstance(t, mi.StructType)]
            if kinds[0].tag_field is None:  # a table that may be left out
                return self.struct(found, kinds[0], path)
            return self.tagged(found, kinds, path)
        if isinstance(kind, mi.DictType):
            return self.table(found, kind, path)
        if isinstance(kind, mi.VarTupleType):
            return self.items(found, kind, path)
        self.leaf(found, kind, path)
        return found

    def struct(self, found: object, kind: mi.Type, path: str) -> object:
        """Examine a table with fixed keys."""
        assert isinstance(kind, mi.StructType)
        if not isinstance(found, dict):
            self.wrong(path, f"expected a table, found {_word(found)}")
            return found
        fields = {field.encode_name: field for field in kind.fields}
        keys = self.keys(found, fields, kind.tag_field, path)
        mended: dict[str, object] = {
            name: self.value(found[key], fields[name].type, dotted(path, key))
            for name, key in keys.items()
        }
        for name, field in fields.items():
            if field.required and name not in mended:
                self.wrong(dotted(path, name), f"missing; expected {_expected(field.type)}")
        if kind.tag_field is not None:
            mended[kind.tag_field] = kind.tag
        return mended

    def keys(
        self,
        found: dict[str, object],
        fields: dict[str, mi.Field],
        tag_field: str | None,
        path: str,
    ) -> dict[str, str]:
        """Return field name -> key in the file; report the keys that no field has."""
        keys = {key: key for key in found if key in fields}
        for key in found:
            if key in fields or key == tag_field:
                continue
            where = dotted(path, key)
            if _SECRET.match(key):
                self.problems.append(
                    f"{where}: a secret does not belong in this file; name an environment variable "
                    "(password_env) or a file with mode 0600 (password_file)"
                )
                continue
            self.problems.append(f"{where}: unknown key{did_you_mean(key, fields)}")
            near = difflib.get_close_matches(key, sorted(fields), n=1)
            if near and near[0] not in found:
                keys.setdefault(near[0], key)
        return keys

    def tagged(self, found: object, kinds: list[mi.StructType], path: str) -> object:
        """Examine a table whose kind is named by one of its keys."""
        tag_field = kinds[0].tag_field or ""
        by_tag = {str(kind.tag): kind for kind in kinds}
        words = ", ".join(f'"{tag}"' for tag in sorted(by_tag))
        if not isinstance(found, dict):
            self.wrong(path, f"expected a table, found {_word(found)}")
        elif tag_field not in found:
            self.wrong(dotted(path, tag_field), f"missing; expected one of {words}")
        elif not isinstance(tag := found[tag_field], str) or tag not in by_tag:
            self.wrong(dotted(path, tag_field), _not_one_of(tag, by_tag))
        else:
            return self.struct(found, by_tag[tag], path)
        return found

    def table(self, found: object, kind: mi.DictType, path: str) -> object:
        """Examine a table whose keys are names."""
        if not isinstance(found, dict):
            self.wrong(path, f"expected a table, found {_word(found)}")
            return found
        return {
            key: self.value(item, kind.value_type, dotted(path, key)) for key, item in found.items()
        }

    def items(self, found: object, kind: mi.VarTupleType, path: str) -> object:
        """Examine a list."""
        if not isinstance(found, list):
            self.wrong(path, f"expected {_expected(kind)}, found {_word(found)}")
            return found
        return [self.value(item, kind.item_type, f"{path}[{i}]") for i, item in enumerate(found)]

    def leaf(self, found: object, kind: mi.Type, path: str) -> None:
        """Examine text, a number, a truth value, or a word of a fixed set."""
        if isinstance(kind, mi.LiteralType):
            if not isinstance(found, str) or found not in kind.values:
                self.wrong(path, _not_one_of(found, [str(word) for word in kind.values]))
        elif isinstance(kind, mi.UnionType):
            kinds = _alternatives(kind)
            fitting = kinds if len(kinds) == 1 else [one for one in kinds if _fits(found, one)]
            if fitting:
                self.leaf(found, fitting[0], path)
            else:
                self.wrong(path, f"expected {_expected(kind)}, found {_word(found)}")
        elif not _fits(found, kind):
            self.wrong(path, f"expected {_expected(kind)}, found {_word(found)}")
        elif isinstance(found, str) and _CONTROL.search(found):
            self.wrong(path, "holds a control character")
        elif isinstance(found, int) and abs(found) > INTEGER_MAX:
            self.wrong(path, "the number does not fit 64 bits")
        elif isinstance(found, float) and not math.isfinite(found):
            self.wrong(path, "expected a finite number")
        elif isinstance(found, int | float) and (most := _longest(path)) and found > most:
            self.wrong(path, f"expected {most:g} at most, which is more than 30 years")

    def wrong(self, path: str, text: str) -> None:
        """Report a problem that leaves no value to go on with."""
        self.problems.append(f"{path}: {text}")
        self.unreadable = True


def _longest(path: str) -> float | None:
    """Return the most that a duration's key may hold; None for another key."""
    unit = _DURATION.search(path)
    return DURATIONS_MAX[unit[1]] if unit else None


def _fits(found: object, kind: mi.Type) -> bool:
    if isinstance(kind, mi.StrType):
        return isinstance(found, str)
    if isinstance(kind, mi.BoolType):
        return isinstance(found, bool)
    if isinstance(kind, mi.IntType):
        return isinstance(found, int) and not isinstance(found, bool)
    if isinstance(kind, mi.FloatType):
        return isinstance(found, int | float) and not isinstance(found, bool)
    raise NotImplementedError(f"a schema with {kind}")


def _alternatives(kind: mi.UnionType) -> list[mi.Type]:
    """Return what a value may be, if it is there at all."""
    return [one for one in kind.types if not isinstance(one, mi.NoneType)]


def _expected(kind: mi.Type) -> str:
    if isinstance(kind, mi.VarTupleType):
        return "a list"
    if isinstance(kind, mi.LiteralType):
        return "one of " + ", ".join(f'"{word}"' for word in kind.values)
    if isinstance(kind, mi.UnionType):
        return " or ".join(map(_expected, _alternatives(kind)))
    return _WORDS.get(type(kind), "a table")


def _not_one_of(found: object, words: Iterable[str]) -> str:
    known = sorted(words)
    right = ", ".join(f'"{word}"' for word in known)
    if not isinstance(found, str):
        return f"expected one of {right}, found {_word(found)}"
    near = difflib.get_close_matches(found, known, n=1)
    return f"{found!r} is not one of {right}" + (f"; did you mean {near[0]!r}?" if near else "")


def _word(found: object) -> str:
    return next((word for kind, word in _FOUND if isinstance(found, kind)), "a date or time")
