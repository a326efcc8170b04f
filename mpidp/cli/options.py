"""Option types that several commands share; each turns bad text into one line and status 2."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from mpidp.config import parse_bytes

if TYPE_CHECKING:
    # Generic for type checkers since click 8.2, but not subscriptable in the older ones.
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType


class Bytes(_ParamType):
    """A number of bytes above 0: 8, 64K, 1M, 2G, in powers of 1024."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """See `click.ParamType.convert`."""
        if isinstance(value, int):
            return value
        try:
            nbytes = parse_bytes(value)
        except ValueError as error:
            self.fail(f"{value!r}: {error}", param, ctx)
        if nbytes < 1:
            self.fail(f"{value!r}: expected at least 1 byte", param, ctx)
        return nbytes


class OneOf(_ParamType):
    """A name out of `choices`; case, dashes and underscores do not matter."""

    def __init__(self, choices: Iterable[str], name: str) -> None:
        self.choices = tuple(choices)
        self.name = name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """See `click.ParamType.convert`."""
        wanted = _plain(value)
        found = next((choice for choice in self.choices if _plain(choice) == wanted), None)
        if found is None:
            self.fail(f"{value!r} is not one of {', '.join(self.choices)}", param, ctx)
        return found

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str | None:
        """Shown in place of the type's name in usage and help."""
        return f"[{'|'.join(self.choices)}]"


class ListOf(_ParamType):
    """Names out of `choices`, with commas between them; "all" where `allow_all` says so."""

    def __init__(self, choices: Iterable[str], name: str, *, allow_all: bool = False) -> None:
        self._item = OneOf(choices, name)
        self._allow_all = allow_all
        self.name = f"{name}[,...]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """See `click.ParamType.convert`."""
        if isinstance(value, tuple):
            return value
        if self._allow_all and value == "all":
            return self._item.choices
        parts = [part.strip() for part in value.split(",")]
        # A name given twice would be measured twice.
        return tuple(dict.fromkeys(self._item.convert(part, param, ctx) for part in parts))


def _plain(text: str) -> str:
    return text.strip().lower().replace("-", "").replace("_", "")
