"""Fields that say what an answer has to look like, and the grammar that they become."""

from typing import Annotated, Any, Literal

from pydantic import Field, Tag, WithJsonSchema

from freewheel.sampling import Grammar
from freewheel.server.bodies import Body, by_type

# Its values are looked at where they are checked: see protocol.
Strings = Annotated[list[Any], WithJsonSchema({"type": "array", "items": {"type": "string"}})]


class TextFormat(Body):
    """Anything."""

    type: Literal["text"]

    def grammar(self) -> None:
        """There is none."""


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]

    def grammar(self) -> Grammar:
        """Of the answer."""
        return Grammar.json_object()


class JsonSchema(Body):
    """A schema with a name. It is kept to the letter whether or not it is ``strict``."""

    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None

    def grammar(self) -> Grammar:
        """Of the answer."""
        return Grammar.json_schema(self.schema_)


class JsonSchemaFormat(Body):
    """JSON by a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema

    def grammar(self) -> Grammar:
        """Of the answer."""
        return self.json_schema.grammar()


class FlatJsonSchemaFormat(JsonSchema):
    """JSON by a schema, as responses have it: in one object."""

    type: Literal["json_schema"]


_ONE_OF_THEM = by_type("text", "json_object", "json_schema")
_Text = Annotated[TextFormat, Tag("[text]")]
_JsonObject = Annotated[JsonObjectFormat, Tag("[json_object]")]
ResponseFormat = Annotated[_Text | _JsonObject | Annotated[JsonSchemaFormat, Tag("[json_schema]")], _ONE_OF_THEM]
FlatFormat = Annotated[_Text | _JsonObject | Annotated[FlatJsonSchemaFormat, Tag("[json_schema]")], _ONE_OF_THEM]
Format = TextFormat | JsonObjectFormat | JsonSchemaFormat | FlatJsonSchemaFormat


class Constrained(Body):
    """Fields of which one at most may constrain the answer."""

    regex: str | None = None
    grammar: str | None = None
    choice: Strings | None = None

    def format(self) -> tuple[str, Format | None]:
        """The format that is asked for, and the name of its field."""
        raise NotImplementedError

    def constraint(self) -> str | None:
        """The field that constrains the answer.

        Raises:
            ValueError: there are several.
        """
        given = [name for name in ("regex", "grammar", "choice") if getattr(self, name) is not None]
        name, form = self.format()
        if not isinstance(form, TextFormat | None):
            given.append(name)
        if len(given) > 1:
            raise ValueError(f"{given[0]} cannot be combined with {given[1]}")
        return given[0] if given else None

    def output_grammar(self) -> Grammar | None:
        """What the field means. Errors name the grammar, and not the field.

        Raises:
            ValueError: there are several fields, or the grammar is wrong.
        """
        match self.constraint():
            case "regex":
                return Grammar.regex(self.regex or "")
            case "grammar":
                return Grammar.cfg(self.grammar or "")
            case "choice":
                return Grammar.choice(self.choice or [])
        _, form = self.format()
        return form and form.grammar()
