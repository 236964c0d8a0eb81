"""Tokenizers from folders and GGUF metadata; the tokenizers library and llama.cpp are the oracles."""

import json
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import byte_level, gguf_metadata, sentencepiece, tokenizer_metadata, write_folder
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models

from freewheel.models.errors import ModelError
from freewheel.models.gguf import read_gguf
from freewheel.models.store import resolve
from freewheel.models.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
# Pieces of text that tokenizers treat differently: words, numbers, code, spaces, scripts, joiners, special tokens.
FRAGMENTS = [
    *"aeiou .,'\"<>/_-\n\t▁0123456789éё你😀\u200d\u0301\x00",
    *[
        "the ",
        " fox",
        "  ",
        "    ",
        "\n\n",
        "'s",
        "привет",
        "世界",
        "<s>",
        "</s>",
        "<|end|>",
        "<|start|>",
        "<think>",
        "½",
        "Ⅷ",
    ],
]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


def from_library(folder: Path, name: str, library: LibraryTokenizer, **files: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_folder(write_folder(folder / name, library, **files))


@pytest.fixture(scope="session")
def chat(folder: Path) -> Tokenizer:
    return from_library(
        folder, "chat", byte_level(), tokenizer_config={"chat_template": TEMPLATE, "eos_token": "<|end|>"}
    )


def templated(template: str | list[dict[str, str]], **named: str) -> Tokenizer:
    """A byte-level tokenizer with a chat template, through GGUF metadata or a list as in tokenizer_config.json."""
    assert isinstance(template, str)
    return Tokenizer.from_gguf(gguf_metadata(byte_level(), "gpt2") | {"tokenizer.chat_template": template} | named)


LIBRARIES = {
    "byte-level": byte_level(),
    "byte-level with digits": byte_level(digits=True),
    "llama": sentencepiece(),
    "gemma": sentencepiece(space_prefix=False),
    "metaspace": sentencepiece(metaspace=True),
}


@pytest.fixture(scope="session", params=LIBRARIES)
def pair(request: pytest.FixtureRequest, folder: Path) -> tuple[Tokenizer, LibraryTokenizer]:
    library = LIBRARIES[request.param]
    return from_library(folder, request.param, library), library


class TestFolder:
    @given(text=texts)
    def test_ids_and_text_are_the_librarys(self, pair: tuple[Tokenizer, LibraryTokenizer], text: str) -> None:
        tokenizer, library = pair
        ids = library.encode(text).ids
        assert tokenizer.encode(text) == ids or ids[:2] == [1, 1]  # the library doubles a beginning that is written out
        assert tokenizer.encode(text, add_special_tokens=False) == library.encode(text, add_special_tokens=False).ids
        for skip in (True, False):
            if "\ufffd" not in library.decode(ids, skip_special_tokens=skip):
                assert tokenizer.decode(ids, skip) == library.decode(ids, skip_special_tokens=skip)

    @given(data=st.data())
    def test_byte_level_decoding_is_the_librarys_for_any_ids(self, chat: Tokenizer, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.integers(0, chat.vocab_size - 1), max_size=30))
        skip = data.draw(st.booleans())
        assert chat.decode(ids, skip) == byte_level().decode(ids, skip_special_tokens=skip)

    def test_a_broken_byte_sequence_leaves_its_neighbours_whole(self, folder: Path) -> None:
        tokenizer = from_library(folder, "broken", sentencepiece())
        ids = [tokenizer.encode("a")[-1], *(3 + byte for byte in "🦊".encode() + "🦊".encode()[:3])]
        assert tokenizer.decode(ids) == "a🦊\ufffd"
        assert sentencepiece().decode(ids) == "a" + 7 * "\ufffd"

    def test_truncation_and_padding_in_the_file_are_ignored(self, folder: Path) -> None:
        library = LibraryTokenizer.from_str(byte_level().to_str())
        library.enable_truncation(4)
        library.enable_padding(length=64)
        assert from_library(folder, "cut", library).encode("the fox " * 9) == byte_level().encode("the fox " * 9).ids

    def test_every_source_of_end_ids_counts(self, folder: Path) -> None:
        tokenizer = from_library(
            folder,
            "ends",
            byte_level(),
            config={"eos_token_id": 7, "text_config": {"eos_token_id": [8]}},
            generation_config={"eos_token_id": [0, 9]},
            tokenizer_config={"eos_token": {"content": "<|end|>"}},
        )
        assert tokenizer.eos_token_ids == {0, 1, 7, 8, 9}

    def test_end_ids_may_be_missing_everywhere(self, folder: Path) -> None:
        tokenizer = from_library(folder, "bare", byte_level(), config={"eos_token_id": None})
        assert tokenizer.eos_token_ids == frozenset()
        assert tokenizer.bos_token_id is None
        assert tokenizer.chat_template is None

    @pytest.mark.parametrize("add_bos", [True, False, None])
    @pytest.mark.parametrize("kind", ["llama", "byte-level"])
    def test_the_post_processor_alone_says_how_a_text_begins_as_in_transformers(
        self, folder: Path, kind: str, add_bos: bool | None
    ) -> None:
        from transformers import AutoTokenizer

        bos = "<s>" if kind == "llama" else "<|start|>"
        config: dict[str, Any] = {"bos_token": bos, "tokenizer_class": "PreTrainedTokenizerFast"}
        if add_bos is not None:
            config["add_bos_token"] = add_bos
        path = write_folder(folder / f"{kind}-{add_bos}", LIBRARIES[kind], tokenizer_config=config)
        assert Tokenizer.from_folder(path).encode("the fox") == AutoTokenizer.from_pretrained(path).encode("the fox")

    def test_chat_templates_by_name_and_in_their_own_files(self, folder: Path) -> None:
        named = [
            {"name": "default", "template": "plain"},
            {"name": "tool_use", "template": "tools {{ tools | length }}"},
        ]
        tokenizer = from_library(folder, "named", byte_level(), tokenizer_config={"chat_template": named})
        message = [{"role": "user", "content": "x"}]
        assert tokenizer.apply_chat_template(message) == "plain"
        assert tokenizer.apply_chat_template(message, tools=[{"name": "f"}]) == "tools 1"
        (folder / "named" / "chat_template.jinja").write_text("from a file")
        assert Tokenizer.from_folder(folder / "named").apply_chat_template(message) == "from a file"

    def test_vocabulary_size_covers_ids_beyond_the_count(self, folder: Path) -> None:
        tokenizer = from_library(folder, "size", byte_level())
        assert tokenizer.vocab_size == byte_level().get_vocab_size()
        assert tokenizer.token_text(tokenizer.vocab_size - 1) == "<think>"
        assert tokenizer.token_text(tokenizer.vocab_size) is None
        assert tokenizer.token_text(-1) is None
        assert tokenizer.token_bytes(10**9) == b""
        assert tokenizer.decode([tokenizer.vocab_size + 5, *tokenizer.encode("fox")]) == "fox"

    def test_files_that_cannot_be_used_are_named(self, folder: Path) -> None:
        with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
            Tokenizer.from_folder(folder / "nothing here")
        broken = write_folder(folder / "damaged", byte_level())
        (broken / "tokenizer.json").write_text('{"version": ')
        with pytest.raises(ModelError, match=r"damaged/tokenizer\.json: cannot be read"):
            Tokenizer.from_folder(broken)
        other = write_folder(folder / "damaged too", byte_level())
        (other / "config.json").write_text("[]")
        with pytest.raises(ModelError, match=r"config\.json: is not a JSON object"):
            Tokenizer.from_folder(other)
        with pytest.raises(ModelError, match="<nowhere>"):
            from_library(folder, "unknown", byte_level(), tokenizer_config={"eos_token": "<nowhere>"})

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("tokenizer_config.json", b'{"chat_template": 3}'),
            ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}'),
            ("tokenizer_config.json", b'{"eos_token": "\\ud800"}'),
            ("tokenizer_config.json", b"[" * 100_000),
            ("tokenizer_config.json", b"\xff"),
            ("chat_template.jinja", b"\xff"),
            ("additional_chat_templates/tool_use.jinja", b"\xff"),
            ("config.json", b'{"eos_token_id": "2"}'),
            ("config.json", b'{"eos_token_id": [[2]]}'),
            ("config.json", b'{"text_config": [1]}'),
            ("generation_config.json", b'{"eos_token_id": true}'),
        ],
    )
    def test_files_with_the_wrong_content_are_named(self, name: str, content: bytes, tmp_path: Path) -> None:
        folder = write_folder(tmp_path, byte_level())
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
        with pytest.raises(ModelError, match=f"{folder / name}: "):
            Tokenizer.from_folder(folder)

    @given(
        file=st.sampled_from(["tokenizer_config", "special_tokens_map", "config", "generation_config", "tokenizer"]),
        changes=st.dictionaries(
            st.sampled_from(
                ["chat_template", "eos_token_id", "eos_token", "bos_token", "text_config", "model", "decoder",
                 "added_tokens", "normalizer", "pre_tokenizer", "post_processor", "truncation"]
            ),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                lambda inner: st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from(["content", "name", "template", "eos_token_id", "type"]), inner),
                max_leaves=5,
            ),
            min_size=1,
            max_size=3,
        ),
    )  # fmt: skip
    def test_any_content_is_a_tokenizer_or_a_model_error_with_the_file(
        self, folder: Path, file: str, changes: dict[str, Any]
    ) -> None:
        path = write_folder(folder / "any", byte_level())
        for name in ("tokenizer_config", "special_tokens_map", "config", "generation_config"):
            (path / f"{name}.json").write_text("{}")
        content = json.loads((path / f"{file}.json").read_text()) | changes
        (path / f"{file}.json").write_text(json.dumps(content))
        message = str(path)
        try:
            Tokenizer.from_folder(path).encode("the fox")
        except ModelError as error:
            message = str(error)
        assert message.startswith(str(path))

    @pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.BPEDecoder(), decoders.CTC(), None])
    def test_decoders_that_look_at_neighbours_are_refused(self, folder: Path, decoder: Any) -> None:
        library = LibraryTokenizer(models.BPE({"a": 0}, []))
        if decoder is not None:
            library.decoder = decoder
        with pytest.raises(ModelError, match="decoder"):
            from_library(folder, "refused", library)


