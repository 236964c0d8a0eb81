"""Masks against a reference that tries every token; ends, drafts and what grammars may not do."""

import random
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import regex
from tiny_tokenizers import byte_level, gguf_metadata, sentencepiece

from freewheel.grammar import Compiler, Matcher
from freewheel.grammar import compiler as compilers
from freewheel.grammar import matcher as matchers
from freewheel.models.tokenizer import Tokenizer
from freewheel.sampling import Grammar
from freewheel.speculative import DraftTree

# The logits are wider than the vocabulary; by a word and more, and by no bit of the last word.
TOKENIZERS = {
    "byte-level": (Tokenizer.from_gguf(gguf_metadata(byte_level(), "gpt2")), 40),
    "byte fallback": (Tokenizer.from_gguf(gguf_metadata(sentencepiece(), "llama")), 0),
}
ENDS = (0, 1)


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TOKENIZERS[request.param][0]


@pytest.fixture
def compiler(tokenizer: Tokenizer) -> Compiler:
    [padding] = [padding for known, padding in TOKENIZERS.values() if known is tokenizer]
    return Compiler(tokenizer, -(-tokenizer.vocab_size // 32) * 32 + padding)


def matcher(compiler: Compiler, grammar: Grammar, ends: Sequence[int] = ENDS) -> Matcher:
    return compiler.compile(grammar).matcher(ends)


def ids_of(mask: np.ndarray) -> set[int]:
    return {int(id) for id in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))}


def permitted(at: Matcher) -> set[int]:
    masks = np.full((1, at._grammar.words), -1, np.int32)
    at.fill(masks)
    return ids_of(masks[0])


def accepts(compiler: Compiler, grammar: Grammar, text: str, tokenizer: Tokenizer) -> bool:
    """Whether the model could write the text, token by token, and then end."""
    at = matcher(compiler, grammar)
    for token in tokenizer.encode_within(text):
        if token not in permitted(at):
            return False
        at.advance(token)
    return at.complete or permitted(at) >= set(ENDS)


def random_walk(at: Matcher, rng: random.Random, steps: int, check: Any = None) -> list[int]:
    tokens: list[int] = []
    for _ in range(steps):
        legal = permitted(at)
        if check is not None:
            check(tokens, legal)
        if at.complete or not legal - set(ENDS):
            break
        tokens.append(rng.choice(sorted(legal - set(ENDS))))
        at.advance(tokens[-1])
    return tokens


@pytest.mark.parametrize(
    "pattern", ["[0-9]{2}", "(the|then|dog )+", "[a-z ]*é?(你好|naïve)", "a?b?c?", "(ab|a)(bc|c)", " {2}x"]
)
@pytest.mark.parametrize("seed", range(2))
def test_masks_are_those_of_trying_every_token(
    compiler: Compiler, tokenizer: Tokenizer, pattern: str, seed: int
) -> None:
    """By another library's expressions, on bytes."""
    raw = "".join(chr(byte) for byte in pattern.encode()).replace("\xc3\xa9?", "(\xc3\xa9)?")  # each byte a character
    oracle = regex.compile(raw)
    texts = [tokenizer.token_bytes(id).decode("latin-1") for id in range(tokenizer.vocab_size)]

    def check(tokens: list[int], legal: set[int]) -> None:
        so_far = "".join(texts[token] for token in tokens)
        fit = {
            id
            for id, text in enumerate(texts)
            if text and id not in tokenizer.special_ids and oracle.fullmatch(so_far + text, partial=True)
        }
        ends = set(ENDS) if oracle.fullmatch(so_far) else set()
        assert legal == fit - set(ENDS) | ends, so_far

    random_walk(matcher(compiler, Grammar.regex(pattern)), random.Random(seed), 8, check)


def test_stop_ids_are_legal_exactly_where_the_grammar_can_end(compiler: Compiler, tokenizer: Tokenizer) -> None:
    [letter] = tokenizer.encode_within("e")  # an ordinary token may be a stop id, and another model's end as well
    ends = {*ENDS, letter, tokenizer.vocab_size - 1}
    at = matcher(compiler, Grammar.json_schema({"type": "string"}), sorted(ends))
    for token in tokenizer.encode_within('"th'):
        assert not permitted(at) & ends
        at.advance(token)
    assert not permitted(at) & ends
    at.advance(*tokenizer.encode_within('"'))
    assert permitted(at) == ends
    assert at.complete
    more = matcher(compiler, Grammar.regex("[a-d]+"), sorted(ends))
    more.advance(*tokenizer.encode_within("a"))
    assert permitted(more) > ends
    assert not more.complete


