"""Tools: what clients say of them, how the model is told, and how its calls are read out of its text.

The format is that of Hermes, which Qwen, SmolLM2 and others are trained on: each call is JSON between ``<tool_call>``
and ``</tool_call>``. JSON alone, if it is a call and begins the answer, is read as one as well.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Literal, NoReturn, TypeVar
from uuid import uuid4

from pydantic import Field

from freewheel.sampling import Grammar
from freewheel.server.bodies import Body
from freewheel.server.formats import Constrained

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Function(Body):
    """What a model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A function is all that a tool can be."""

    type: Literal["function"]
    function: Function


class FlatTool(Function):
    """A tool, as responses have it: in one object."""

    type: Literal["function"]

    @property
    def function(self) -> Function:
        """What chats have in an object of its own."""
        return Function.model_construct(**{name: getattr(self, name) for name in Function.model_fields})


class Named(Body):
    """The name of a function."""

    name: str


class NamedChoice(Body):
    """The one function that is to be called."""

    type: Literal["function"]
    function: Named


class FlatChoice(Named):
    """The one function that is to be called, as responses have it."""

    type: Literal["function"]

    @property
    def function(self) -> Named:
        """What chats have in an object of its own."""
        return self


AnyTool = TypeVar("AnyTool", Tool, FlatTool)
AnyChoice = TypeVar("AnyChoice", NamedChoice, FlatChoice)


class Tooled(Constrained, Generic[AnyTool, AnyChoice]):
    """Fields of requests that may have tools."""

    tools: list[AnyTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | AnyChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def offered(self) -> list[Function]:
        """The tools that the model hears of."""
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools or ()]

    @property
    def named(self) -> str | None:
        """The one that is to be called, if the choice names it."""
        return None if isinstance(self.tool_choice, str | None) else self.tool_choice.function.name

    @property
    def tools_constrain(self) -> bool:
        """Whether tools say what the answer has to look like."""
        return self.tool_choice not in (None, "auto", "none") or any(tool.strict for tool in self.offered)

    def constraint(self) -> str | None:
        """See :meth:`Constrained.constraint`; tools may constrain the answer as well."""
        given = super().constraint()
        if given and self.offered:
            raise ValueError(f"{given} cannot be combined with tools, unless tool_choice is none")
        return "tools" if self.tools_constrain else given

    def output_grammar(self) -> Grammar | None:
        """See :meth:`Constrained.output_grammar`."""
        self._check()
        return self._calls() if self.constraint() == "tools" else super().output_grammar()

    def _check(self) -> None:
        """Check what the fields mean together."""
        names = [tool.function.name for tool in self.tools or ()]
        if self.tools is not None and not self.tools:
            raise ValueError("tools must not be empty")
        if len(set(names)) < len(names):
            raise ValueError("tools must have different names")
        for tool in self.tools or ():
            if (tool.function.parameters or {}).get("type", "object") != "object":
                raise ValueError(f"tools must take an object, and the parameters of {tool.function.name} are none")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice needs tools")
        if self.named is not None and self.named not in names:
            raise ValueError(f"tool_choice names {self.named[:64]!r}, which is not among the tools")

    def _calls(self) -> Grammar:
        """Of an answer that calls tools as ``tool_choice`` asks, where it constrains the answer."""
        several = self.parallel_tool_calls is not False and self.named is None
        schemas = {tool.name: _parameters(tool) for tool in self.offered if self.named in (None, tool.name)}
        return Grammar.tool_calls(schemas, several=several, text=self.tool_choice in (None, "auto"))

    def reader(self) -> "CallReader | None":
        """Reads the calls out of an answer; None where there are none to read."""
        names = {tool.name for tool in self.offered}
        if not names:
            return None
        most = None if self.parallel_tool_calls is not False else 1
        return CallReader(names, most, bare=not self.tools_constrain)


def _parameters(function: Function) -> dict[str, Any]:
    if function.parameters is None:
        return {"type": "object", "additionalProperties": False}
    return {"type": "object", **function.parameters}


def described(tool: Function) -> dict[str, Any]:
    """A tool as models are told of it."""
    return {"type": "function", "function": tool.model_dump(exclude_none=True)}


def told(messages: Sequence[Mapping[str, Any]], tools: Sequence[Function], native: bool) -> list[dict[str, Any]]:
    """A conversation as the chat template takes it.

    Args:
        messages: as clients send them.
        tools: that the model hears of.
        native: whether the template knows tools; else they are written into the messages.

    Raises:
        ValueError: the arguments of an earlier call are no JSON object.
    """
    turns = [dict(message) for message in messages]
    for number, turn in enumerate(turns):
        calls = [_earlier(call) for call in turn.get("tool_calls") or ()]
        if native and calls:
            turn["tool_calls"] = calls
        elif calls:
            written = [f"{OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CLOSE}" for call in calls]
            turn["content"] = "\n".join([*filter(None, [turn["content"]]), *written])
            del turn["tool_calls"]
        elif turn["role"] == "tool" and not native:
            turns[number] = {"role": "user", "content": f"<tool_response>\n{turn['content']}\n</tool_response>"}
    if tools and not native:
        if turns and turns[0]["role"] == "system":
            turns[0]["content"] += "\n\n" + _introduction(tools)
        else:
            turns.insert(0, {"role": "system", "content": _introduction(tools)})
    return turns


def _earlier(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call in a message, with its arguments as templates take them: as an object."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of an earlier call of {function['name'][:64]!r} are no JSON object")
    return {**call, "function": {"name": function["name"], "arguments": arguments}}


def _introduction(tools: Sequence[Function]) -> str:
    lines = "\n".join(json.dumps(described(tool), ensure_ascii=False) for tool in tools)
    return (
        f"You may call functions. These there are, each described by JSON:\n<tools>\n{lines}\n</tools>\n"
        f"To call one, answer with its name and arguments as JSON, for each call:\n{OPEN}\n"
        f'{{"name": "NAME", "arguments": {{}}}}\n{CLOSE}'
    )


@dataclass
class Call:
    """A call as far as it was read."""

    name: str
    arguments: str = ""
    id: str = field(default_factory=lambda: f"call_{uuid4().hex[:24]}")

    @property
    def whole(self) -> bool:
        """Whether its arguments are complete."""
        try:
            return isinstance(json.loads(self.arguments), dict)
        except (ValueError, RecursionError):
            return False

    def told(self) -> dict[str, Any]:
        """As clients get it in one piece."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


