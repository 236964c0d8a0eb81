"""What becomes of each keyword of JSON schemas, alone and in pairs: it is kept to the letter, or the schema is refused.

The oracle is the jsonschema package. Values are written as JSON, and the grammar has to take exactly those that fit.
"""

import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from tiny_tokenizers import byte_level, gguf_metadata

from freewheel.grammar import Compiler
from freewheel.models.tokenizer import Tokenizer
from freewheel.sampling import Grammar

TOKENIZER = Tokenizer.from_gguf(gguf_metadata(byte_level(), "gpt2"))
COMPILER = Compiler(TOKENIZER, TOKENIZER.vocab_size)

TEXTS = ["", "a", "ab", "abc", "abcd", "ABCDE", "AB12", "12", "2026-11-30", "2026-13-40", "x@y.zz", "a@b", "1.2.3.4"]
TEXTS += ["é", "日本", "日本語", "😀", "😀😀", "a\nb", 'q"q', "a\\", "aaaaaaaaaaaa", "Zc", "ac"]
NUMBERS = [0, 1, -1, 2, 3, 4, 5, 6, 7, 10, 12, 15, 99, 100, 101, 2.5, 0.1, -0.5, 1.5, 9.99, 10.01, 1000000, -100]
ARRAYS = [[], [1], [1, 1], [1, 2], [1, 2, 3], [1, 2, 3, 4], ["a"], ["a", 1], [1, "a"], [1, "a", True], [None], [[1]]]
OBJECTS: list[dict[str, Any]] = [
    {}, {"a": 1}, {"a": "x"}, {"b": 1}, {"a": 1, "b": 2}, {"a": 1, "b": "x"}, {"a": 1, "c": 3}, {"c": 1}, {"x_1": 1},
    {"a": 1, "b": 2, "c": 3}, {"a": {"a": {"a": 1}}}, {"a": None}, {"kind": "x", "v": 1}, {"kind": "y", "v": "s"},
    {"kind": "x", "v": "s"}, {"abcdef": 1}, {"日本 é": 1},
]  # fmt: skip
VALUES = [*TEXTS, *NUMBERS, *ARRAYS, *OBJECTS, None, True, False]


def text(**more: Any) -> dict[str, Any]:
    return {"type": "string", **more}


def whole(**more: Any) -> dict[str, Any]:
    return {"type": "integer", **more}


def real(**more: Any) -> dict[str, Any]:
    return {"type": "number", **more}


def array(**more: Any) -> dict[str, Any]:
    return {"type": "array", **more}


def thing(**more: Any) -> dict[str, Any]:
    return {"type": "object", **more}