def test_after_an_end_that_is_ignored_the_output_is_free(compiler: Compiler, tokenizer: Tokenizer) -> None:
    at = matcher(compiler, Grammar.regex("a+"))
    at.advance(*tokenizer.encode_within("a"))
    assert not at.advance(ENDS[1])
    assert at.ended
    assert len(permitted(at)) == 32 * at._grammar.words


def test_no_special_or_padding_id_is_ever_legal(compiler: Compiler, tokenizer: Tokenizer) -> None:
    at = matcher(compiler, Grammar.regex(r"(?s:.*)"), ends=())
    legal = permitted(at)
    assert legal
    assert not legal & tokenizer.special_ids
    assert max(legal) < tokenizer.vocab_size


GRAMMARS = [
    Grammar.json_schema({"type": "object", "properties": {"a the": {"type": "string"}, "the dog": {"enum": [1, "é"]}}}),
    Grammar.json_object(),
    Grammar.regex("(the quick brown )+fox"),
    Grammar.cfg('start: e\ne: e "+" e | "(" e ")" | /[0-9]+/'),
]


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
@pytest.mark.parametrize("seed", range(3))
def test_masks_of_a_tree_are_those_of_its_paths(compiler: Compiler, grammar: Grammar, seed: int) -> None:
    rng = random.Random(seed)
    at = matcher(compiler, grammar)
    before = random_walk(at, rng, seed)
    guesses = []
    for _ in range(4):
        other = matcher(compiler, grammar)
        for token in before:
            other.advance(token)
        guesses.append([*random_walk(other, rng, 6), rng.randrange(300)])  # the last is mostly illegal
    tree = at.prune(DraftTree.merge(guesses, 20, 7, 4))
    masks = np.full((tree.rows, at._grammar.words), 7, np.int32)
    at.fill(masks, tree)
    paths = [[], *([int(token) for token in path if token >= 0] for path in tree.paths[1:])]
    for mask, path in zip(masks, paths):
        other = matcher(compiler, grammar)
        for token in [*before, *path]:
            assert token in permitted(other)
            other.advance(token)
        assert ids_of(mask) == permitted(other), path
    plain = matcher(compiler, grammar)
    for token in before:
        plain.advance(token)
    assert permitted(at) == permitted(plain)  # it is back where it was


