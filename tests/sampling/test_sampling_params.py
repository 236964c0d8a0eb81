"""Parameters are checked on construction, with an error that names the field."""

import pickle
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.sampling import SamplingParams
from freewheel.sampling.params import MAX_IDS, MAX_LOGPROBS, MAX_STRINGS

INTEGERS = {
    "n": (1, 1024),
    "top_k": (-1, 2**31 - 1),
    "min_tokens": (0, 16),
    "max_tokens": (0, 2**31 - 1),
    "seed": (-(2**63), 2**63 - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
NUMBERS = {
    "temperature": (0.0, 1e30),
    "top_p": (5e-324, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
}
OPTIONAL = {"max_tokens", "seed", "logprobs", "prompt_logprobs", "logit_bias", "allowed_token_ids", "grammar"}
FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")
TOKEN_LISTS = ("allowed_token_ids", "stop_token_ids")
STRING_LISTS = ("bad_words", "stop")
ALL = {field.name for field in fields(SamplingParams)}

NOT_NUMBERS = st.one_of(
    st.booleans(), st.text(), st.binary(), st.lists(st.integers()), st.complex_numbers(), st.builds(object)
)
FAR = st.one_of(st.integers(max_value=-(2**110)), st.integers(min_value=2**110), st.just(10**400), st.just(-(10**5000)))
NOT_FINITE = st.sampled_from([float("nan"), float("inf"), float("-inf"), np.float32("nan")])


def make(name: str, value: Any) -> SamplingParams:
    return SamplingParams(**{name: value})


def refuse(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name} ") as error:
        make(name, value)
    assert len(str(error.value)) < 250


def test_the_table_of_fields_is_complete() -> None:
    assert {*INTEGERS, *NUMBERS, *FLAGS, *TOKEN_LISTS, *STRING_LISTS, "logit_bias", "logprobs_mode", "grammar"} == ALL


@pytest.mark.parametrize("name", INTEGERS)
@given(value=st.one_of(NOT_NUMBERS, FAR, NOT_FINITE, st.floats()))
def test_integers_refuse_other_types_and_far_values(name: str, value: Any) -> None:
    refuse(name, value)


@pytest.mark.parametrize("name", NUMBERS)
@given(value=st.one_of(NOT_NUMBERS, FAR, NOT_FINITE, st.none()))
def test_numbers_refuse_other_types_and_far_values(name: str, value: Any) -> None:
    refuse(name, value)


@pytest.mark.parametrize(("name", "bounds"), {**INTEGERS, **NUMBERS}.items())
def test_bounds_are_inclusive(name: str, bounds: tuple[float, float]) -> None:
    for value in bounds:
        assert getattr(make(name, value), name) == (0 if (name, value) == ("top_k", -1) else value)
    step = 1 if name in INTEGERS else 1e-6 * abs(bounds[1])
    refuse(name, bounds[0] - step)
    if name != "min_tokens":
        refuse(name, bounds[1] + step)


@pytest.mark.parametrize("name", sorted(ALL - OPTIONAL))
def test_only_optional_fields_may_be_none(name: str) -> None:
    refuse(name, None)


@pytest.mark.parametrize("name", sorted(OPTIONAL))
def test_optional_fields_may_be_none(name: str) -> None:
    assert getattr(make(name, None), name) is None


@pytest.mark.parametrize("name", FLAGS)
@given(value=st.one_of(st.none(), st.integers(), st.text(), st.floats()))
def test_flags_are_booleans(name: str, value: Any) -> None:
    refuse(name, value)


@pytest.mark.parametrize("name", TOKEN_LISTS)
@given(value=st.one_of(st.integers(), st.text(), st.binary(), st.booleans(), st.floats(), st.builds(object)))
def test_token_lists_are_lists(name: str, value: Any) -> None:
    refuse(name, value)


@pytest.mark.parametrize("name", TOKEN_LISTS)
@given(
    bad=st.one_of(NOT_NUMBERS, FAR, NOT_FINITE, st.none(), st.floats(), st.integers(max_value=-1)), at=st.integers(0, 3)
)
def test_token_lists_hold_ids(name: str, bad: Any, at: int) -> None:
    ids: list[Any] = [5, 6, 7]
    ids.insert(at, bad)
    refuse(name, ids)


@pytest.mark.parametrize("name", STRING_LISTS)
@given(value=st.one_of(st.integers(), st.binary(), st.lists(st.integers(), min_size=1), st.builds(object)))
def test_string_lists_hold_strings(name: str, value: Any) -> None:
    refuse(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", [""]),
        ("stop", ""),
        ("stop", ["x" * 1025]),
        ("stop", ["x"] * (MAX_STRINGS + 1)),
        ("bad_words", [""]),
        ("bad_words", "word"),
        ("bad_words", ["x"] * (MAX_STRINGS + 1)),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [2**31]),
        ("stop_token_ids", [2**31]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", range(MAX_IDS + 1)),
        ("logit_bias", dict.fromkeys(range(MAX_IDS + 1), 0.0)),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {2**31: 0.0}),
        ("logit_bias", {"5": 0.0}),
        ("logit_bias", {True: 0.0}),
        ("logit_bias", {5: "1"}),
        ("logit_bias", {5: float("nan")}),
        ("logit_bias", {5: float("-inf")}),
        ("logit_bias", {5: 10**400}),
        ("logit_bias", {5: 1e31}),
        ("logit_bias", [5, 6]),
        ("logit_bias", (5, 6)),
        ("logit_bias", 5),
        ("logprobs_mode", "cooked"),
        ("logprobs_mode", []),
        ("temperature", 1e-31),
        ("temperature", -1e-9),
        ("top_p", 0.0),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
    ],
    ids=lambda value: str(value)[:20],
)
def test_refused_values(name: str, value: Any) -> None:
    refuse(name, value)


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    with pytest.raises(ValueError, match="min_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=5, max_tokens=None).max_tokens is None


def test_values_are_normalised() -> None:
    params = SamplingParams(
        top_k=np.int64(-1),  # pyright: ignore[reportArgumentType]
        temperature=1,
        top_p=np.float32(0.5),  # pyright: ignore[reportArgumentType]
        logit_bias={7: 1, 3: -2.5},
        allowed_token_ids={9, 2, 5},  # pyright: ignore[reportArgumentType]
        stop="end",
        stop_token_ids=[4, 4, 1],
    )
    assert (params.top_k, params.temperature, params.top_p) == (0, 1.0, 0.5)
    assert type(params.top_k) is int
    assert type(params.temperature) is float
    assert params.logit_bias == ((3, -2.5), (7, 1.0))
    assert params.allowed_token_ids == (2, 5, 9)
    assert (params.stop, params.stop_token_ids) == (("end",), (1, 4))
    assert SamplingParams(logit_bias={}) == SamplingParams()


def test_values_are_hashable_picklable_and_replaceable() -> None:
    params = SamplingParams(logit_bias={3: 1.0}, stop=["a"], allowed_token_ids=[1])
    assert hash(params) == hash(SamplingParams(logit_bias={3: 1.0}, stop="a", allowed_token_ids=[1]))
    assert pickle.loads(pickle.dumps(params)) == params
    assert replace(params, top_k=3) == SamplingParams(logit_bias={3: 1.0}, stop="a", allowed_token_ids=[1], top_k=3)


@pytest.mark.parametrize("bad", [100, 101, 2**31 - 1])
@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
def test_ids_past_the_vocabulary_are_refused(name: str, bad: int) -> None:
    def with_id(token: int) -> SamplingParams:
        return make(name, {token: 1.0} if name == "logit_bias" else [token])

    with_id(99).check_vocabulary(100)
    with pytest.raises(ValueError, match=rf"^{name} .*{bad}"):
        with_id(bad).check_vocabulary(100)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_logprobs_than_tokens_are_refused(name: str) -> None:
    make(name, 100).check_vocabulary(100)
    with pytest.raises(ValueError, match=rf"^{name} "):
        make(name, 101).check_vocabulary(100)


def test_bad_words_that_forbid_all_allowed_ids_are_refused() -> None:
    params = SamplingParams(allowed_token_ids=[4, 5], bad_words=["x"])
    params.check_vocabulary(10, [[4], [3, 5]])
    with pytest.raises(ValueError, match=r"^allowed_token_ids .* bad_words"):
        params.check_vocabulary(10, [[4], [5]])
    with pytest.raises(ValueError, match=r"^bad_words "):
        params.check_vocabulary(10, [[10]])


def test_allowed_ids_that_are_all_held_back_or_forbidden_are_refused() -> None:
    params = SamplingParams(allowed_token_ids=[4, 5, 6], stop_token_ids=[5], bad_words=["x"], min_tokens=1)
    params.check_vocabulary(10, [[4]], end_ids=[7])
    with pytest.raises(ValueError, match=r"^allowed_token_ids leaves no token to draw: .* min_tokens"):
        params.check_vocabulary(10, [[4]], end_ids=[6])
    replace(params, min_tokens=0).check_vocabulary(10, [[4]], end_ids=[6])


@pytest.mark.parametrize("name", STRING_LISTS)
def test_strings_are_limited_in_all(name: str) -> None:
    make(name, ["x" * 1024] * 16)
    with pytest.raises(ValueError, match=f"^{name} has 16385 characters in all, more than the limit of 16384"):
        make(name, [*["x" * 1024] * 16, "y"])


@pytest.mark.parametrize("name", STRING_LISTS)
def test_text_with_half_a_character_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} has a lone surrogate at character 1"):
        make(name, ["fine", "a\ud800"])
