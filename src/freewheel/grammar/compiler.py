"""Compiles grammars for one tokenizer, and keeps the latest."""

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from freewheel.grammar.matcher import MAX_MESSAGE, Matcher
from freewheel.grammar.notation import (
    ESCAPES,
    WHITE_SPACE,
    GrammarError,
    calls_lark,
    check_lark,
    checked_schema,
    choice_regex,
)

if TYPE_CHECKING:
    from freewheel.models.tokenizer import Tokenizer
    from freewheel.sampling import Grammar

KEPT = 32  # compiled grammars; each may grow to some 20 MB, by the limit of lexer states

# The library counts these, so the same grammar is refused wherever and whenever. By default one may take half a GB.
LIMITS = {"max_lexer_states": 10_000, "max_grammar_size": 200_000, "step_max_items": 20_000, "verbose_errors": False}


# By default a mask permits one token alone where only one text can follow, and with it a bad word could leave nothing.
EXACT = '%llguidance {"no_forcing": true}\n'


class CompiledGrammar:
    """A grammar that many sequences follow, each with a :meth:`matcher` of its own.

    Attributes:
        start: the library's matcher, which only copies leave.
        vocab_size: width of the logits.
        encode: text to ids.
        words: of a mask.
        past: ids that are bits of a mask, and not of the vocabulary.
        worn: a matcher has met a limit of what they share; whoever comes next has to compile it anew.
    """

    def __init__(self, start: Any, vocab_size: int, encode: Callable[[str], list[int]]) -> None:
        self.start, self.vocab_size, self.encode = start, vocab_size, encode
        self.words = -(-vocab_size // 32)
        self.past = range(vocab_size, 32 * self.words)
        self.worn = False

    def matcher(self, end_ids: Iterable[int]) -> Matcher:
        """One that stands at the beginning.

        Args:
            end_ids: ids that may end a sequence: they are legal where the grammar can end.
        """
        return Matcher(self, end_ids)


class Compiler:
    """Compiles for one model. Safe to use from many threads.

    Args:
        tokenizer: the model's.
        vocab_size: width of the logits; a mask has a bit for each, 32 in a word.
    """

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._known: Any = None  # what the library makes of the tokenizer
        self._kept: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._lock, self._preparing = Lock(), Lock()

    def compile(self, grammar: "Grammar") -> CompiledGrammar:
        """What a grammar means for this model. Takes up to seconds, and no more memory than the limits say.

        Raises:
            ValueError: the grammar is wrong, too large, or cannot be kept to the letter; or the library is not
                installed.
        """
        with self._lock:
            found = self._kept.get(grammar)
            if found is not None and not found.worn:
                self._kept.move_to_end(grammar)
                return found
        compiled = self._compile(grammar)
        with self._lock:
            self._kept[grammar] = compiled
            self._kept.move_to_end(grammar)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return compiled

    def prepare(self) -> None:
        """Tell the library the vocabulary, which takes a second if that is large; else the first grammar waits for it.

        Raises:
            ValueError: the library is not installed.
        """
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ModuleNotFoundError:
            raise ValueError(
                "grammar needs llguidance, which is missing: install freewheel with its extra, as in "
                "pip install -e '.[grammar]'"
            ) from None
        with self._preparing:
            if self._known is None:
                vocabulary = TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocab_size))
                self._known = LLTokenizer(vocabulary, n_vocab=self._vocab_size + 1)

    def _compile(self, grammar: "Grammar") -> CompiledGrammar:
        self.prepare()
        from llguidance import LLMatcher, LLParserLimits

        try:
            source = _source(grammar)
            start = LLMatcher(self._known, source, log_level=0, limits=LLParserLimits(**LIMITS))
            said = start.get_error() if start.is_error() else None
        except (GrammarError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library's own panics are no Exception
            raise ValueError(f"grammar cannot be compiled: {str(error)[:MAX_MESSAGE]}") from None
        if said is not None:
            raise ValueError(f"grammar cannot be compiled: {said.strip().splitlines()[0][:MAX_MESSAGE]}")
        compiled = CompiledGrammar(start, self._vocab_size, self._tokenizer.encode_within)
        first = compiled.matcher([])
        first.fill(np.empty((1, compiled.words), np.int32))
        if first.error is not None:
            raise ValueError(f"grammar permits no first token: {first.error}")
        return compiled


class _Vocabulary:
    """What the library asks of a tokenizer. Its only end is an id past the vocabulary: who ends how is known here."""

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int) -> None:
        self.tokens = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
        self.tokens += [b""] * (vocab_size - len(self.tokens)) + [b"<end>"]
        self.special_token_ids = [*sorted(tokenizer.special_ids), vocab_size]
        self.bos_token_id, self.eos_token_id = None, vocab_size
        self._encode = tokenizer.encode_within

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode())


def _source(grammar: "Grammar") -> str:
    """The grammar as the library takes it."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    match grammar.kind:
        case "json_schema":
            return _with_schemas("start: @schema", {"schema": grammar.text})
        case "tool_calls":
            return _with_schemas(*calls_lark(grammar.text))
        case "cfg":
            text = grammar.text
            if "::=" in text:
                text = gbnf_to_lark(text).removeprefix("%llguidance {}")  # an option that says nothing
            check_lark(text)
        case "regex" | "choice":
            pattern = choice_regex(grammar.text) if grammar.kind == "choice" else grammar.text
            [made] = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"]
            text = made["lark_grammar"]
    return LLMatcher.grammar_from_lark(EXACT + text)


def _with_schemas(text: str, schemas: Mapping[str, str]) -> str:
    """A grammar that names schemas."""
    from llguidance import LLMatcher

    grammars: list[Any] = [{"lark_grammar": EXACT + text}]
    options: Any = {"whitespace_pattern": WHITE_SPACE, "json_allowed_escapes": ESCAPES}
    for name, schema in schemas.items():
        made = LLMatcher.grammar_from_json_schema(checked_schema(schema), overrides=options)
        grammars += [{**one, "name": name} for one in json.loads(made)["grammars"]]
    return json.dumps({"grammars": grammars})