def test_a_node_that_breaks_the_library_takes_no_other_with_it() -> None:
    """One that a draft has before others, deeper than the first."""
    known, _ = TOKENIZERS["byte-level"]
    compiler = Compiler(known, -(-known.vocab_size // 32) * 32)
    bomb = " ".join(["/[a-z]{0,100}/"] * 1500)
    a, b, c, d = (known.encode_within(sign)[0] for sign in "<>=!")
    for order in ((b, c), (c, b)):
        at = compiler.compile(Grammar.cfg(f'start: "<" (">" bomb | "=" "!")\nbomb: {bomb}')).matcher(ENDS)
        masks = np.full((4, at._grammar.words), -1, np.int32)
        at.fill(masks, DraftTree((a, *order), (-1, 0, 0)))
        assert ids_of(masks[1]) == {b, c}
        assert ids_of(masks[2 + order.index(c)]) == {d}
        assert permitted(at) == {a}


class Panic(BaseException):
    """What the library raises where it finds itself in disorder."""


class Disorder:
    """A matcher of the library that panics when it is asked for some things, or meets some token."""

    def __init__(self, made: Any, *asked: str, token: int = -1) -> None:
        self._made, self._asked, self._token = made, asked, token

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if name in self._asked or arguments == ([self._token],):
                raise Panic("index out of bounds\nin parser.rs")
            got = getattr(self._made, name)(*arguments)
            return Disorder(got, *self._asked, token=self._token) if name == "deep_copy" else got

        return call


PANICKED = "the grammar cannot go on: index out of bounds"


@pytest.mark.parametrize("asked", ["try_consume_tokens", "unsafe_compute_mask_ptr", "is_error"])
def test_a_panic_of_the_library_ends_its_own_sequence_alone(
    asked: str, compiler: Compiler, tokenizer: Tokenizer
) -> None:
    compiled = compiler.compile(Grammar("regex", "[ab]+"))
    other, sound = compiled.matcher(ENDS), compiled.start
    free = permitted(other)
    compiled.start = Disorder(sound, asked)
    at = compiled.matcher(ENDS)
    [token] = tokenizer.encode_within("a")
    at.forced(4)
    at.prune(DraftTree((token,), (-1,)))
    assert permitted(at) == set() or asked == "try_consume_tokens"
    assert not at.advance(token)
    assert at.error == PANICKED
    assert permitted(at) == set()
    assert permitted(other) == free != set()


def test_a_node_at_which_the_library_panics_takes_no_other_with_it(compiler: Compiler, tokenizer: Tokenizer) -> None:
    """Without a draft the sequence would not have met it."""
    compiled = compiler.compile(Grammar("regex", "[abd]+"))
    a, b, d = (tokenizer.encode_within(letter)[0] for letter in "abd")
    sound, draft = compiled.matcher(ENDS), DraftTree((a, b, d, a), (-1, 0, 0, -1))
    sound.advance(a)
    compiled.start = Disorder(compiled.start, token=b)
    at = compiled.matcher(ENDS)
    at.advance(a)
    assert at.prune(draft) == DraftTree((a, d, a), (-1, 0, -1))
    masks, expected = (np.full((5, at._grammar.words), -1, np.int32) for _ in range(2))
    at.fill(masks, draft)
    sound.fill(expected, draft)
    assert not masks[2].any()
    np.testing.assert_array_equal(np.delete(masks, 2, 0), np.delete(expected, 2, 0))
    assert at.error is None
    assert permitted(at) == permitted(sound)


def test_a_bug_of_ours_is_no_fault_of_the_grammar(compiler: Compiler) -> None:
    at = matcher(compiler, Grammar("regex", "[ab]+"))
    with pytest.raises(IndexError):
        at.fill(np.zeros((0, at._grammar.words), np.int32))


def test_a_panic_before_the_first_token_is_an_error_of_the_sequence(compiler: Compiler) -> None:
    compiled = compiler.compile(Grammar("regex", "[ab]+"))
    compiled.start = Disorder(compiled.start, "deep_copy")
    at = compiled.matcher(ENDS)
    assert at.error == PANICKED
    assert permitted(at) == set()
    assert not at.complete
    assert compiler.compile(Grammar("regex", "[ab]+")).matcher(ENDS).error is None  # made anew


def test_what_the_grammar_forbids_is_cut_from_a_draft(compiler: Compiler, tokenizer: Tokenizer) -> None:
    a, b, end = *tokenizer.encode_within("a"), *tokenizer.encode_within("b"), ENDS[0]
    at = matcher(compiler, Grammar.regex("a(a|b)*"))
    tree = DraftTree.merge([[a, b, a], [b, a], [a, a, end, a], [a, b, end]], 20, 9, 9)
    assert at.prune(tree) == DraftTree.merge([[a, b, a], [a, a]], 20, 9, 9)
    assert at.prune(DraftTree((b,), (-1,))) == DraftTree()
    kept = DraftTree.merge([[a, b]], 20, 9, 9)
    assert at.prune(kept) is kept


def test_forced_tokens_are_the_tokenizer_s_own(compiler: Compiler, tokenizer: Tokenizer) -> None:
    at = matcher(compiler, Grammar.choice(["the quick brown fox jumps over"]))
    forced = at.forced(99)
    text = b"".join(map(tokenizer.token_bytes, forced))
    assert len(text) > 20
    assert b"the quick brown fox jumps over".startswith(text)
    assert forced == tokenizer.encode_within("the quick brown fox jumps over")[:-1]
    assert at.forced(2) == forced[:2]
    assert at.prune(DraftTree(tuple(forced), tuple(range(-1, len(forced) - 1)))).tokens == tuple(forced)


@pytest.mark.parametrize("text", ["日本", "naïve", "😀", "👩‍👩‍👧", 'a"b', "a\\b", "a\nb", "Привет"])
def test_texts_of_any_script_are_met_exactly(compiler: Compiler, tokenizer: Tokenizer, text: str) -> None:
    import json

    for ascii_only in (True, False):  # supplied raw, and as escapes
        schema = json.dumps({"enum": [text]}, ensure_ascii=ascii_only)
        written = json.dumps(text, ensure_ascii=False)
        assert accepts(compiler, Grammar.json_schema(schema), written, tokenizer)
        assert not accepts(compiler, Grammar.json_schema(schema), json.dumps(f"{text}!"), tokenizer)
        keyed = json.dumps({"type": "object", "properties": {text: {}}, "required": [text]}, ensure_ascii=ascii_only)
        assert accepts(compiler, Grammar.json_schema(keyed), f"{{{written}: 1}}", tokenizer)
    assert accepts(compiler, Grammar.choice([f"{text}x", text]), text, tokenizer)
    at = matcher(compiler, Grammar.choice([text]))
    for byte in text.encode():  # characters may be split over tokens
        token = next(id for id in permitted(at) if tokenizer.token_bytes(id) == bytes([byte]))
        at.advance(token)
    assert at.complete


def test_context_free_grammars_come_in_either_notation(compiler: Compiler, tokenizer: Tokenizer) -> None:
    for text in (
        'root ::= "(" root ")" | [à-ü]+ # comment\n',
        'start: "(" start ")" | /[à-ü]+/ // comment: %json < x[temperature=1]:\n',
    ):
        grammar = Grammar.cfg(text)
        assert accepts(compiler, grammar, "((é))", tokenizer)
        assert not accepts(compiler, grammar, "((é)", tokenizer)


WRONG = [
    ("json_schema", "{", "not JSON"),
    ("json_schema", "[1]", "JSON schema"),
    ("json_schema", "NaN", "NaN"),
    ("json_schema", "false", "JSON schema"),
    ("json_schema", '{"type": "text"}', "Invalid type"),
    ("json_schema", '{"type": "string", "format": "nonsense"}', "Unknown format"),
    ("json_schema", '{"x-guidance": {"lenient": true}}', "x-guidance"),
    ("json_schema", '{"$ref": "#"}', "no first token"),
    ("json_schema", '{"$ref": "https://example.org/schema"}', "cannot be compiled"),
    ("json_schema", '{"type": "object", "minProperties": 2}', "minProperties"),
    ("json_schema", '{"type": "integer", "multipleOf": 999983}', "multipleOf"),
    ("json_schema", "[" * 10_000, "nested too deeply"),
    ("json_schema", '{"a":' * 900 + "1" + "}" * 900, "nested too deeply|recursion"),
    ("json_schema", '{"items":' * 300 + "{}" + "}" * 300, "recursion"),
    ("regex", "([", "cannot be compiled"),
    ("regex", "a(?=b)", "cannot be compiled"),
    ("choice", "[]", "to choose from"),
    ("choice", "[1]", "to choose from"),
    ("cfg", "start: ((", "cannot be compiled"),
    ("cfg", "start: other", "unknown name"),
    ("cfg", "start: start", "no first token"),
    ("cfg", "root ::= ((", "cannot be compiled"),
    ("cfg", "root ::= " + "(" * 50_000, "cannot be compiled"),
    ("cfg", "nothing", "cannot be compiled"),
    ("cfg", 'start: %json {"type": "string"}', "JSON schemas inside"),
    ("cfg", "%llguidance {}\nstart: /a/", "options"),
    ("cfg", "start: <|end|>", "special tokens"),
    ("cfg", "start[max_tokens=2]: /a+/", "attributes"),
]


@pytest.mark.parametrize(("kind", "text", "message"), WRONG, ids=lambda value: value[:20])
def test_a_wrong_grammar_is_refused_by_name_every_time(compiler: Compiler, kind: Any, text: str, message: str) -> None:
    for _ in range(2):  # alone, and after one that is right
        with pytest.raises(ValueError, match=f"^grammar.*({message})") as error:
            compiler.compile(Grammar(kind, text))
        assert len(str(error.value)) < 500
        assert permitted(matcher(compiler, Grammar.regex("[0-9]")))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Grammar("xml", "<a>"),  # type: ignore[arg-type]
        lambda: Grammar("regex", 3),  # type: ignore[arg-type]
        lambda: Grammar("regex", "a" * 2**18),
        lambda: Grammar("cfg", ""),
        lambda: Grammar("regex", "\ud800"),
        lambda: Grammar.choice("abc"),
        lambda: Grammar.choice([]),
        lambda: Grammar.choice([1]),  # type: ignore[list-item]
        lambda: Grammar.json_schema({"const": float("nan")}),
        lambda: Grammar.json_schema({"const": object()}),
    ],
)
def test_what_is_no_grammar_is_refused_when_it_is_made(make: Any) -> None:
    with pytest.raises(ValueError, match=r"^grammar"):
        make()