# How a call begins, up to its arguments, in pieces: each may be where the text stops for now.
# Bounded, so that what goes on for ever is no call, and a match takes no longer the longer the text is.
_SPACE = r"\s{0,64}"
_HEAD = [r"\{", _SPACE, *'"name"', _SPACE, ":", _SPACE, '"', "([a-zA-Z0-9_-]{0,64})", '"', _SPACE, ",", _SPACE, '"']
_BEGINS = re.compile("".join(_HEAD) + rf'(?:arguments|parameters)"{_SPACE}:{_SPACE}(?=\{{)')
_KEYS = "|".join(key[:end] for key in ("arguments", "parameters") for end in range(len(key), 0, -1))
_PIECES = [*_HEAD, f"(?:{_KEYS})", '"', _SPACE, ":", _SPACE]
_MAY_BEGIN = re.compile("(?:".join(_PIECES) + ")?" * (len(_PIECES) - 1))


class CallReader:
    """Reads calls out of a text that comes in pieces; what it says does not depend on how it was cut.

    Args:
        names: of tools; what names another is text.
        most: calls to read; later ones are left out.
        bare: whether JSON alone may be a call.

    Attributes:
        calls: so far.
    """

    def __init__(self, names: set[str], most: int | None = None, *, bare: bool = True) -> None:
        self._names, self._most, self._bare = names, most, bare
        self._text = ""  # what is not understood yet
        self._state = "start"
        self._wrapped = self._fresh = False  # the call is between tags; nothing came after the last one
        self._space = ""  # that stood before a tag
        self._depth, self._quoted, self._escaped = 0, False, False
        self.calls: list[Call] = []

    def push(self, text: str, *, last: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """Take in more, and return what is new: content, and parts of calls as chats have them."""
        content, parts = "", []
        for kind, index, value in self.events(text, last=last):
            if kind == "content":
                content += value
            elif kind == "call":
                call = self.calls[index]
                begun = {"index": index, "id": call.id, "type": "function"}
                parts.append({**begun, "function": {"name": call.name, "arguments": ""}})
            elif parts and parts[-1]["index"] == index:
                parts[-1]["function"]["arguments"] += value
            else:
                parts.append({"index": index, "function": {"arguments": value}})
        return content, parts

    def events(self, text: str, *, last: bool = False) -> Iterator[tuple[str, int, str]]:
        """Take in more, and give what is new in its order: ("content" or "call" or "arguments", number of the call,
        text)."""
        self._text += text
        for kind, index, value in self._read(last):
            if kind != "content" and self._most is not None and index >= self._most:
                continue
            if kind == "arguments":
                self.calls[index].arguments += value
            yield kind, index, value

    def finish_reason(self, reason: str | None) -> str | None:
        """The engine's, or that the answer called tools, and did so completely."""
        calls = self.read
        return "tool_calls" if reason == "stop" and calls and all(call.whole for call in calls) else reason

    @property
    def read(self) -> list[Call]:
        """The calls that count."""
        return self.calls[: self._most]

    def _read(self, last: bool) -> Iterator[tuple[str, int, str]]:
        """Events, as far as the text tells, of calls that do not count as well."""
        while True:
            before = self._state, len(self._text)
            match self._state:
                case "start":
                    yield from self._start(last)
                case "text":
                    yield from self._plain(last)
                case "head":
                    yield from self._head(last)
                case "arguments":
                    yield from self._arguments()
                case "tail":
                    yield from self._tail(last)
            if (self._state, len(self._text)) == before:
                return

    def _start(self, last: bool) -> Iterator[tuple[str, int, str]]:
        """Whether the answer is JSON alone."""
        stripped = self._text.lstrip()
        if stripped or last:
            self._state = "text"
            if self._bare and stripped.startswith("{"):
                self._state, self._wrapped = "head", False
        yield from ()

    def _plain(self, last: bool) -> Iterator[tuple[str, int, str]]:
        place = self._text.find(OPEN)
        if place >= 0:
            end = place
            self._state, self._wrapped = "head", True
        else:
            end = len(self._text) if last else len(self._text) - _overlap(self._text, OPEN)
        text = self._text[:end]
        if place >= 0 or not last:  # white space before a call is no content, nor is that after one
            text = text.rstrip()
        self._space = self._text[len(text) : end]
        self._text = self._text[end + len(OPEN) if place >= 0 else len(text) :]
        if self._fresh:
            text = text.lstrip()
        if text:
            self._fresh = False
            yield "content", 0, text

    def _head(self, last: bool) -> Iterator[tuple[str, int, str]]:
        """Whether what begins here is a call."""
        start = len(self._text) - len(self._text.lstrip())
        if self._wrapped and self._text[start : start + 1] == "[":  # several in a list
            start += 1
            start += len(self._text[start:]) - len(self._text[start:].lstrip())
        found = _BEGINS.match(self._text, start)
        if found and found[1] in self._names:
            self.calls.append(Call(found[1]))
            self._fresh = True
            yield "call", len(self.calls) - 1, ""
            self._text, self._state, self._depth = self._text[found.end() :], "arguments", 0
            return
        close = self._text.find(CLOSE) if self._wrapped else -1
        if close < 0 and not last and not found and (self._wrapped or _MAY_BEGIN.fullmatch(self._text, start)):
            return  # with more of it there may be one
        body = self._text if close < 0 else self._text[:close]
        calls = self._whole(body)
        if calls and (close >= 0 or last):
            self._text = "" if close < 0 else self._text[close + len(CLOSE) :]
            for name, arguments in calls:
                self.calls.append(Call(name))
                self._fresh = True
                yield "call", len(self.calls) - 1, ""
                yield "arguments", len(self.calls) - 1, arguments
        elif self._wrapped:
            end = len(body) if close < 0 else close + len(CLOSE)
            yield "content", 0, self._space + OPEN + self._text[:end]
            self._text = self._text[end:]
        self._state = "text"

    def _whole(self, body: str) -> list[tuple[str, str]]:
        """The calls in JSON that is complete, whatever the order of its keys."""
        try:
            value = json.loads(body, parse_constant=_refuse)
            json.dumps(value, ensure_ascii=False).encode()  # there may be half a pair of surrogates
        except (ValueError, RecursionError):
            return []
        calls = []
        for one in value if isinstance(value, list) else [value]:
            name = one.get("name") if isinstance(one, dict) else None
            if not isinstance(name, str) or name not in self._names:
                return []
            arguments = one.get("arguments", one.get("parameters", {}))
            if not isinstance(arguments, dict):
                return []
            calls.append((name, json.dumps(arguments, ensure_ascii=False)))
        return calls

    def _arguments(self) -> Iterator[tuple[str, int, str]]:
        """Up to the end of the object."""
        end = 0
        while end < len(self._text) and self._state == "arguments":
            character = self._text[end]
            end += 1
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = self._quoted
            elif character == '"':
                self._quoted = not self._quoted
            elif not self._quoted and character in "{}":
                self._depth += 1 if character == "{" else -1
                if not self._depth:
                    self._state = "tail"
        text, self._text = self._text[:end], self._text[end:]
        if text:
            yield "arguments", len(self.calls) - 1, text

    def _tail(self, last: bool) -> Iterator[tuple[str, int, str]]:
        """What follows the arguments: more calls, the end of this one, or the end of the text."""
        self._text = _dense(self._text)
        more = re.match(r"\s*\}\s*(?:,\s*)?(?=\{)", self._text)
        if more and (self._bare or self._wrapped):
            self._text, self._state = self._text[more.end() :], "head"
        elif self._wrapped:
            close = self._text.find(CLOSE)
            if close >= 0 or last:
                self._text, self._state = "" if close < 0 else self._text[close + len(CLOSE) :], "text"
            elif len(self._text) > 2 * len(CLOSE):  # nothing of it counts, nor begins a call
                self._text = "-" + self._text[-len(CLOSE) :]
        elif self._text not in ("", "}", "},") or last:  # with more of these there may be a call
            self._text, self._state = self._text.removeprefix("}"), "text"
        yield from ()


def _dense(text: str) -> str:
    """What follows arguments without white space that means nothing: before and after "}" and ","."""
    signs, rest = "", text.lstrip()
    for sign in "},":
        if rest.startswith(sign):
            signs, rest = signs + sign, rest[1:].lstrip()
    return signs + rest


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _overlap(text: str, marker: str) -> int:
    """How many characters at the end of a text may begin the marker."""
    return next((size for size in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:size])), 0)