AB = {"a": whole(), "b": whole()}
KEPT: dict[str, Any] = {
    "minLength": text(minLength=2),
    "maxLength": text(maxLength=2),
    "minLength maxLength": text(minLength=2, maxLength=3),
    "pattern": text(pattern="^[A-Z]+$"),
    "pattern without anchors": text(pattern="b"),
    "pattern minLength": text(pattern="^[a-z]+$", minLength=3),
    "pattern maxLength": text(pattern="^[a-z]+$", maxLength=3),
    "pattern minLength maxLength": text(pattern="[a-z]", minLength=2, maxLength=3),
    "format": text(format="date"),
    "format email": text(format="email"),
    "format ipv4": text(format="ipv4"),
    "format maxLength": text(format="email", maxLength=5),
    "format minLength": text(format="ipv4", minLength=7),
    "format pattern": text(format="date", pattern="^2026-11"),
    "enum": {"enum": ["abc", "é", "日本", 1, None]},
    "enum type": {"enum": ["abc", 1], "type": "string"},
    "enum minLength": {"enum": ["a", "abc", "日本"], "minLength": 2},
    "enum pattern": {"enum": ["a", "abc"], "pattern": "c$"},
    "const": {"const": "日本"},
    "const type": {"const": {"a": 1}, "type": "object"},
    "minimum": whole(minimum=3),
    "maximum": whole(maximum=5),
    "minimum maximum": whole(minimum=2, maximum=10),
    "exclusiveMinimum exclusiveMaximum": whole(exclusiveMinimum=2, exclusiveMaximum=5),
    "number minimum maximum": real(minimum=0.1, maximum=9.99),
    "number exclusiveMinimum maximum": real(exclusiveMinimum=0, maximum=1.5),
    "multipleOf": whole(multipleOf=5),
    "multipleOf minimum": whole(multipleOf=5, minimum=6),
    "multipleOf maximum": whole(multipleOf=3, maximum=12),
    "number multipleOf": real(multipleOf=0.5),
    "number multipleOf minimum maximum": real(multipleOf=0.5, minimum=1, maximum=3),
    "items": array(items=whole()),
    "minItems": array(minItems=2),
    "maxItems": array(maxItems=2),
    "items minItems maxItems": array(items=whole(), minItems=2, maxItems=3),
    "prefixItems": array(prefixItems=[whole(), text()]),
    "prefixItems items": array(prefixItems=[whole(), text()], items=False),
    "prefixItems minItems": array(prefixItems=[whole(), text()], minItems=2),
    "properties": thing(properties={"a": whole()}),
    "properties required": thing(properties={"a": whole()}, required=["a"]),
    "required": thing(required=["a"]),
    "properties additionalProperties": thing(properties={"a": whole()}, additionalProperties=False),
    "additionalProperties": thing(additionalProperties=text()),
    "patternProperties additionalProperties": thing(patternProperties={"^x_": whole()}, additionalProperties=False),
    "minProperties": thing(minProperties=1),
    "minProperties required": thing(properties=AB, required=["a", "b"], minProperties=3),
    "maxProperties": thing(maxProperties=1),
    "maxProperties properties": thing(properties=AB, maxProperties=1, additionalProperties=False),
    "anyOf": {"anyOf": [text(maxLength=1), whole(minimum=5)]},
    "anyOf minLength": {"type": "string", "minLength": 3, "anyOf": [{"pattern": "^a"}, {"pattern": "^A"}]},
    "anyOf properties": thing(properties=AB, anyOf=[{"required": ["a"]}, {"required": ["b"]}]),
    "oneOf": {"oneOf": [text(), whole()]},
    "oneOf const": {
        "oneOf": [
            thing(properties={"kind": {"const": kind}, "v": value}, required=["kind", "v"])
            for kind, value in (("x", whole()), ("y", text()))
        ]
    },
    "allOf": {"allOf": [text(minLength=2), text(maxLength=3)]},
    "allOf pattern": {"allOf": [text(pattern="^a"), text(pattern="c$")]},
    "allOf properties": {"allOf": [thing(properties={p: whole()}, required=[p]) for p in "ab"]},
    "allOf minimum": whole(minimum=3, allOf=[{"maximum": 5}]),
    "$ref": {"$ref": "#/$defs/p", "$defs": {"p": whole(minimum=3)}},
    "$ref maximum": {"$ref": "#/$defs/p", "maximum": 5, "$defs": {"p": whole(minimum=3)}},
    "$ref recursive": {
        "$ref": "#/$defs/n",
        "$defs": {
            "n": thing(properties={"a": {"anyOf": [{"$ref": "#/$defs/n"}, whole()]}}, additionalProperties=False)
        },
    },
    "type list": {"type": ["string", "null"]},
    "type list minLength minimum": {"type": ["string", "integer"], "minLength": 3, "minimum": 3},
    "minimum without type": {"minimum": 3},
    "minLength without type": {"minLength": 3},
    "true": True,
    "annotations": text(title="t", description="d", default="x", examples=["y"], contentEncoding="base64"),
    "escapes": {"enum": ['q"q', "a\nb", "a\\", "😀"]},
    "property of any script": thing(properties={"日本 é": whole()}, required=["日本 é"], additionalProperties=False),
}
REFUSED: dict[str, Any] = {
    "uniqueItems": array(items=whole(), uniqueItems=True),
    "contains": array(contains=text()),
    "minContains": array(contains=whole(), minContains=2),
    "unevaluatedItems": array(prefixItems=[whole()], unevaluatedItems=False),
    "propertyNames": thing(propertyNames={"maxLength": 1}),
    "dependentRequired": thing(properties=AB, dependentRequired={"a": ["b"]}),
    "dependentSchemas": thing(dependentSchemas={"a": {"required": ["b"]}}),
    "unevaluatedProperties": thing(properties=AB, unevaluatedProperties=False),
    "minProperties": thing(minProperties=2),
    "minProperties properties": thing(properties=AB, minProperties=2),
    "if": thing(**{"if": {"required": ["a"]}, "then": {"required": ["b"]}}),
    "not": {"not": text()},
    "oneOf overlapping": {"oneOf": [whole(minimum=2), whole(maximum=5)]},
    "format unknown": text(format="nonsense"),
    "const maxLength": {"const": "abc", "maxLength": 2},
    "minimum maximum": whole(minimum=5, maximum=3),
    "pattern lookahead": text(pattern="^(?=a)b"),
    "multipleOf large": whole(multipleOf=10_007),
}


def accepts(schema: Any, written: str) -> bool:
    at = COMPILER.compile(Grammar.json_schema(schema)).matcher([0])
    for token in TOKENIZER.encode_within(written):
        if at.complete or at.error:
            return False
        at.advance(token)
    mask = np.empty((1, -(-TOKENIZER.vocab_size // 32)), np.int32)
    at.fill(mask)
    return bool(mask[0, 0] & 1)  # it may end here


@pytest.mark.parametrize("schema", KEPT.values(), ids=KEPT)
def test_a_schema_takes_exactly_what_fits(schema: Any) -> None:
    oracle = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    fitting = 0
    for value in VALUES:
        fits = oracle.is_valid(value)
        fitting += fits
        assert accepts(schema, json.dumps(value, ensure_ascii=False)) == fits, value
    assert fitting, "the table has nothing that fits"


@pytest.mark.parametrize("schema", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_kept_is_refused(schema: Any) -> None:
    with pytest.raises(ValueError, match=r"^grammar"):
        COMPILER.compile(Grammar.json_schema(schema))


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        (thing(properties={"a": whole()}), '{"\\u0061": "x"}'),  # a property under another spelling of its name
        (thing(properties={"a": whole()}), '{"a": 1, "a": "x"}'),
        (thing(patternProperties={"^b": whole()}, additionalProperties=text()), '{"\\u0062": "x"}'),
        (thing(maxProperties=1), '{"a": 1, "b": 2}'),
        (real(minimum=0, maximum=5), "1e3"),
        (whole(), "01"),
        (text(), '"\\ud83d"'),
        (thing(), "{}" + " "),
        (thing(), "{" + " " * 21 + "}"),
    ],
)
def test_what_parses_otherwise_than_it_looks_gets_past_no_schema(schema: Any, written: str) -> None:
    assert not accepts(schema, written)