class TestGGUFByteLevel:
    @given(text=texts)
    def test_ids_and_text_are_those_of_the_original(self, text: str) -> None:
        tokenizer = Tokenizer.from_gguf(gguf_metadata(byte_level(digits=True), "gpt2", pre="smollm"))
        ids = byte_level(digits=True).encode(text).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text

    @pytest.mark.parametrize(
        ("pre", "numbers", "words"),
        [
            ("gpt-2", ["1234"], ["Ġ", "Ġx"]),
            ("smollm", ["1", "2", "3", "4"], ["Ġ", "Ġx"]),
            ("qwen2", ["1", "2", "3", "4"], ["Ġ", "Ġx"]),
            ("llama-bpe", ["123", "4"], ["Ġ", "Ġx"]),
            ("tekken", ["1", "2", "3", "4"], ["Ġ", "Ġx"]),
        ],
    )
    def test_numbers_and_spaces_are_cut_as_the_pre_tokenizer_says(
        self, pre: str, numbers: list[str], words: list[str]
    ) -> None:
        tokens = ["1", "2", "3", "4", "12", "123", "1234", "Ġ", "x", "ĠĠ", "Ġx"]
        merges = ["1 2", "12 3", "123 4", "Ġ Ġ", "Ġ x"]
        tokenizer = Tokenizer.from_gguf(metadata("gpt2", tokens, merges=merges, pre=pre))
        assert [tokenizer.token_text(id) for id in tokenizer.encode("1234")] == numbers
        assert [tokenizer.token_text(id) for id in tokenizer.encode("  x")] == words

    def test_llama3_keeps_words_that_no_merge_leads_to(self) -> None:
        tokens = ["a", "b", "c", "abc", "ca"]
        for pre, expected in {"llama-bpe": [3], "qwen2": [0, 1, 2]}.items():
            assert Tokenizer.from_gguf(metadata("gpt2", tokens, merges=["c a"], pre=pre)).encode("abc") == expected

    def test_qwen2_normalises(self) -> None:
        tokens = [*"eÌģÃ©", "Ã©"]
        tokenizer = Tokenizer.from_gguf(metadata("gpt2", tokens, merges=["Ã ©"], pre="qwen2"))
        assert tokenizer.encode("e\u0301") == [len(tokens) - 1]

    def test_every_control_token_that_ends_a_turn_is_an_end(self) -> None:
        tokens = ["a", "b", "ab", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|im_start|>"]
        types = [1, 1, 1, 3, 3, 1, 3]
        made = metadata("gpt2", tokens, token_type=types, merges=["a b"], eos_token_id=0, eot_token_id=6)
        assert Tokenizer.from_gguf(made).eos_token_ids == {0, 3, 4, 6}


def metadata(model: str, tokens: list[str], **values: Any) -> dict[str, Any]:
    return tokenizer_metadata({"model": model, "tokens": tokens, "pre": "gpt-2", **values})


class TestGGUFSentencePiece:
    @pytest.mark.parametrize("words", [True, False])
    @pytest.mark.parametrize("space_prefix", [True, False])
    @given(text=texts)
    def test_ids_are_those_of_the_merges_that_the_scores_stand_for(
        self, space_prefix: bool, words: bool, text: str
    ) -> None:
        library = sentencepiece(space_prefix, words)
        tokenizer = Tokenizer.from_gguf(gguf_metadata(library, "llama", add_space_prefix=space_prefix, bos_token_id=1))
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == library.encode(text, add_special_tokens=False).ids
        if not text.startswith("<"):  # spaces are added after special tokens too
            assert tokenizer.encode(text)[0] == 1
        if "<" not in text or not space_prefix:
            assert tokenizer.decode(ids, skip_special_tokens=False) == text.replace("▁", " ")

    def test_the_best_score_goes_first_and_then_the_leftmost(self) -> None:
        tokens = ["a", "b", "aa", "ab", "aab"]
        for scores, expected in {
            (0, 0, -1, -2, -3): [2, 3],
            (0, 0, -2, -1, -3): [2, 3],
            (0, 0, -3, -1, -2): [0, 4],
        }.items():
            tokenizer = Tokenizer.from_gguf(metadata("llama", tokens, scores=list(scores), add_space_prefix=False))
            assert tokenizer.encode("aaa") == [2, 0]
            assert tokenizer.encode("aaab") == expected

    @pytest.mark.parametrize("piece", ["x▁", "x▁▁", "▁▁", "▁▁x", "x▁▁y"])
    def test_pieces_may_end_in_spaces_or_span_them(self, piece: str) -> None:
        tokens = [*"▁xy", *(piece[:length] for length in range(2, len(piece) + 1))]
        scores = [-float(id) for id in range(len(tokens))]
        tokenizer = Tokenizer.from_gguf(metadata("llama", tokens, scores=scores, add_space_prefix=False))
        text = piece.replace("▁", " ")
        assert tokenizer.encode(text) == [len(tokens) - 1]

    def test_user_defined_tokens_are_found_first_and_stay_apart(self) -> None:
        library = sentencepiece(space_prefix=False)
        runs = [" " * 2, " " * 3, "\n", "\n\n", "<td>"]
        tokenizer = Tokenizer.from_gguf(gguf_metadata(library, "llama", runs, add_space_prefix=False))
        pieces = [tokenizer.token_text(id) for id in tokenizer.encode("     fox\n\n\n<td> fox")]
        assert pieces == ["   ", "  ", "fo", "x", "\n\n", "\n", "<td>", "▁fox"]

    def test_characters_without_a_piece_become_bytes_or_the_unknown_token(self) -> None:
        tokenizer = Tokenizer.from_gguf(gguf_metadata(sentencepiece(), "llama"))
        ids = tokenizer.encode("a🦊b", add_special_tokens=False)
        assert [tokenizer.token_text(id) for id in ids[1:-1]] == ["<0xF0>", "<0x9F>", "<0xA6>", "<0x8A>"]
        assert tokenizer.token_bytes(ids[1]) == b"\xf0"
        bare = metadata("llama", ["a", "<unk>"], scores=[0, 0], token_type=[1, 2], add_space_prefix=False)
        assert Tokenizer.from_gguf(bare | {"tokenizer.ggml.unknown_token_id": 1}).encode("a🦊a") == [0, 1, 0]

    def test_long_words_without_a_space(self) -> None:
        library = sentencepiece(space_prefix=False)
        tokenizer = Tokenizer.from_gguf(gguf_metadata(library, "llama", add_space_prefix=False))
        text = "thequickbrownfox你好" * 500
        assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids


class TestGGUFErrors:
    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"model": "bert"}, "'bert' is not supported"),
            ({"model": None}, r"no tokenizer\.ggml\.model"),
            ({"model": 3}, r"tokenizer\.ggml\.model is not text"),
            ({"model": "gpt2", "pre": None}, r"no tokenizer\.ggml\.pre"),
            ({"tokens": []}, r"tokenizer\.ggml\.tokens is not an array of texts, or an empty one"),
            ({"model": "gpt2", "merges": np.array([1])}, r"tokenizer\.ggml\.merges is not an array of texts"),
            ({"add_space_prefix": 1}, r"tokenizer\.ggml\.add_space_prefix is neither true nor false"),
            ({"bos_token_id": "a"}, "bos_token_id is 'a'"),
            ({"scores": [0.0, float("nan")]}, "holds NaN"),
            ({"scores": ["a", "b"]}, "not an array of such numbers"),
            ({"scores": None}, r"no tokenizer\.ggml\.scores"),
            ({"scores": [0.0]}, "2 tokens and 1 scores"),
            ({"token_type": [1]}, "2 tokens and 1 token types"),
            ({"bos_token_id": 2}, "bos_token_id is 2"),
            ({"eot_token_id": -1}, "eot_token_id is -1"),
            ({"token_type": [1, 6]}, "byte token"),
            ({"model": "gpt2"}, r"no tokenizer\.ggml\.merges"),
            ({"model": "gpt2", "pre": "unheard-of"}, "'unheard-of' is not supported"),
            ({"model": "gpt2", "merges": ["a c"]}, "merges do not fit"),
            ({"model": "gpt2", "merges": ["ab"]}, "merges do not fit"),
        ],
    )
    def test_inconsistent_metadata_is_a_clear_error(self, values: dict[str, Any], message: str) -> None:
        sound: dict[str, Any] = {"model": "llama", "tokens": ["a", "b"], "scores": [0.0, 0.0]}
        with pytest.raises(ModelError, match=message):
            Tokenizer.from_gguf(metadata(**(sound | values)))

    @given(data=st.data())
    def test_any_metadata_is_a_tokenizer_or_a_model_error(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(["gpt2", "llama"]))
        sound = metadata(
            name, ["a", "b", "ab", "<0x01>"], scores=[0.0] * 4, token_type=[1, 1, 1, 6], merges=["a b"],
            bos_token_id=0, eos_token_id=1, eot_token_id=1, unknown_token_id=2, add_bos_token=True,
            add_eos_token=True, add_space_prefix=True,
        ) | {"tokenizer.chat_template": "", "tokenizer.chat_template.tool_use": ""}  # fmt: skip
        values = st.one_of(
            st.integers(-2, 5), st.floats(), st.booleans(), st.text(max_size=3),
            st.lists(st.text(max_size=3), max_size=5),
            st.lists(st.integers(-1, 7), max_size=5).map(np.array),
            st.lists(st.floats(), max_size=5).map(np.array),
        )  # fmt: skip
        changes = data.draw(st.dictionaries(st.sampled_from(sorted(sound)), values, max_size=2))
        with suppress(ModelError):
            tokenizer = Tokenizer.from_gguf(sound | changes)
            ids = tokenizer.encode("ab c\n")
            tokenizer.decode(ids)
            tokenizer.token_bytes(3)


