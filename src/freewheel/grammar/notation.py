"""From what users write to what the library compiles, and what is refused on the way.

The library refuses most of what it cannot hold an output to. Here is the rest: a schema is either kept, or refused by
name, and never weakened.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

# A schema of JSON's strings has one spelling for each text. With \u there would be others, by which a property could
# get past its own schema, as one of the additional ones.
ESCAPES = 'nrbtf\\"'

# White space between tokens of JSON: what people indent by, and no more, or a model could go on with it for ever.
WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,20}"

# The automaton has a state for each remainder.
MAX_MULTIPLE = 2**12

# Comments, strings and expressions of Lark's notation. What is not closed ends with its line, so that each character is
# looked at once.
_OPAQUE = re.compile(r'//[^\n]*|#[^\n]*|"(?:\\.|[^"\\\n])*"?|/(?:\\.|[^/\\\n])+/?')
_ATTRIBUTES = re.compile(r"^[ \t]*[?!]?\w+[ \t]*\[[^\]\n]*\][ \t]*:", re.MULTILINE)


class GrammarError(ValueError):
    """A grammar that is refused, in words for a user."""


def choice_regex(text: str) -> str:
    """An expression for one of some texts, given as a JSON list.

    Raises:
        GrammarError: it is none, or empty.
    """
    texts = _parsed(text)
    if not isinstance(texts, list) or not texts or not all(isinstance(one, str) for one in texts):
        raise GrammarError("grammar must be a list of texts to choose from")
    return "|".join("".join(map(_literal, one)) for one in texts)


def calls_lark(text: str) -> tuple[str, dict[str, str]]:
    """A grammar of tool calls, by what ``Grammar.tool_calls`` made, and the schemas that it names.

    Raises:
        GrammarError: it is something else.
    """
    match _parsed(text):
        case {"schemas": dict(schemas), "several": bool(several), "text": bool(free)} if schemas:
            pass
        case _:
            raise GrammarError("grammar must be of tool calls")
    bodies = [
        json.dumps(f'\n{{"name": {json.dumps(name)}, "arguments": ') + f' @schema{i} "}}\\n</tool_call>"'
        for i, name in enumerate(schemas)
    ]
    if free:  # text ends where the first call begins
        start = "PLAIN | (before body)+ PLAIN?" if several else "PLAIN | before body"
        start += "\nbefore[lazy]: /(?s:.*)<tool_call>/\nPLAIN: /(?s:.*)/ & ~/(?s:.*)<tool_call>(?s:.*)/"
    else:
        start = f'"<tool_call>" body{" (BETWEEN body)*" if several else ""}\nBETWEEN: "\\n<tool_call>"'
    named = {f"schema{i}": json.dumps(schema) for i, schema in enumerate(schemas.values())}
    return f"start: {start}\nbody: {' | '.join(bodies)}\n", named


def _literal(character: str) -> str:
    return character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):x}}}"


def check_lark(text: str) -> None:
    """Refuse what is more than a grammar: options, other languages inside it, special tokens.

    Raises:
        GrammarError: naming what.
    """
    bare = _OPAQUE.sub('""', text)
    for sign, what in (("%json", "JSON schemas inside it"), ("%llguidance", "options"), ("<", "special tokens")):
        if sign in bare:
            raise GrammarError(f"grammar must not have {what} ({sign})")
    if _ATTRIBUTES.search(bare):
        raise GrammarError("grammar must not have attributes of rules, in brackets behind their names")


def checked_schema(text: str) -> str:
    """The schema as an object, without what the library would take and not hold an output to.

    Raises:
        GrammarError: naming the keyword, or it is no JSON.
    """
    schema = _parsed(text)
    if schema is True:
        return "{}"
    if not isinstance(schema, dict):
        raise GrammarError("grammar must be a JSON schema, which is an object")
    if "x-guidance" in schema:
        raise GrammarError("grammar must not have x-guidance: its options are not the user's")
    try:
        for part in _objects(schema):
            _check_part(part)
    except RecursionError:
        raise GrammarError("grammar is a JSON schema that is nested too deeply") from None
    return text


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        raise GrammarError(f"grammar is not JSON: {error}") from None
    except RecursionError:
        raise GrammarError("grammar is JSON that is nested too deeply") from None


def _no_number(name: str) -> None:
    raise GrammarError(f"grammar is not JSON: it has {name}")


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in a value of JSON: the schemas among them, and others."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        yield from _objects(item)


def _check_part(part: dict[str, Any]) -> None:
    multiple = part.get("multipleOf")
    if isinstance(multiple, int | float) and multiple > MAX_MULTIPLE:
        raise GrammarError(f"grammar has multipleOf {multiple}, more than the limit of {MAX_MULTIPLE}")
    least, required = part.get("minProperties"), part.get("required")
    named = len(required) if isinstance(required, list) else 0
    if isinstance(least, int | float) and least > named + 1:  # additional ones may have equal names, and be one
        raise GrammarError(
            f"grammar has minProperties {least} and {named} properties that are required: the number of others cannot "
            "be kept"
        )
