"""Gradient compression: codecs with error feedback, by name."""

from __future__ import annotations

from mpidp.errors import InvalidArgumentError
from mpidp.reducer.compression.base import Codec, Exchange
from mpidp.reducer.compression.cast import Cast

# Names as users give them; aliases are those of other libraries.
_CASTS = {"float16": "float16", "fp16": "float16", "bfloat16": "bfloat16", "bf16": "bfloat16"}

NAMES = ("float16", "bfloat16")


def codec_named(name: str | None) -> Codec | None:
    """The codec for a name; None for no compression. Raises InvalidArgumentError."""
    if name is None:
        return None
    if name not in _CASTS:
        raise InvalidArgumentError(f"compression {name!r}: expected one of {', '.join(NAMES)}")
    return Cast(_CASTS[name])


__all__ = ["NAMES", "Codec", "Exchange", "codec_named"]
