"""Fields that say what an answer has to look like, and the grammar that they become."""

from typing import Annotated, Any, Literal

from pydantic import Field

from freewheel.sampling import Grammar
from freewheel.server.body import Body


class TextFormat(Body):
    """Anything."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Body):
    """A schema with a name. It is kept to the letter whether or not it is ``strict``."""

    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class JsonSchemaFormat(Body):
    """JSON by a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class Constrained(Body):
    """Fields of which one at most may constrain the answer."""

    response_format: ResponseFormat | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None

    def constraint(self) -> str | None:
        """The field that constrains the answer.

        Raises:
            ValueError: there are several.
        """
        given = [name for name in ("regex", "grammar", "choice") if getattr(self, name) is not None]
        if not isinstance(self.response_format, TextFormat | None):
            given.append("response_format")
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
            case "response_format":
                if isinstance(self.response_format, JsonSchemaFormat):
                    return Grammar.json_schema(self.response_format.json_schema.schema_)
                return Grammar.json_object()
        return None