def test_a_compiled_grammar_is_kept_and_a_failure_is_not(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = Grammar.regex("[0-9]+")
    compile = compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda grammar: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compiler.compile(grammar)
    monkeypatch.setattr(compiler, "_compile", compile)
    first = compiler.compile(grammar)
    assert compiler.compile(Grammar.regex("[0-9]+")) is first
    for i in range(compilers.KEPT):
        compiler.compile(Grammar.regex(f"a{i}"))
    assert len(compiler._kept) == compilers.KEPT
    assert compiler.compile(grammar) is not first


EXPLODING = [
    Grammar.cfg('start: s\ns: s s | "a" | "b"'),
    Grammar.cfg('start: a{1,1000}\na: b{1,1000}\nb: c{1,1000}\nc: "a"'),
    Grammar.regex("(a{1,1000}){1,1000}"),
    Grammar.regex("(.*a){200}"),
    Grammar.json_schema({"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(20)]}),
    Grammar.json_schema({"type": "object", "properties": {f"p{i}": {} for i in range(3000)}}),
]


@pytest.mark.parametrize("tokenizer", ["byte-level"], indirect=True)
@pytest.mark.parametrize("grammar", EXPLODING, ids=range(len(EXPLODING)))
def test_a_grammar_that_explodes_ends_its_own_matchers_in_bounded_time(
    compiler: Compiler, tokenizer: Tokenizer, grammar: Grammar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matchers, "DEBT", 0.05)
    [a] = tokenizer.encode_within("a")
    began = time.process_time()
    at = None
    with suppress(ValueError):  # it may be refused at once
        at = matcher(compiler, grammar)
    assert time.process_time() - began < 20
    if at is None:
        return
    for _ in range(100):
        legal = permitted(at)
        if at.error:
            assert not permitted(at)
            assert at.error.startswith("the grammar")
            monkeypatch.setattr(matchers, "DEBT", 60.0)  # or a first mask on a slow machine is refused
            assert matcher(compiler, grammar).error is None  # others begin anew
            break
        if at.complete or not legal:
            break
        at.advance(a if a in legal else min(legal))
    assert time.process_time() - began < 40


@pytest.mark.parametrize("tokenizer", ["byte-level"], indirect=True)
def test_a_draft_that_goes_too_far_spoils_nothing(compiler: Compiler, tokenizer: Tokenizer) -> None:
    """A limit that is met at a deep node only: its row has no token, and the others are as they are without it."""
    [a] = tokenizer.encode_within("a")
    grammar = Grammar.cfg('start: a{1,1000}\na: b{1,1000}\nb: c{1,1000}\nc: "a"')
    at = matcher(compiler, grammar)
    depth = 0
    plain = matcher(compiler, grammar)
    while permitted(plain):
        plain.advance(a)
        depth += 1
    assert plain.error
    chain = at.prune(DraftTree((a,) * (depth + 2), tuple(range(-1, depth + 1))))
    masks = np.zeros((chain.rows, at._grammar.words), np.int32)
    at.fill(masks, chain)
    assert at.error is None
    assert [bool(ids_of(mask)) for mask in masks[: depth + 1]] == [True] * depth + [False] * (chain.rows > depth)
    assert permitted(at) == ids_of(masks[0])
    for _ in range(depth):
        assert permitted(at)
        at.advance(a)
    assert not permitted(at)


LONG = ['start: "' + '\\"' * 60_000, "\n" * 120_000, "a" * 120_000, "/" * 120_000, "start: /" + "\\/" * 60_000]
LONG += ["start[" * 20_000, "root ::= " + '"a" | ' * 3_000 + "(", "root ::= [" * 12_000, "root ::= " + "a" * 100_000]


@pytest.mark.parametrize("tokenizer", ["byte-level"], indirect=True)
@pytest.mark.parametrize("text", LONG, ids=range(len(LONG)))
def test_no_text_takes_long_to_refuse(compiler: Compiler, text: str) -> None:
    began = time.process_time()
    with pytest.raises(ValueError, match=r"^grammar"):
        compiler.compile(Grammar.cfg(text))
    assert time.process_time() - began < 10


def test_the_library_s_absence_has_a_clear_error(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"^grammar needs llguidance.*\[grammar\]"):
        compiler.compile(Grammar.regex("a"))