class TestBeginning:
    def tokenizer(self, **values: Any) -> Tokenizer:
        made = gguf_metadata(sentencepiece(), "llama", bos_token_id=1, eos_token_id=2, **values)
        template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
        return Tokenizer.from_gguf(made | {"tokenizer.chat_template": template})

    def test_it_is_added_once(self) -> None:
        tokenizer = self.tokenizer()
        assert tokenizer.encode("fox")[0] == 1
        assert tokenizer.encode("<s>fox") == tokenizer.encode("fox")
        assert tokenizer.encode("") == [1]
        assert 1 not in tokenizer.encode("fox", add_special_tokens=False)

    def test_it_is_not_added_where_the_file_says_so(self) -> None:
        assert 1 not in self.tokenizer(add_bos_token=False).encode("fox")
        assert self.tokenizer(add_bos_token=False).encode("") == []

    def test_a_template_that_writes_it_does_not_double_it(self) -> None:
        ids = self.tokenizer().encode_chat([{"role": "user", "content": "fox"}])[0]
        assert ids.count(1) == 1
        assert ids[-1] == 2

    def test_a_template_that_forgets_it_still_gets_it(self) -> None:
        made = gguf_metadata(sentencepiece(), "llama", bos_token_id=1)
        tokenizer = Tokenizer.from_gguf(made | {"tokenizer.chat_template": "{{ messages[0].content }}"})
        assert tokenizer.encode_chat([{"role": "user", "content": "fox"}])[0] == tokenizer.encode("fox")

    def test_an_end_is_added_to_texts_but_not_to_a_conversation_to_continue(self) -> None:
        tokenizer = self.tokenizer(add_eos_token=True)
        assert tokenizer.encode("fox")[-1] == 2
        assert tokenizer.encode("fox")[:-1] == self.tokenizer().encode("fox")
        assert tokenizer.encode_chat([{"role": "user", "content": "fox"}])[0].count(2) == 1


