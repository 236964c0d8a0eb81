"""The bodies of requests and replies as JSON, however large, without holding up the event loop.

What takes long happens in a thread, and there in Python or in small pieces: C code that works through a large body at
once keeps the interpreter from every other thread as well.
"""

import json
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import islice
from json.decoder import JSONArray  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any, NoReturn, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Discriminator, PrivateAttr, ValidationError, model_validator
from starlette.requests import ClientDisconnect

from freewheel.server.errors import ApiError

INLINE = 2**14  # bytes that are read without a thread
MOST_OBJECTS = 10_000  # of a body: each costs the time of hundreds of bytes of text
MANY = 2**12  # of an object's names and values, for which C code may be at it
SLICE = 64  # entries of a list that are written one by one
SECONDS = 1e-3  # for which C code may be at it


class Body(BaseModel):
    """JSON with known fields of the right types; anything else is refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True)

    _large: bool = PrivateAttr(False)

    @property
    def large(self) -> bool:
        """Whether it takes long to go through."""
        return self._large

    @large.setter
    def large(self, value: bool) -> None:
        self._large = value

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, data: Any) -> Any:
        """Of many unknown fields one: each would be an error of its own."""
        if not isinstance(data, dict) or len(data) <= len(cls.model_fields):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next(name for name in data if name not in known)
        return {name: value for name, value in data.items() if name in known or name == unknown}


def by_type(*names: str, default: str | None = None) -> Discriminator:
    """Tells the models of a union by their ``type``, where the one for NAME has the tag ``[NAME]``: by its brackets
    errors tell a tag from a field. ``default`` is the type of what has none."""

    def tag(value: Any) -> str:
        kind = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", names[0])
        return f"[{kind}]"

    *some, last = map(repr, names)
    return Discriminator(
        tag, custom_error_type="type", custom_error_message=f"type must be {', '.join(some)} or {last}"
    )


Kind = TypeVar("Kind", bound=Body)
InThread = Callable[[Callable[[], Kind]], Awaitable[Kind]]


async def read(request: Request, kind: type[Kind], in_thread: InThread) -> Kind:
    """The body of a request.

    Raises:
        ApiError: it is no JSON, or has fields of wrong names or types; the first is named.
    """
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != "application/json":  # pages of other origins may send any other type without being asked
        raise ApiError(415, "the body must be JSON, with Content-Type: application/json")
    try:
        data = await request.body()
    except ClientDisconnect:
        raise ApiError(400, "the body did not come to its end") from None
    large = len(data) > INLINE
    body = await in_thread(lambda: parse(data, kind)) if large else parse(data, kind)
    body.large = large
    request.state.body = body
    return body


def parse(data: bytes, kind: type[Kind]) -> Kind:
    """What ``data`` says; ApiError as :func:`read`."""
    try:
        value = _Decoder().decode(data.decode())
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except ValueError as error:
        raise ApiError(400, f"the body cannot be read: {error}") from None
    if b"\\ud" in data.lower():  # perhaps half a pair of surrogates, which no reply could repeat
        for name, field in value.items() if isinstance(value, dict) else ():
            try:
                json.dumps([name, field], ensure_ascii=False).encode()
            except UnicodeEncodeError:
                shown = name[:100].encode("ascii", "replace").decode()
                raise ApiError(400, f"{shown} has a lone surrogate: it is not valid text", shown) from None
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise unfit(error) from None


class _Decoder(json.JSONDecoder):
    """JSON and nothing else, in Python; only strings, which are the bulk of what is right, are read by C."""

    def __init__(self) -> None:
        super().__init__(object_pairs_hook=self._pairs, parse_constant=_no_constant)
        self.parse_array = self._array
        self.scan_once = py_make_scanner(self)
        self._objects = 0

    def _count(self) -> None:
        self._objects += 1
        if self._objects > MOST_OBJECTS:
            raise ValueError(f"it has more than {MOST_OBJECTS} objects and lists")

    def _array(self, *place: Any) -> Any:
        self._count()
        return JSONArray(*place)

    def _pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        self._count()
        found, size = {}, len(pairs)
        for start in range(0, size, MANY):
            found.update(pairs[start : start + MANY])
        while pairs:  # what is let go at once takes long as well
            del pairs[-MANY:]
        if len(found) < size:
            raise ValueError("an object has a key more than once")
        return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def unfit(error: ValidationError) -> ApiError:
    """Names the first field that is wrong; of a union, what went furthest."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    same = [one for one in errors if one["loc"][:1] == errors[0]["loc"][:1]]
    first = max(same, key=lambda one: (len(_path(one)), not one["type"].endswith("_type")))
    param = ".".join(map(str, _path(first))) or None
    if param is None:
        return ApiError(400, "the body must be a JSON object")
    if first["type"] in ("extra_forbidden", "none_required"):
        return ApiError(400, f"{param} is not supported", param)
    if first["type"] == "missing":
        return ApiError(400, f"{param} is missing", param)
    return ApiError(400, f"{param}: {first['msg'][0].lower()}{first['msg'][1:]}", param)


def _path(error: Any) -> list[int | str]:
    """Where it is, cut to what an error may hold. Types of a union, which stand there too, are left out."""
    named = [
        part
        for place, part in enumerate(error["loc"])
        if place == 0 or isinstance(part, int) or not ("[" in part or part in _TYPES or part in set(_names(Body)))
    ]
    return [part[:100] if isinstance(part, str) else part for part in named[:8]]


_TYPES = {"str", "int", "float", "bool", "none"}


def _names(kind: type[Body]) -> Iterator[str]:
    yield kind.__name__
    for one in kind.__subclasses__():
        yield from _names(one)


def encoded(value: Any, *, in_pieces: bool = False) -> bytes:
    """``value`` as JSON; ``in_pieces``, so that in a thread it holds up nobody."""
    return "".join(written(value)).encode() if in_pieces else _dumps(value).encode()


def written(value: Any) -> Iterator[str]:
    """``value`` as JSON in pieces, of which each takes a short time. What an iterator gives is a list's items."""
    if isinstance(value, dict):
        begin = "{"
        for key, item in value.items():
            yield f"{begin}{_dumps(key)}:"
            yield from written(item)
            begin = ","
        yield "}" if value else "{}"
    elif isinstance(value, Iterator) or (isinstance(value, list) and len(value) > SLICE):
        begin, items, size = "[", iter(value), 1
        while some := list(islice(items, size)):
            began = time.perf_counter()
            yield begin + _dumps(some)[1:-1]
            begin = ","
            size = min(size * 2, 2**14) if time.perf_counter() - began < SECONDS else max(1, size // 2)
        yield "[]" if begin == "[" else "]"
    elif isinstance(value, list) and value:
        begin = "["
        for item in value:
            yield begin
            yield from written(item)
            begin = ","
        yield "]"
    else:
        yield _dumps(value)


# Whatever is no value is an iterable of them.
_dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=list).encode
