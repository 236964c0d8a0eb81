"""Text to token ids and back.

Encoding follows whoever trained the model: ``tokenizer.json`` through the ``tokenizers`` library for a folder, and for
a GGUF file, which names its pre-tokenizer and stores vocabulary, merges or scores, what the original tokenizer did (see
:mod:`freewheel.models.gguf_tokenizer`).

Decoding has one rule for every tokenizer: a token is a fixed run of bytes, the text is the UTF-8 reading of their
concatenation, and bytes that are not UTF-8 become U+FFFD, one for each maximal broken sequence (Unicode 16, section
3.9, as Python's ``errors="replace"``). That makes exact streaming possible in constant memory. On well-formed output it
equals ``tokenizers``' own decoding; they differ when byte-fallback tokens form a broken sequence (that library then
replaces every byte of the run of byte tokens, sound characters included) and when the first token is a run of spaces
under its ``Metaspace`` decoder (it drops them all; SentencePiece drops one).
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import tokenizers

    from freewheel.models.chat_template import Message

# A noncharacter, which no text should hold, and no message may: put into a special token that is written out, it keeps
# that token from being found, and is then left out.
_GUARD = "\ufdd0"


class Encoder(Protocol):
    def encode(self, text: str, ignored: str = "") -> list[int]:
        """Ids of ``text``. Characters in ``ignored`` keep added tokens from being found and are then left out."""
        ...


class Tokenizer:
    """A model's tokenizer and chat template. Built by :meth:`from_folder` or :meth:`from_gguf`; safe to share.

    Special tokens written out in a text given to :meth:`encode` become their ids, so that a raw prompt can spell a chat
    format (as in vLLM and transformers). In :meth:`encode_chat` only the template's own do: what a message says, it
    says as ordinary text. That holds for special and end tokens, and for other added tokens that the template writes
    as markers, but for those that it looks for in messages (a reply's ``</think>``, to leave its reasoning out).

    Attributes:
        vocab_size: one more than the largest id the tokenizer knows (a model may have more rows, for padding).
        bos_token_id: beginning of text, None if there is none.
        eos_token_ids: every id that ends a text: of configuration, generation configuration and tokenizer.
        special_ids: control and end tokens, which ``skip_special_tokens`` leaves out.
        chat_template: the default template's source, None if there is none.
        leading_spaces: spaces that decoding drops from the beginning of a text (encoding had added them).
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        token_text: Callable[[int], str | None],
        text_bytes: Callable[[str], bytes],
        vocab_size: int,
        special_ids: Iterable[int],
        added_ids: Iterable[int],
        bos_token_id: int | None,
        eos_token_ids: Iterable[int],
        prefix_ids: Sequence[int] = (),
        suffix_ids: Sequence[int] = (),
        leading_spaces: int = 0,
        chat_templates: Mapping[str, str] | None = None,
        named_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """What :meth:`from_folder` and :meth:`from_gguf` find out.

        Args:
            encoder: text to ids, without the ids that begin and end a text.
            token_text: a token as the vocabulary spells it, None for an unknown id.
            text_bytes: the bytes that such a spelling stands for.
            added_ids: tokens that encoding finds in the raw text, before anything else.
            prefix_ids: what begins every encoded text (a beginning-of-text token); suffix_ids: what ends it.
            chat_templates: sources by name; "default", and possibly "tool_use".
            named_tokens: "bos_token" and the like to their texts, for templates.
        """
        self._encoder = encoder
        self._token_text = token_text
        self._text_bytes = text_bytes
        self._bytes: dict[int, bytes] = {}
        self.vocab_size = vocab_size
        self.bos_token_id = bos_token_id
        self.eos_token_ids = frozenset(eos_token_ids)
        self.special_ids = self.eos_token_ids.union(special_ids)
        self._added_ids = frozenset(added_ids)
        self._prefix_ids = list(prefix_ids)
        self._suffix_ids = list(suffix_ids)
        self.leading_spaces = leading_spaces
        self._chat_templates = dict(chat_templates or {})
        self._named_tokens = dict(named_tokens or {})

    @staticmethod
    def from_folder(path: str | Path) -> "Tokenizer":
        """The tokenizer of a folder in the Hugging Face layout.

        Raises:
            ModelError: a file is missing, broken, or describes a tokenizer that cannot be streamed.
        """
        from freewheel.models.folder_tokenizer import folder_tokenizer

        return folder_tokenizer(Path(path))

    @staticmethod
    def from_gguf(metadata: Mapping[str, Any]) -> "Tokenizer":
        """The tokenizer in a GGUF file's metadata (``tokenizer.ggml.*``, ``tokenizer.chat_template``).

        Raises:
            ModelError: a key is missing or inconsistent, or the tokenizer is of a kind not supported here.
        """
        from freewheel.models.gguf_tokenizer import gguf_tokenizer

        return gguf_tokenizer(metadata)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``; a special token that is written out in it becomes its id.

        ``add_special_tokens`` adds what the model's texts begin with, unless ``text`` already does, and end with.

        Raises:
            ValueError: ``text`` holds a lone surrogate, which no encoding can carry.
        """
        ids = self._encode(text)
        return self._begin(ids) + self._suffix_ids if add_special_tokens else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; ids that the tokenizer does not know are empty."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        text = b"".join([self.token_bytes(id) for id in ids if id not in skipped]).decode("utf-8", "replace")
        return strip_spaces(text, self.leading_spaces)

    def token_bytes(self, id: int) -> bytes:
        """The bytes that token ``id`` adds to a text; empty for an id that the tokenizer does not know."""
        data = self._bytes.get(id)
        if data is None:
            text = self.token_text(id)
            data = self._bytes[id] = b"" if text is None else self._text_bytes(text)
        return data

    def token_text(self, id: int) -> str | None:
        """Token ``id`` as the vocabulary spells it (``Ġthe``, ``▁the``), None for an id that it does not have."""
        return self._token_text(id) if 0 <= id < self.vocab_size else None

    @cached_property
    def longest(self) -> int:
        """Characters of the longest token as the vocabulary spells it: no token stands for more of a text."""
        return max((len(self.token_text(id) or "") for id in range(self.vocab_size)), default=0)

    @property
    def chat_template(self) -> str | None:
        return self._chat_templates.get("default")

    @property
    def knows_tools(self) -> bool:
        """Whether a chat template writes tools into the conversation."""
        return "tool_use" in self._chat_templates or "tools" in (self.chat_template or "")

    def apply_chat_template(
        self,
        messages: "Sequence[Message]",
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The conversation as the model's template writes it, for reading; :meth:`encode_chat` gives its ids.

        Args:
            messages: mappings with ``role`` and ``content`` (text, a list of text parts, or None).
            tools: JSON schemas of functions, for templates that know them.
            add_generation_prompt: end with what begins the assistant's turn.
            variables: further variables of the template (``enable_thinking=False``...).

        Raises:
            ValueError: there is no template, the messages are malformed or hold U+FDD0, a variable has a name that is
                taken, or the template rejects the messages.
        """
        return self._render(messages, tools, add_generation_prompt, variables).replace(_GUARD, "")

    def encode_chat(
        self,
        messages: "Sequence[Message]",
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> tuple[list[int], str]:
        """Ids and text of the conversation.

        The ids begin with the model's beginning-of-text token whether or not the template writes it. A special token
        that is written out in ``messages``, ``tools`` or ``variables`` stays ordinary text: nobody can end a turn, or
        begin another role's, from within a message. The template sees such a token with U+FDD0 between its characters,
        so it does not find it either. Arguments and errors as in :meth:`apply_chat_template`.
        """
        text = self._render(messages, tools, add_generation_prompt, variables)
        ids = self._begin(self._encode(text, _GUARD if _GUARD in text else ""))
        return ids, text.replace(_GUARD, "")

    def _render(
        self,
        messages: "Sequence[Message]",
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The conversation with every special token in it that is not the template's own broken by noncharacters."""
        from freewheel.models.chat_template import render

        source = self._chat_templates.get("tool_use") if tools else None
        source = source or self.chat_template
        if source is None:
            raise ValueError("this model has no chat template: give it a prompt to complete")
        try:
            messages, tools, variables = self._guard(messages), self._guard(tools), self._guard(variables)
        except RecursionError as error:
            raise ValueError("messages, tools or variables are nested too deeply") from error
        variables = {"add_generation_prompt": add_generation_prompt, **self._named_tokens, **variables}
        return render(source, messages, tools or None, variables)

    def bad_word_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Token sequences that spell ``words``: each within a text and after a space, without duplicates.

        Only a word's own tokenisations are found: not one that begins or ends inside another token.

        Raises:
            ValueError: a word is empty.
        """
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            if not word.strip():
                raise ValueError("bad_words must not hold an empty word")
            for text in (word, f" {word.lstrip()}"):
                sequences.setdefault(tuple(self.encode_within(text)))
        return [list(ids) for ids in sequences]

    def _encode(self, text: str, ignored: str = "") -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text holds a lone surrogate at character {error.start}") from error
        return self._encoder.encode(text, ignored)

    def _begin(self, ids: list[int]) -> list[int]:
        return ids if ids[: len(self._prefix_ids)] == self._prefix_ids else self._prefix_ids + ids

    def encode_within(self, text: str) -> list[int]:
        """Ids of ``text`` where it does not begin a text, so that no space is put before it."""
        if not self.leading_spaces:
            return self._encode(text)
        # A line break goes first: no piece of such vocabularies joins it with what follows.
        ids, data = self._encode(f"\n{text}"), b""
        for count, id in enumerate(ids, 1):
            data += self.token_bytes(id)
            if data.endswith(b"\n"):
                return ids[count:]
        return self._encode(text)

    def _guard(self, value: Any) -> Any:
        """``value`` with noncharacters in every special token, or part of one at an end, that its strings spell."""
        if isinstance(value, str):
            _, heads, tails, longest = self._guarded
            # Two strings, or a string and the template, may make a special token together.
            before = any(value[:length] in tails for length in range(1, longest))
            after = any(value[-length:] in heads for length in range(1, longest))
            return _GUARD * before + self._broken(value) + _GUARD * after
        if isinstance(value, Mapping):
            keys = (self._broken(key) if isinstance(key, str) else key for key in value)
            return dict(zip(keys, map(self._guard, value.values())))
        if isinstance(value, list | tuple):
            return [self._guard(item) for item in value]
        return value

    def _broken(self, text: str) -> str:
        if _GUARD in text:
            raise ValueError("messages, tools and variables must not hold U+FDD0, which is not a character")
        # After each character, as the end of one special token may be the beginning of another.
        return self._guarded[0].sub(lambda found: "".join(f"{c}{_GUARD}" for c in found[0]), text)

    @cached_property
    def _guarded(self) -> tuple[re.Pattern[str], set[str], set[str], int]:
        """What finds the tokens that messages must not spell, their beginnings and ends, and the longest's length."""
        from freewheel.models.chat_template import is_marker

        added = {id: text for id in self._added_ids if (text := self.token_text(id))}
        named = set(self._named_tokens.values())
        sources = self._chat_templates.values()
        texts = [
            text
            for id, text in added.items()
            if id in self.special_ids or text in named or any(is_marker(text, source) for source in sources)
        ]
        texts.sort(key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        # One part of each cut has the token's punctuation. Letters alone end or begin too much, roles above all.
        cuts = [(text[:cut], text[cut:]) for text in texts for cut in range(1, len(text))]
        heads = {head for head, _ in cuts if not head.isalnum()}
        tails = {tail for _, tail in cuts if not tail.isalnum()}
        return pattern, heads, tails, max(map(len, texts), default=0)


def strip_spaces(text: str, count: int) -> str:
    """``text`` without its first spaces, at most ``count``."""
    return text[min(count, len(text) - len(text.lstrip(" "))) :] if count else text


def byte_level_bytes(text: str) -> bytes:
    """Bytes of a token that spells each byte as a character (GPT-2's table, as every byte-level BPE has it)."""
    try:
        return bytes([_BYTE_OF[character] for character in text])
    except KeyError:  # an added token, spelled as it is
        return text.encode()


def _byte_characters() -> dict[str, int]:
    # Printable Latin-1 stands for itself; the other bytes, in order, for the characters from U+0100 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_characters()


LONG = 4096  # characters from which on other threads should not wait


class LibraryEncoder:
    """An encoder of the ``tokenizers`` library."""

    def __init__(self, backend: "tokenizers.Tokenizer") -> None:
        self._backend = backend
        self._guarded: tokenizers.Tokenizer | None = None

    def encode(self, text: str, ignored: str = "") -> list[int]:
        backend = self._backend
        if ignored:
            backend = self._guarded = self._guarded or self._ignoring(ignored)
        if len(text) < LONG:
            return backend.encode(text, add_special_tokens=False).ids
        # As a batch, for which the library lets other threads run; and without offsets, which take most of its time.
        return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _ignoring(self, ignored: str) -> "tokenizers.Tokenizer":
        """A twin with the same model, whose normaliser, which runs once added tokens are found, drops ``ignored``."""
        from tokenizers import AddedToken, Tokenizer, normalizers

        twin = Tokenizer(self._backend.model)
        own = self._backend.normalizer
        dropping: list[normalizers.Normalizer] = [normalizers.Replace(character, "") for character in ignored]
        twin.normalizer = normalizers.Sequence(dropping if own is None else [*dropping, own])
        if self._backend.pre_tokenizer is not None:
            twin.pre_tokenizer = self._backend.pre_tokenizer
        for _, token in sorted(self._backend.get_added_tokens_decoder().items()):
            # Found in the raw text, or those spelled out would be found once the noncharacters are gone.
            raw = AddedToken(
                token.content, single_word=token.single_word, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False
            )
            twin.add_tokens([raw])
        return twin