class TestSpecialTokensInText:
    def test_a_raw_prompt_can_spell_them(self, chat: Tokenizer) -> None:
        assert chat.encode("<|start|>fox<|end|>")[0] == 0
        assert chat.encode("<|start|>fox<|end|>")[-1] == 1
        assert chat.decode([0, *chat.encode("fox"), 1]) == "fox"
        assert chat.decode([0, *chat.encode("fox"), 1], skip_special_tokens=False) == "<|start|>fox<|end|>"

    @given(role=texts, content=texts)
    def test_a_message_cannot(self, chat: Tokenizer, role: str, content: str) -> None:
        messages = [{"role": role, "content": content}]
        ids = chat.encode_chat(messages)[0]
        assert [id for id in ids if id in chat.special_ids] == [0, 1, 0]
        assert chat.decode(ids, skip_special_tokens=False) == chat.apply_chat_template(messages)
        if not any(token in role + content for token in ("<|start|>", "<|end|>")):
            assert ids == chat.encode(chat.apply_chat_template(messages))

    def test_it_is_the_text_that_an_ordinary_tokenizer_would_see(self, chat: Tokenizer) -> None:
        innocent = LibraryTokenizer(byte_level().model)
        innocent.pre_tokenizer = byte_level().pre_tokenizer
        ids = chat.encode_chat([{"role": "user", "content": "a <|end|>b"}])[0]
        inner = innocent.encode("user\na <|end|>b").ids
        assert ids[1 : 1 + len(inner)] == inner

    def test_tools_and_variables_cannot_either(self, chat: Tokenizer) -> None:
        tokenizer = templated("{{ tools | tojson }}{{ mood }}{{ messages[0].content }}")
        ids = tokenizer.encode_chat(
            [{"role": "user", "content": [{"type": "text", "text": "<|end|>"}]}],
            tools=[{"name": "<|end|>", "<|end|>": ["<|end|>"]}],
            mood="<|end|>",
        )[0]
        assert not tokenizer.special_ids & set(ids)
        assert tokenizer.decode(ids).count("<|end|>") == 5

    def test_nor_with_byte_fallback(self) -> None:
        made = gguf_metadata(sentencepiece(), "llama", bos_token_id=1)
        tokenizer = Tokenizer.from_gguf(made | {"tokenizer.chat_template": "{{ messages[0].content }}"})
        ids = tokenizer.encode_chat([{"role": "user", "content": "the fox</s> the"}])[0]
        assert tokenizer.special_ids & set(ids) == {1}
        assert tokenizer.decode(ids) == "the fox</s> the"

    def test_nor_where_two_of_them_overlap(self) -> None:
        made = metadata(
            "llama", [*"abc", "ab", "bc"], scores=[0] * 5, token_type=[1, 1, 1, 3, 3], add_space_prefix=False
        )
        tokenizer = Tokenizer.from_gguf(made | {"tokenizer.chat_template": "{{ messages[0].content }}"})
        assert tokenizer.encode("abc") == [3, 2]
        assert tokenizer.encode_chat([{"role": "user", "content": "abc"}])[0] == [0, 1, 2]

    @pytest.mark.parametrize("parts", [("a<|en", "d|>b"), ("<|", "end", "|>"), ("<|en", "", "d|>"), ("<|end|", ">")])
    def test_nor_by_parts_that_the_template_puts_together(self, parts: tuple[str, ...]) -> None:
        tokenizer = templated("{% for m in messages %}{{ m.content }}{% endfor %}")
        ids, text = tokenizer.encode_chat([{"role": "user", "content": part} for part in parts])
        assert not tokenizer.special_ids & set(ids)
        assert text == "".join(parts)
        assert tokenizer.decode(ids) == text

    @pytest.mark.parametrize(("template", "content"), [("<|en{{ messages[0].content }}", "d|>"), ("{{ x }}|>", "")])
    def test_nor_together_with_the_template(self, template: str, content: str) -> None:
        tokenizer = templated(template)
        ids, _ = tokenizer.encode_chat([{"role": "user", "content": content}], x="<|end")
        assert not tokenizer.special_ids & set(ids)

    def test_nor_markers_that_are_not_flagged_special(self) -> None:
        markers = ["<|turn|>", "<|stop|>", "<|seen|>", "\n\n"]
        template = (
            "{% for m in messages %}<|turn|>{{ m.content.split('<|seen|>')[-1] }}<|seen|><|stop|>\n\n{% endfor %}"
        )
        made = gguf_metadata(byte_level(), "gpt2", markers)
        tokens = made["tokenizer.ggml.tokens"]
        turn, stop, seen, lines = (tokens.index(marker) for marker in markers)
        made["tokenizer.ggml.eos_token_id"] = stop
        tokenizer = Tokenizer.from_gguf(made | {"tokenizer.chat_template": template})
        ids, text = tokenizer.encode_chat([{"role": "user", "content": "gone<|seen|>a<|turn|>b<|stop|>c\n\nd"}])
        assert text == "<|turn|>a<|turn|>b<|stop|>c\n\nd<|seen|><|stop|>\n\n"
        assert [id for id in ids if id in (turn, stop, seen, lines)] == [turn, lines, seen, stop, lines]
        assert tokenizer.decode(ids).count("<|stop|>") == 1, "an end is left out even if it is not flagged special"

    def test_nor_tokens_that_the_template_writes_by_their_names(self) -> None:
        made = gguf_metadata(byte_level(), "gpt2", ["<|begin|>"])
        begin = made["tokenizer.ggml.bos_token_id"] = made["tokenizer.ggml.tokens"].index("<|begin|>")
        made["tokenizer.chat_template"] = "{{ bos_token }}{{ messages[0].content }}"
        ids, _ = Tokenizer.from_gguf(made).encode_chat([{"role": "user", "content": "a<|begin|>"}])
        assert ids.count(begin) == 1

    def test_not_even_escaped(self) -> None:
        tokenizer = templated("{{ tools | tojson(ensure_ascii=true) }}")
        ids, text = tokenizer.encode_chat([{"role": "user", "content": ""}], tools=[{"name": "<|end|>"}])
        assert text == tokenizer.decode(ids) == '[{"name": "<|end|>"}]'

    def test_a_role_is_recognised_whatever_letters_special_tokens_have(self) -> None:
        library = LibraryTokenizer.from_str(byte_level().to_str())
        library.add_special_tokens(["tool", "<start", "r>"])
        made = gguf_metadata(library, "gpt2")
        made["tokenizer.chat_template"] = "{% if messages[0].role == 'assistant' %}yes{% endif %}"
        message = {"role": "assistant", "content": [{"type": "text", "text": "x"}]}
        assert Tokenizer.from_gguf(made).encode_chat([message])[1] == "yes"

    def test_ids_and_text_are_of_one_rendering(self, chat: Tokenizer) -> None:
        tokenizer = templated("{% if '<|end|>' in messages[0].content %}yes{% else %}no{% endif %}{{ now() }}")
        times: list[str] = []

        def now() -> str:
            times.append("")
            return str(len(times))

        ids, text = tokenizer.encode_chat([{"role": "user", "content": "<|end|>"}], now=now)
        assert text == tokenizer.decode(ids) == "no1"

    def test_the_noncharacter_that_guards_them_is_refused(self, chat: Tokenizer) -> None:
        for message in ({"role": "user", "content": "a\ufdd0b"}, {"role": "user", "content": "", "\ufdd0": 1}):
            with pytest.raises(ValueError, match=r"must not hold U\+FDD0"):
                chat.encode_chat([message])
        assert chat.decode(chat.encode("a\ufdd0b")) == "a\ufdd0b"

    def test_added_tokens_that_control_nothing_stay_tokens_in_messages(self, chat: Tokenizer) -> None:
        think = chat.encode("<think>")
        assert len(think) == 1
        assert think[0] in chat.encode_chat([{"role": "assistant", "content": "<think>fox"}])[0]


class TestChatTemplate:
    def render(self, template: str, content: Any = "x", /, **variables: Any) -> str:
        return templated(template).apply_chat_template([{"role": "user", "content": content}], **variables)

    @pytest.mark.parametrize(
        ("template", "expected"),
        [
            ("{{ {'é': [1, None]} | tojson }}", '{"é": [1, null]}'),
            ("{{ '<' | tojson }}", '"<"'),
            ("{{ 'é😀' | tojson(ensure_ascii=true) }}", r'"\u00e9\ud83d\ude00"'),
            ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
            ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
            ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "x"),
            ("  {% if true %}\n  y\n  {% endif %}", "  y\n"),
            ("{{ strftime_now('%%') }}", "%"),
            ("{{ tools is none }} {{ add_generation_prompt }}", "True True"),
            ("{{ undefined_name }}", ""),
        ],
    )
    def test_it_has_what_templates_expect(self, template: str, expected: str) -> None:
        assert self.render(template) == expected

    def test_text_parts_are_lines(self) -> None:
        assert self.render("{{ messages[0].content }}", [{"type": "text", "text": t} for t in "ab"]) == "a\nb"

    def test_variables_reach_it(self) -> None:
        assert self.render("{{ enable_thinking }}", enable_thinking=False) == "False"

    @pytest.mark.parametrize(
        ("template", "message"),
        [
            ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
            ("{{ messages[0].content + 1 }}", "cannot render"),
            ("{{ messages[0].nothing.more }}", "no attribute 'nothing'"),
            ("{{ 1 / 0 }}", "division by zero"),
            ("{{ range(10 ** 9) | list }}", "[Rr]ange too big"),
            ("{{ messages.append(1) }}", "not safe|unsafe"),
            ("{{ messages.__class__.__mro__ }}", "unsafe"),
            ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recursion"),
            ("{% for", "line 1"),
            ("a\n{{ x | no_such_filter }}", "line 2"),
        ],
    )
    def test_its_errors_are_clear(self, template: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            self.render(template)

    @pytest.mark.parametrize(
        ("messages", "message"),
        [
            ([], "must not be empty"),
            ("hi", "must be a list"),
            ({"role": "user"}, "must be a list"),
            (["hi"], r"messages\[0\] must be a mapping"),
            ([{"content": "x"}], r"messages\[0\]\.role"),
            ([{"role": "user", "content": "x"}, {"role": 1}], r"messages\[1\]\.role"),
            ([{"role": "user", "content": 3}], r"messages\[0\]\.content"),
            ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\]\.content"),
        ],
    )
    def test_malformed_messages_are_named(self, chat: Tokenizer, messages: Any, message: str) -> None:
        for call in (chat.apply_chat_template, chat.encode_chat):
            with pytest.raises(ValueError, match=message):
                call(messages)

    def test_a_variable_with_a_name_that_is_taken_is_named(self, chat: Tokenizer) -> None:
        variables: dict[str, Any] = {"messages": "x"}
        with pytest.raises(ValueError, match="must not be called 'messages'"):
            chat.encode_chat([{"role": "user", "content": "x"}], **variables)

    @pytest.mark.parametrize("name", ["source", "variables", "context"])
    def test_other_variables_may_have_any_name(self, name: str) -> None:
        assert self.render(f"{{{{ {name} }}}}", **{name: "x", "self": "y"}) == "x"

    def test_deep_nesting_is_a_value_error(self, chat: Tokenizer) -> None:
        nested: Any = []
        for _ in range(100_000):
            nested = [nested]
        choices: list[dict[str, Any]] = [{"tools": [{"x": nested}]}, {"x": nested}]
        for arguments in choices:
            with pytest.raises(ValueError, match="nested too deeply"):
                chat.encode_chat([{"role": "user", "content": "x"}], **arguments)
        with pytest.raises(ValueError, match="cannot be compiled"):
            self.render("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}")

    def test_a_model_without_one_says_so(self) -> None:
        with pytest.raises(ValueError, match="no chat template"):
            Tokenizer.from_gguf(gguf_metadata(byte_level(), "gpt2")).apply_chat_template(
                [{"role": "user", "content": "x"}]
            )

    json_values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type"]), inner)
        ),
        max_leaves=8,
    )

    @given(messages=json_values, tools=json_values)
    def test_whatever_comes_it_is_text_or_a_value_error(self, chat: Tokenizer, messages: Any, tools: Any) -> None:
        with suppress(ValueError):
            assert isinstance(chat.encode_chat(messages, tools=tools)[0], list)


class TestBadWords:
    def test_within_a_text_and_after_a_space(self, chat: Tokenizer) -> None:
        assert chat.bad_word_ids(["fox"]) == [chat.encode("fox"), chat.encode(" fox")]
        assert chat.bad_word_ids([" fox"]) == [chat.encode(" fox")]

    @pytest.mark.parametrize("name", ["llama", "metaspace"])
    def test_where_a_space_is_put_before_texts(self, folder: Path, name: str) -> None:
        tokenizer = from_library(folder, f"bad {name}", LIBRARIES[name])
        within, after = ([tokenizer.token_text(id) for id in ids] for ids in tokenizer.bad_word_ids(["fox"]))
        assert "".join(map(str, within)) == "fox"
        assert after == ["▁fox"]

    def test_an_empty_word_is_refused(self, chat: Tokenizer) -> None:
        with pytest.raises(ValueError, match="bad_words"):
            chat.bad_word_ids(["fox", " "])


def test_a_lone_surrogate_is_a_value_error(chat: Tokenizer) -> None:
    with pytest.raises(ValueError, match="lone surrogate at character 1"):
        chat.encode("a\ud800")


# Ids as llama.cpp gives them, for SmolLM2 (which splits numbers into digits) and for Gemma 3 (which has tokens for runs
# of spaces and of line breaks, and begins every text with one).
REAL_IDS = [
    (
        "It's 1234 km.",
        [1589, 506, 216, 33, 34, 35, 36, 6381, 30],
        [2, 1509, 236789, 236751, 236743, 236770, 236778, 236800, 236812, 7251, 236761],
    ),
    ("a" + " " * 40 + "b", [81, 12427, 415, 278], [2, 236746, 167, 145, 236763]),
    (
        "def f(x):\n\treturn x\n\n\n    # done",
        [1604, 275, 24, 104, 727, 198, 197, 5406, 1792, 13272, 907, 2294],
        [2, 2063, 517, 236769, 236781, 1473, 107, 255968, 2060, 1123, 109, 140, 236865, 3028],
    ),
    (
        "e\u0301 你好 👩\u200d👧 ½",
        [85, 151, 219, 216, 18645, 250, 48392, 138, 15107, 235, 119, 321, 231, 10813, 235, 117, 216, 16738],
        [2, 236744, 238288, 43758, 237389, 236743, 243767, 237243, 244814, 47041],
    ),
    (
        "<|im_start|>user<eos><td>",
        [1, 4093, 44, 85, 395, 21198, 11474, 46],
        [2, 236820, 236909, 548, 236779, 3041, 111038, 2364, 1, 175],
    ),
    (" \n ", [3717, 216], [2, 236743, 107, 236743]),
]


@pytest.mark.real
class TestRealFiles:
    @pytest.mark.parametrize(("text", "smollm2", "gemma3"), REAL_IDS)
    def test_ids_are_llama_cpps(self, text: str, smollm2: list[int], gemma3: list[int]) -> None:
        for name, ids in {"smollm2": smollm2, "gemma3-270m": gemma3}.items():
            assert real(name).encode(text) == ids
            assert real(name).decode(ids, skip_special_tokens=False).removeprefix("<bos>") == text

    def test_smollm2_chat(self) -> None:
        ids = real("smollm2").encode_chat([{"role": "user", "content": "Hi <|im_end|> 12"}])[0]
        assert ids.count(2) == 2  # the system message's and the user's
        assert real("smollm2").eos_token_ids == {0, 2}
        assert real("smollm2").decode(ids).endswith("user\nHi <|im_end|> 12\nassistant\n")

    def test_gemma3_facts(self) -> None:
        gemma3 = real("gemma3-270m")
        assert gemma3.vocab_size == 262_144
        assert gemma3.eos_token_ids == {1, 106}
        assert gemma3.chat_template is None
        assert gemma3.encode("") == [2]


@cache
def real(name: str) -> Tokenizer:
    return Tokenizer.from_gguf(read_gguf(resolve(name)).metadata)
