"""Gradient compression: codecs with error feedback, by name or as objects with parameters."""

from __future__ import annotations

from collections.abc import Callable

from mpidp.errors import InvalidArgumentError
from mpidp.reducer.compression.base import Codec, Exchange, Part, Piece
from mpidp.reducer.compression.cast import Cast
from mpidp.reducer.compression.int8 import Int8
from mpidp.reducer.compression.plain import Plain
from mpidp.reducer.compression.powersgd import PowerSGD
from mpidp.reducer.compression.sign import Sign
from mpidp.reducer.compression.topk import TopK

_MAKERS: dict[str, Callable[[], Codec]] = {
    "float16": lambda: Cast("float16"),
    "bfloat16": lambda: Cast("bfloat16"),
    "int8": Int8,
    "topk": TopK,
    "powersgd": PowerSGD,
    "sign": Sign,
}
# Those of other libraries.
_ALIASES = {"fp16": "float16", "bf16": "bfloat16"}

NAMES = tuple(_MAKERS)


def codec_named(codec: str | Codec | None) -> Codec | None:
    """The codec for a name; a codec itself, or None for no compression, as it is.

    Raises InvalidArgumentError for anything else.
    """
    if codec is None:
        return None
    if isinstance(codec, str):
        maker = _MAKERS.get(_ALIASES.get(codec, codec))
        if maker is not None:
            return maker()
    elif callable(getattr(codec, "exchange", None)):
        return codec
    raise InvalidArgumentError(
        f"compression {codec!r}: expected one of {', '.join(NAMES)}, or a codec"
    )


__all__ = [
    "NAMES",
    "Cast",
    "Codec",
    "Exchange",
    "Int8",
    "Part",
    "Piece",
    "Plain",
    "PowerSGD",
    "Sign",
    "TopK",
    "codec_named",
]
