"""What an output has to look like, as plain data; :mod:`freewheel.grammar` makes masks of it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from freewheel.sampling.checks import check_text, shown

Kind = Literal["json_schema", "regex", "choice", "cfg", "tool_calls"]

MAX_GRAMMAR = 2**17


@dataclass(frozen=True)
class Grammar:
    """A language that the output belongs to. Whether the text makes sense is found out when a request is made of it.

    Attributes:
        kind: what the text is: a JSON schema, a regular expression, a JSON list of texts one of which is the output, a
            context-free grammar in Lark's notation, or in GBNF if it has a ``::=``, or what :meth:`tool_calls` makes.
        text: at most 131,072 characters.

    Raises:
        ValueError: an unknown kind, or text that is none, empty or too long.
    """

    kind: Kind
    text: str

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"grammar must be one of the kinds {', '.join(get_args(Kind))}, not {shown(self.kind)}")
        if not isinstance(self.text, str):
            raise ValueError(f"grammar must have text, not {shown(self.text)}")
        if not self.text and self.kind != "regex":
            raise ValueError("grammar must not be empty")
        if len(self.text) > MAX_GRAMMAR:
            raise ValueError(f"grammar has {len(self.text)} characters, more than the limit of {MAX_GRAMMAR}")
        check_text("grammar", self.text)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> "Grammar":
        """JSON that a schema describes, which is given as text or as what JSON makes of it; properties come in its
        order."""
        return cls("json_schema", schema if isinstance(schema, str) else _json(schema))

    @classmethod
    def json_object(cls) -> "Grammar":
        """Any JSON object."""
        return cls("json_schema", '{"type": "object"}')

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """What a regular expression matches as a whole."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> "Grammar":
        """One of some texts."""
        if isinstance(texts, str) or not isinstance(texts, Sequence) or not texts:
            raise ValueError(f"grammar must be a choice of texts, not {shown(texts)}")
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("grammar must be a choice of texts, and one of them is none")
        return cls("choice", _json(list(texts)))

    @classmethod
    def cfg(cls, text: str) -> "Grammar":
        """What a context-free grammar derives."""
        return cls("cfg", text)

    @classmethod
    def tool_calls(cls, schemas: Mapping[str, Mapping[str, Any]], *, several: bool, text: bool = False) -> "Grammar":
        """Calls of tools as models write them that are trained on Hermes' format: JSON between ``<tool_call>`` and
        ``</tool_call>``, each on lines of its own.

        Args:
            schemas: of each tool's arguments, by its name.
            several: whether there may be more than one call.
            text: whether text may come first, or alone.
        """
        return cls("tool_calls", _json({"schemas": schemas, "several": several, "text": text}))


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"grammar must be something that JSON can tell: {error}") from None
