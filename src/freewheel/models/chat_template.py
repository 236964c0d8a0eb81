"""Chat templates: Jinja sources that turn a conversation into the text a model was trained on.

Templates are run as the Hugging Face libraries run them (https://huggingface.co/docs/transformers/chat_templating):
blocks trimmed, loop controls, ``raise_exception``, ``strftime_now``, a plain ``tojson``, and ``{% generation %}``,
which only marks text. They come with the model's files, hence the sandbox.
"""

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, Any]


def render(
    source: str,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
) -> str:
    """Render ``messages``; ``variables`` are what else the template may name (``bos_token``, ...).

    Raises:
        ValueError: messages or tools are malformed, a variable has their name, the template is not valid Jinja, or it
            rejects the messages.
    """
    checked = [_checked(message, number) for number, message in enumerate(_checked_list("messages", messages))]
    if not checked:
        raise ValueError("messages must not be empty")
    if tools is not None and not all(isinstance(tool, Mapping) for tool in _checked_list("tools", tools)):
        raise ValueError("tools must be a list of mappings, the JSON schemas of functions")
    if taken := variables.keys() & {"messages", "tools"}:
        raise ValueError(f"a variable of the chat template must not be called {sorted(taken)[0]!r}")
    template, _ = _compiled(source)
    try:
        return template.render({"messages": checked, "tools": tools, **variables})
    except Exception as error:  # template code can raise anything: a missing field, str + None, its own refusal
        raise ValueError(f"the chat template cannot render these messages: {error}") from error


def is_marker(text: str, source: str) -> bool:
    """Whether a template writes ``text`` around messages, and does not look for it in them.

    Raises:
        ValueError: the template is not valid Jinja.
    """
    visible = any(not character.isalnum() and character not in " _▁\n\t" for character in text)
    return visible and text in source and text not in _compiled(source)[1]


def _checked_list(name: str, values: Any) -> Sequence[Any]:
    if isinstance(values, str | Mapping) or not isinstance(values, Sequence):
        raise ValueError(f"{name} must be a list, not {type(values).__name__}")
    return values


def _checked(message: Any, number: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"messages[{number}] must be a mapping with 'role' and 'content'")
    if not isinstance(message.get("role"), str):
        raise ValueError(f"messages[{number}].role must be a string")
    checked = dict(message)
    content = checked.get("content")
    if isinstance(content, list | tuple):
        checked["content"] = "\n".join(_part_text(part, number) for part in content)
    elif content is not None and not isinstance(content, str):
        raise ValueError(f"messages[{number}].content must be a string or a list of text parts")
    return checked


def _part_text(part: Any, number: int) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise ValueError(f"messages[{number}].content: only parts {{'type': 'text', 'text': ...}} are supported")


@lru_cache(maxsize=32)
def _compiled(source: str) -> "tuple[jinja2.Template, frozenset[str]]":
    """A template, and the texts that it compares with others or gives to methods and filters."""
    import jinja2
    from jinja2 import nodes

    try:
        tree = _environment().parse(source)
        template = _environment().from_string(tree)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is not valid Jinja: line {error.lineno}: {error.message}") from error
    except Exception as error:  # nested too deeply for Jinja or for Python, text that is not Unicode
        raise ValueError(f"the chat template cannot be compiled: {error}") from error
    operands: list[nodes.Node] = []
    for comparison in tree.find_all(nodes.Compare):
        operands += [comparison.expr, *(operand.expr for operand in comparison.ops)]
    for call in tree.find_all((nodes.Call, nodes.Filter)):
        if isinstance(call, nodes.Filter) or isinstance(call.node, nodes.Getattr):
            operands += call.args
    return template, frozenset(
        operand.value for operand in operands if isinstance(operand, nodes.Const) and isinstance(operand.value, str)
    )


@lru_cache(maxsize=1)
def _environment() -> "jinja2.Environment":
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
        # U+FDD0 is no part of the value: Tokenizer puts it in, and takes it out again.
        return re.sub("[^\0-\x7f\ufdd0]", lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment
