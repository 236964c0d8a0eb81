"""Streaming text: equal to one-shot decoding, at flat cost, and never the first part of a stop string."""

from collections.abc import Sequence
from itertools import chain
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import byte_level, gguf_metadata, sentencepiece, write_folder

from freewheel.engine.detokenize import Detokenizer, StopStrings
from freewheel.models.tokenizer import Tokenizer

KINDS = ["byte-level", "llama", "gemma", "metaspace", "llama from gguf"]


@pytest.fixture(scope="session", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param == "llama from gguf":
        return Tokenizer.from_gguf(gguf_metadata(sentencepiece(), "llama", bos_token_id=1))
    library = {
        "byte-level": byte_level(),
        "llama": sentencepiece(),
        "gemma": sentencepiece(space_prefix=False),
        "metaspace": sentencepiece(metaspace=True),
    }[request.param]
    return Tokenizer.from_folder(write_folder(tmp_path_factory.mktemp("tokenizer"), library))


@pytest.fixture(scope="session")
def llama() -> Tokenizer:
    """SentencePiece with byte fallback: ids 3 to 258 are the bytes."""
    return Tokenizer.from_gguf(gguf_metadata(sentencepiece(), "llama", bos_token_id=1))


def byte_ids(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


def stream(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    """What each token adds, and the end."""
    return [*map(detokenizer.push, ids), detokenizer.finish()]


class TestDetokenizer:
    @given(data=st.data(), skip=st.booleans())
    def test_it_adds_up_to_one_shot_decoding_for_any_ids(
        self, tokenizer: Tokenizer, data: st.DataObject, skip: bool
    ) -> None:
        # Beyond the vocabulary too: models have more rows than their tokenizers have tokens.
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
        parts = stream(Detokenizer(tokenizer, skip_special_tokens=skip), ids)
        assert "".join(parts) == tokenizer.decode(ids, skip)

    @given(data=st.data())
    def test_bytes_of_characters_in_any_mixture(self, llama: Tokenizer, data: st.DataObject) -> None:
        pieces = st.sampled_from([*map(byte_ids, "aé你😀\u200d "), [0xF0 + 3], [0x9F + 3], [0x80 + 3], [1], [300]])
        ids = list(chain.from_iterable(data.draw(st.lists(pieces, max_size=20))))
        assert "".join(stream(Detokenizer(llama), ids)) == llama.decode(ids)

    @given(data=st.data(), skip=st.booleans())
    def test_after_a_prompt_it_is_what_the_whole_has_more(
        self, tokenizer: Tokenizer, data: st.DataObject, skip: bool
    ) -> None:
        texts = st.text(st.sampled_from("the fox 你😀é\n"), max_size=20)
        prompt = tokenizer.encode(data.draw(texts.filter(str.strip)), add_special_tokens=False)
        output = tokenizer.encode(data.draw(texts), add_special_tokens=False)
        parts = stream(Detokenizer(tokenizer, skip_special_tokens=skip, prompt_ids=prompt), output)
        assert tokenizer.decode(prompt, skip) + "".join(parts) == tokenizer.decode(prompt + output, skip)

    def test_a_character_is_never_split(self, llama: Tokenizer) -> None:
        assert stream(Detokenizer(llama), byte_ids("😀é")) == ["", "", "", "😀", "", "é", ""]

    @pytest.mark.parametrize("count", [1, 2, 3])
    def test_a_character_cut_off_is_one_replacement_at_the_end_only(self, llama: Tokenizer, count: int) -> None:
        parts = stream(Detokenizer(llama), byte_ids("你😀")[: 3 + count])
        assert parts == ["", "", "你"] + [""] * count + ["\ufffd"]

    def test_a_character_that_the_prompt_left_unfinished_is_completed(self, llama: Tokenizer) -> None:
        ids = byte_ids("x😀y")
        assert stream(Detokenizer(llama, prompt_ids=ids[:3]), ids[3:]) == ["", "😀", "y", ""]

    @pytest.mark.parametrize(("output", "text"), [("", ""), ("y", "y"), ("你", "你"), ("😀", "😀")])
    def test_one_that_is_not_completed_is_the_prompts(self, llama: Tokenizer, output: str, text: str) -> None:
        prompt = byte_ids("x😀")[:3]
        assert "".join(stream(Detokenizer(llama, prompt_ids=prompt), byte_ids(output))) == text
        assert llama.decode(prompt) + text == llama.decode(prompt + byte_ids(output))

    def test_copies_go_on_from_the_same_place_each_on_its_own(self, llama: Tokenizer) -> None:
        ids = byte_ids("x😀y")
        first = Detokenizer(llama, prompt_ids=ids[:3])
        second = first.copy()
        assert stream(first, ids[3:]) == stream(second, ids[3:]) == ["", "😀", "y", ""]

    def test_the_first_space_goes_unless_the_text_continues_a_prompt(self, llama: Tokenizer) -> None:
        fox = llama.encode(" fox", add_special_tokens=False)
        word = llama.encode("fox", add_special_tokens=False)
        assert "".join(stream(Detokenizer(llama), word)) == "fox"
        assert "".join(stream(Detokenizer(llama), fox)) == " fox"
        assert "".join(stream(Detokenizer(llama, prompt_ids=word), word)) == " fox"
        assert "".join(stream(Detokenizer(llama, prompt_ids=[1]), word)) == "fox"  # nothing but a control token

    def test_special_tokens_are_left_out_or_written(self, llama: Tokenizer) -> None:
        ids = [1, *llama.encode("fox", add_special_tokens=False), 2]
        assert "".join(stream(Detokenizer(llama), ids)) == "fox"
        assert "".join(stream(Detokenizer(llama, skip_special_tokens=False), ids)) == "<s> fox</s>"

    @pytest.mark.parametrize(
        "ids",
        [[10**6] * 5000, [0x9F + 3] * 5000, byte_ids("😀")[:3] * 2000, [2] * 5000, byte_ids("😀") * 1500],
        ids=["nothing", "stray bytes", "unfinished characters", "special tokens", "characters"],
    )
    def test_a_token_costs_the_same_wherever_it_comes(self, llama: Tokenizer, ids: list[int]) -> None:
        counting = CountingTokenizer(llama)
        detokenizer = Detokenizer(cast(Any, counting))
        text = ""
        for pushed, id in enumerate(ids, 1):
            text += detokenizer.push(id)
            assert counting.reads <= pushed  # no token is decoded twice
            assert len(detokenizer._decoder.getstate()[0]) <= 3  # and nothing but an unfinished character is kept
        assert text + detokenizer.finish() == llama.decode(ids)


class CountingTokenizer:
    """Counts the tokens that are decoded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.special_ids = tokenizer.special_ids
        self.leading_spaces = tokenizer.leading_spaces
        self.reads = 0

    def token_bytes(self, id: int) -> bytes:
        self.reads += 1
        return self.tokenizer.token_bytes(id)


def reference(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """Of the stops in ``text`` the one that ends first, the longest of those that end together."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(stops: Sequence[str], chunks: Sequence[str], include: bool = False) -> tuple[list[str], str | None]:
    """What is sent after each chunk, up to the stop or the end."""
    matcher = StopStrings(stops, include)
    sent = []
    for chunk in chunks:
        emit, stop = matcher.push(chunk)
        sent.append(emit)
        if stop is not None:
            return sent, stop
    return [*sent, matcher.flush()], None


class TestStopStrings:
    letters = st.text(st.sampled_from("abc😀"), max_size=5)

    @given(
        chunks=st.lists(letters, max_size=20), stops=st.lists(letters.filter(len), max_size=5), include=st.booleans()
    )
    def test_what_is_sent_adds_up_to_the_reference(self, chunks: list[str], stops: list[str], include: bool) -> None:
        sent, stop = run(stops, chunks, include)
        assert ("".join(sent), stop) == reference("".join(chunks), stops, include)

    @given(chunks=st.lists(letters, max_size=20), stops=st.lists(letters.filter(len), min_size=1, max_size=5))
    def test_exactly_what_may_become_a_stop_is_held_back(self, chunks: list[str], stops: list[str]) -> None:
        prefixes = {stop[:length] for stop in stops for length in range(1, len(stop))}
        matcher, sent, seen = StopStrings(stops), "", ""
        for chunk in chunks:
            emit, stop = matcher.push(chunk)
            if stop is not None:
                return
            sent, seen = sent + emit, seen + chunk
            held = max((prefix for prefix in prefixes if seen.endswith(prefix)), key=len, default="")
            assert sent + held == seen

    @pytest.mark.parametrize(
        ("stops", "chunks", "sent", "stop"),
        [
            (["STOP"], ["abS", "TO", "Pcd"], ["ab", "", ""], "STOP"),
            (["STOP"], ["abSTO", "RM"], ["ab", "STORM", ""], None),
            (["STOP"], ["abSTO"], ["ab", "STO"], None),
            (["STOP"], ["STSTOPx"], ["ST"], "STOP"),
            (["END", "ENOUGH"], ["aEN", "OUGH"], ["a", ""], "ENOUGH"),
            (["abcd", "bc"], ["abcd"], ["a"], "bc"),  # the one that ends first
            (["c", "bc", "abc"], ["xabc"], ["x"], "abc"),  # the longest of those that end together
            (["aab"], ["a", "a", "a", "b"], ["", "", "a", ""], "aab"),
            (["终止"], ["好终", "点", "终", "止"], ["好", "终点", "", ""], "终止"),
            (["\n\n"], ["a\n", "b\n", "\n"], ["a", "\nb", ""], "\n\n"),
            ([], ["a", "b"], ["a", "b", ""], None),
        ],
    )
    def test_examples(self, stops: list[str], chunks: list[str], sent: list[str], stop: str | None) -> None:
        assert run(stops, chunks) == (sent, stop)

    def test_the_stop_itself_on_request(self) -> None:
        assert run(["STOP"], ["abS", "TO", "Pcd"], include=True) == (["ab", "", "STOP"], "STOP")

    def test_flush_ends_a_text(self) -> None:
        matcher = StopStrings(["ab"])
        assert matcher.push("xa") == ("x", None)
        assert matcher.flush() == "a"
        assert matcher.flush() == ""
        assert matcher.push("b") == ("b", None)

    def test_copies_share_what_is_built_and_find_their_own(self) -> None:
        first = StopStrings(["abc"])
        second = first.copy()
        assert second._children is first._children
        assert [first.push("ab"), second.push("x"), first.push("c"), second.push("c")] == [
            ("", None),
            ("x", None),
            ("", "abc"),
            ("c", None),
        ]

    @given(chunks=st.lists(letters, max_size=20), stops=st.lists(letters.filter(len), max_size=5))
    def test_those_that_are_complete_too_early_are_ignored(self, chunks: list[str], stops: list[str]) -> None:
        matcher, sent, early = StopStrings(stops), "", len(chunks) // 2
        for number, chunk in enumerate(chunks):
            emit, stop = matcher.push(chunk, ignore=number < early)
            sent += emit
            if stop is not None:
                break
        else:
            sent, stop = sent + matcher.flush(), None
        text, seen = "".join(chunks), len("".join(chunks[:early]))
        ends = [
            (text.find(s, max(0, seen - len(s) + 1)) + len(s), -len(s), s)
            for s in stops
            if s in text[max(0, seen - len(s) + 1) :]
        ]
        end, length, expected = min(ends, default=(len(text), 0, None))
        assert (sent, stop) == (text[: end + length], expected)

    def test_an_empty_stop_is_refused(self) -> None:
        with pytest.raises(ValueError, match="stop"):
            StopStrings(["a", ""])

    def test_many_long_stops_that_almost_match(self) -> None:
        stops = ["a" * 4000 + letter for letter in "bcdefgh"]
        text = "a" * 20_000
        sent, stop = run(stops, [text[start : start + 3] for start in range(0, len(text), 3)])
        assert "".join(sent) == text
        assert stop is None
        assert sum(map(len, sent[:-1])) == len(text) - 4000

    def test_over_a_stream_of_tokens(self, llama: Tokenizer) -> None:
        detokenizer, matcher = Detokenizer(llama), StopStrings(["é😀"])
        sent = ""
        for id in byte_ids("aé你é😀b"):
            emit, stop = matcher.push(detokenizer.push(id))
            sent += emit
            if stop:
                break
        assert sent == "aé你"
