"""The sampler in ``generate`` of transformers, beside transformers' own way."""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from drawing import p_value
from torch import Tensor
from transformers import (
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    LlamaForCausalLM,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer

from freewheel import LLM, SamplingParams
from freewheel.sampling import Sampler
from freewheel.sampling.generate import _translate, sample

PAD = 0
PROMPTS = torch.randint(1, 256, (3, 8), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Iterator[Any]:
    model = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    model.generation_config.pad_token_id = PAD
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model only waits for more
    yield model
    torch.set_num_threads(threads)


def padded(prompts: list[list[int]]) -> dict[str, Tensor]:
    """A batch with its padding on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def prepared(model: Any, **asked: Any) -> tuple[LogitsProcessorList, Tensor]:
    """The processors that ``generate`` makes of what is asked, and the expanded prompts."""
    found: list[Any] = []

    def keep(model: Any, input_ids: Tensor, logits_processor: Any, **_: Any) -> Tensor:
        found.extend((logits_processor, input_ids))
        return input_ids

    model.generate(custom_generate=keep, **asked)
    return found[0], found[1]


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.put_tokens: list[list[int]] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        assert value.device.type == "cpu"
        self.put_tokens.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


class Doubled(LogitsProcessor):
    """A processor of the user's, which changes what it is given and remembers it."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        self.seen.append(scores.clone())
        scores[:, 100:] *= 2
        return scores


class EndsRow(StoppingCriteria):
    """Ends a row at its own length."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        return torch.arange(len(input_ids)) + 10 <= input_ids.shape[1]


# Chosen so that each changes what the tiny model says.
GREEDY: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.5},
    {"repetition_penalty": 1000.0},
    {"eos_token_id": 222},
    {"eos_token_id": [222, 190], "min_new_tokens": 12},
    {"eos_token_id": 222, "min_length": 20},
    {"bad_words_ids": [[222], [190, 190]]},
    {"suppress_tokens": [222, 190, 9999]},
    {"sequence_bias": [[[222], -9.0], [[7], 4.0]]},
    {"sequence_bias": [[[222], -9.0], [[190, 190], -9.0]]},
    {"sequence_bias": [[[222], -float("inf")]], "bad_words_ids": [[190]], "repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 1, "repetition_penalty": 1.5, "suppress_tokens": [190]},
    {"forced_eos_token_id": 5, "max_new_tokens": 5},
    {"begin_suppress_tokens": [241, 222]},
    {"logits_processor": LogitsProcessorList([Doubled()]), "repetition_penalty": 1.3, "suppress_tokens": [222]},
    {"logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=8)])},
    {"stopping_criteria": StoppingCriteriaList([EndsRow()])},
    {"stopping_criteria": StoppingCriteriaList([EndsRow()]), "eos_token_id": None, "pad_token_id": None},
]


@pytest.mark.parametrize("asked", GREEDY, ids=lambda asked: "-".join(asked))
def test_greedy_equals_transformers(model: Any, asked: dict[str, Any]) -> None:
    plain = model.generate(PROMPTS, max_new_tokens=24)
    asked = {"max_new_tokens": 24, **asked}
    theirs = model.generate(PROMPTS, **asked)
    assert not torch.equal(theirs, plain), "the case asks for nothing"
    assert torch.equal(model.generate(PROMPTS, custom_generate=sample, **asked), theirs)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 3},
        {"renormalize_logits": True},
        {"max_length": 20, "min_length": 19, "eos_token_id": 222},
        {"bad_words_ids": [[222], [190, 190]], "eos_token_id": 207},
    ],
    ids=lambda asked: "-".join(asked) or "plain",
)
def test_greedy_equals_transformers_in_a_padded_batch(model: Any, asked: dict[str, Any]) -> None:
    batch = padded([PROMPTS[0, :3].tolist(), PROMPTS[1].tolist(), [9]])
    if "max_length" not in asked:
        asked = {"max_new_tokens": 24, **asked}
    theirs = model.generate(**batch, **asked)
    assert torch.equal(model.generate(**batch, custom_generate=sample, **asked), theirs)


def test_prompts_may_be_embeddings(model: Any) -> None:
    embeddings = model.get_input_embeddings()(PROMPTS)
    asked = {"inputs_embeds": embeddings, "max_new_tokens": 12, "repetition_penalty": 1.5}
    assert torch.equal(model.generate(custom_generate=sample, **asked), model.generate(**asked))


def test_a_filled_cache_goes_on(model: Any) -> None:
    batch = padded([PROMPTS[0, :3].tolist(), PROMPTS[1].tolist()])
    found = []
    for way in ({}, {"custom_generate": sample}):
        first = model.generate(**batch, max_new_tokens=4, return_dict_in_generate=True, **way)
        mask = torch.cat([batch["attention_mask"], torch.ones(2, 4, dtype=torch.int64)], 1)
        asked = {"past_key_values": first.past_key_values, "attention_mask": mask, "max_new_tokens": 8}
        found.append(model.generate(first.sequences, **asked, **way))
    assert torch.equal(*found)


def test_encoder_decoder() -> None:
    torch.manual_seed(0)
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "forced_eos_token_id": None}
    config = BartConfig(
        vocab_size=64, d_model=16, encoder_ffn_dim=32, decoder_ffn_dim=32, init_std=0.4,
        decoder_start_token_id=2, **sizes, **ids,
    )  # fmt: skip
    bart: Any = BartForConditionalGeneration(config).eval()
    asked = {"inputs": PROMPTS % 60 + 3, "max_new_tokens": 12, "repetition_penalty": 1.3, "min_new_tokens": 6}
    asked |= {"return_dict_in_generate": True, "output_logits": True}
    theirs, ours = bart.generate(**asked), bart.generate(custom_generate=sample, **asked)
    assert type(ours) is type(theirs)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert ours.past_key_values.get_seq_length() == theirs.past_key_values.get_seq_length()


ALL = {
    "sequence_bias": [[[3], 2.0], [[5], -1.5]],
    "repetition_penalty": 1.2,
    "bad_words_ids": [[7], [8, 9]],
    "min_new_tokens": 4,
    "suppress_tokens": [11, 12],
    "temperature": 0.7,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.02,
    "renormalize_logits": True,
}


def test_all_that_the_sampler_knows_is_the_samplers(model: Any) -> None:
    processors, _ = prepared(model, inputs=PROMPTS, do_sample=True, max_new_tokens=8, **ALL)
    assert len(processors) == 11  # a minimum of new tokens makes two
    left, params, banned, end_ids = _translate(processors, 8, True)
    assert not left
    assert len(processors) == 11
    assert sorted(banned) == [(7,), (8, 9), (11,), (12,)]
    assert end_ids == [260]
    assert params == SamplingParams(
        temperature=0.7,
        top_k=40,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.2,
        logit_bias={3: 2.0, 5: -1.5},
        min_tokens=4,
        max_tokens=None,
    )


def test_the_largest_minimum_counts() -> None:
    processors = LogitsProcessorList([MinLengthLogitsProcessor(12, 3), MinNewTokensLengthLogitsProcessor(8, 2, 3)])
    left, params, _, end_ids = _translate(processors, 8, False)
    assert not left
    assert params == SamplingParams(temperature=0.0, min_tokens=4, max_tokens=None)
    assert end_ids == [3]


def test_what_stands_before_a_foreign_processor_stays_there(model: Any) -> None:
    asked = {**ALL, "logits_processor": LogitsProcessorList([TopKLogitsWarper(60), Doubled()])}
    processors, _ = prepared(model, inputs=PROMPTS, do_sample=True, max_new_tokens=8, **asked)
    left, params, banned, end_ids = _translate(processors, 8, True)
    assert left == processors[:8]
    assert isinstance(left[-1], Doubled)
    assert (banned, end_ids) == ([], [])
    assert params == SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.02, max_tokens=None)


@pytest.mark.parametrize(
    ("processor", "after", "asked"),
    [
        (TopKLogitsWarper(5), [TemperatureLogitsWarper(0.5)], {"temperature": 0.5}),  # not in the sampler's order
        (TopPLogitsWarper(0.5), [TopPLogitsWarper(0.6)], {"top_p": 0.6}),
        (MinLengthLogitsProcessor(9, 3), [MinLengthLogitsProcessor(10, 4)], {"min_tokens": 2}),
        (TopKLogitsWarper(5, filter_value=-1.0), [], {}),
        (TopPLogitsWarper(0.5, min_tokens_to_keep=2), [], {}),
        (MinPLogitsWarper(0.5, min_tokens_to_keep=2), [], {}),
        (TopPLogitsWarper(0.0), [], {}),  # out of the sampler's bounds
        (RepetitionPenaltyLogitsProcessor(1000.0), [], {}),
        (SequenceBiasLogitsProcessor([[[3], 1e31]]), [], {}),
        (type("TemperatureLogitsWarper", (TemperatureLogitsWarper,), {})(0.5), [], {}),  # a subclass
    ],
)
def test_only_what_means_the_same_is_translated(processor: Any, after: list[Any], asked: dict[str, Any]) -> None:
    processors = LogitsProcessorList([processor, *after, LogitNormalization()])
    left, params, _, _ = _translate(processors, 8, True)
    assert left == [processor]
    assert params == SamplingParams(max_tokens=None, **asked)


@pytest.mark.parametrize(
    "asked",
    [
        {"top_k": 0},
        {"top_k": 0, "temperature": 1.7},
        {"top_k": 12},
        {"top_k": 0, "top_p": 0.7},
        {"top_k": 0, "top_p": 0.0},
        {"top_k": 0, "min_p": 0.05},
        ALL,
        {**ALL, "no_repeat_ngram_size": 2},
        {"top_k": 30, "top_p": 0.8, "logits_processor": LogitsProcessorList([Doubled()])},
    ],
    ids=["plain", "temperature", "top-k", "top-p", "top-p of 0", "min-p", "all", "all-and-foreign", "own"],
)
def test_tokens_have_the_distribution_of_transformers(model: Any, asked: dict[str, Any]) -> None:
    count = 1200
    asked = {**asked, "do_sample": True, "max_new_tokens": 1, "min_new_tokens": min(asked.get("min_new_tokens", 0), 1)}
    processors, ids = prepared(model, inputs=PROMPTS[:1], **asked)
    with torch.no_grad():
        scores = processors(ids, model(ids).logits[:, -1].clone())  # pyright: ignore[reportArgumentType]
    drawn = model.generate(PROMPTS[:1], custom_generate=sample, seed=5, num_return_sequences=count, **asked)
    assert drawn.shape == (count, 9)
    assert p_value(drawn[:, -1], scores[0].double().softmax(0).numpy()) > 1e-3


@pytest.mark.parametrize("asked", [{"top_k": 0}, {"top_p": 0.9}, ALL, {"repetition_penalty": 1.5, "temperature": 1.5}])
def test_a_row_has_the_same_tokens_alone_and_in_a_padded_batch(model: Any, asked: dict[str, Any]) -> None:
    prompts = [PROMPTS[0].tolist(), [9, 17], PROMPTS[1, :5].tolist(), [200]]
    asked = {**asked, "do_sample": True, "max_new_tokens": 20, "custom_generate": sample, "eos_token_id": 222}
    together = model.generate(**padded(prompts), seed=[11, 12, 13, 14], **asked)[:, 8:].tolist()
    for row, prompt in enumerate(prompts):
        alone = model.generate(**padded([prompt]), seed=11 + row, **asked)[0, len(prompt) :].tolist()
        assert together[row] == alone + [PAD] * (len(together[row]) - len(alone))


def test_the_engine_draws_the_same_tokens(model: Any, tiny_model: Path) -> None:
    shape = {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "repetition_penalty": 1.1}
    asked = {"do_sample": True, "max_new_tokens": 16, "num_return_sequences": 2, "eos_token_id": 260, **shape}
    prompts = [PROMPTS[0].tolist(), PROMPTS[1, :3].tolist()]
    ours = model.generate(**padded(prompts), custom_generate=sample, seed=3, **asked)[:, 8:].tolist()
    with LLM(tiny_model, dtype="float32") as llm:
        replies = llm.generate(prompts, SamplingParams(seed=3, n=2, max_tokens=16, ignore_eos=True, **shape))
    assert ours == [list(choice.token_ids) for reply in replies for choice in reply.outputs]


def test_seeds(model: Any) -> None:
    def drawn(**asked: Any) -> list[list[int]]:
        same = {"inputs": PROMPTS[:1].expand(2, -1), "do_sample": True, "max_new_tokens": 12}
        return model.generate(**same, custom_generate=sample, **asked)[:, 8:].tolist()

    one, other = drawn(seed=[1, 2])
    assert one != other
    assert drawn(seed=1) == [one, one]
    assert drawn(seed=2) == [other, other]
    assert drawn(seed=[2, 1]) == [other, one]
    assert drawn(seed=1, num_return_sequences=2)[::2] == [one, one]
    assert drawn(seed=1, num_return_sequences=2)[1] not in (one, other)
    assert drawn() != drawn()
    assert drawn(seed=[1, None])[0] == one
    bound = model.generate(PROMPTS[:1], do_sample=True, max_new_tokens=12, custom_generate=partial(sample, seed=1))
    assert bound[0, 8:].tolist() == one


@pytest.mark.parametrize(
    ("field", "asked"),
    [
        ("num_beams", {"num_beams": 2}),
        ("constraints", {"constraints": [object()]}),
        ("force_words_ids", {"force_words_ids": [[3]]}),
        ("penalty_alpha", {"penalty_alpha": 0.6, "top_k": 4}),
        ("dola_layers", {"dola_layers": "low"}),
        ("prompt_lookup_num_tokens", {"prompt_lookup_num_tokens": 3}),
        ("assistant_early_exit", {"assistant_early_exit": 1}),
        ("use_mtp", {"use_mtp": True}),
        ("assistant_model", {"assistant_model": True}),
        ("synced_gpus", {"synced_gpus": True}),
        ("output_scores", {"output_scores": True, "return_dict_in_generate": True}),
        ("output_attentions", {"output_attentions": True, "return_dict_in_generate": True}),
        ("output_hidden_states", {"output_hidden_states": True, "return_dict_in_generate": True}),
        ("typical_p", {"typical_p": 0.9, "do_sample": True}),
        ("epsilon_cutoff", {"epsilon_cutoff": 0.01, "do_sample": True}),
        ("eta_cutoff", {"eta_cutoff": 0.01, "do_sample": True}),
        ("top_h", {"top_h": 0.5, "do_sample": True}),
        ("watermarking_config", {"watermarking_config": WatermarkingConfig(bias=2.0)}),
        ("sequence_bias", {"sequence_bias": [[[9999], 1.0]]}),
        ("seed", {"seed": "one"}),
        ("seed", {"seed": [1, 2]}),
        ("seed", {"seed": 2**63}),
        ("pad_token_id", {"pad_token_id": None, "eos_token_id": None, "stopping_criteria": "eos"}),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(model: Any, field: str, asked: dict[str, Any]) -> None:
    if asked.get("assistant_model"):
        asked = {"assistant_model": model}
    if asked.get("stopping_criteria"):
        ends = EndsRow()
        ends.eos_token_id = 4  # pyright: ignore[reportAttributeAccessIssue]
        asked = {**asked, "stopping_criteria": StoppingCriteriaList([ends])}
    with pytest.raises(ValueError, match=rf"\b{field}\b"):
        model.generate(PROMPTS, custom_generate=sample, max_new_tokens=4, **asked)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_processor_of_the_users_sees_what_transformers_would_show_it(tiny_model: Path, dtype: torch.dtype) -> None:
    model: Any = LlamaForCausalLM.from_pretrained(tiny_model, dtype=dtype)
    asked = {"repetition_penalty": 1.3, "bad_words_ids": [[222]], "max_new_tokens": 8, "use_cache": False}
    made: list[tuple[Tensor, Tensor]] = []
    model.register_forward_hook(lambda module, args, output: made.append((output.logits, output.logits.clone())))
    theirs, ours = Doubled(), Doubled()
    model.generate(PROMPTS, logits_processor=LogitsProcessorList([theirs]), **asked)
    model.generate(PROMPTS, logits_processor=LogitsProcessorList([ours]), custom_generate=sample, **asked)
    assert len(ours.seen) == 8
    assert all(scores.dtype == torch.float32 for scores in ours.seen)
    assert all(torch.equal(*pair) for pair in zip(ours.seen, theirs.seen))
    model.generate(PROMPTS, logits_processor=LogitsProcessorList([Doubled()]), custom_generate=sample, max_new_tokens=2)
    assert all(torch.equal(*pair) for pair in made), "the model's own logits were changed"


def test_tokens_are_streamed(model: Any) -> None:
    asked = {"inputs": PROMPTS, "max_new_tokens": 12, "eos_token_id": 222}
    theirs = Recorder()
    model.generate(streamer=theirs, **asked)
    passed, bound, wrapped, both = (Recorder() for _ in range(4))
    model.generate(custom_generate=sample, streamer=passed, **asked)
    model.generate(custom_generate=partial(sample, streamer=bound), **asked)
    model.generate(custom_generate=lambda *args, **kwargs: sample(*args, **kwargs), streamer=wrapped, **asked)
    model.generate(custom_generate=partial(sample, streamer=both), streamer=both, **asked)
    assert len(theirs.put_tokens) == 13
    for ours in (passed, bound, wrapped, both):
        assert ours.put_tokens == theirs.put_tokens
        assert ours.ended


def test_stop_strings_and_time_limits_stop(model: Any, tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    plain = model.generate(PROMPTS[:1], max_new_tokens=24)
    stop = tokenizer.decode(plain[0, 16:17])
    asked = {"max_new_tokens": 24, "stopping_criteria": StoppingCriteriaList([StopStringCriteria(tokenizer, stop)])}
    stopped = model.generate(PROMPTS[:1], custom_generate=sample, **asked)
    assert torch.equal(stopped, model.generate(PROMPTS[:1], **asked))
    assert stopped.shape[1] < 24
    assert model.generate(PROMPTS, custom_generate=sample, max_new_tokens=24, max_time=1e-9).shape == (3, 9)
    with pytest.raises(ValueError, match="stop strings"):  # transformers keeps the tokenizer to itself
        model.generate(PROMPTS, custom_generate=sample, stop_strings="a", tokenizer=tokenizer)


def test_a_dictionary_is_returned_with_logits_and_cache(model: Any) -> None:
    asked = {"inputs": PROMPTS, "max_new_tokens": 6, "repetition_penalty": 1.5, "return_dict_in_generate": True}
    theirs = model.generate(output_logits=True, **asked)
    ours = model.generate(output_logits=True, custom_generate=sample, **asked)
    assert type(ours) is type(theirs)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert len(ours.logits) == 6
    assert all(torch.equal(*pair) for pair in zip(ours.logits, theirs.logits))
    assert ours.past_key_values.get_seq_length() == theirs.past_key_values.get_seq_length() == 13
    assert model.generate(custom_generate=sample, **asked).logits is None


def test_the_sampler_reads_the_logits_of_the_model(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    given: list[Tensor] = []
    made: list[Tensor] = []
    draw = Sampler.sample

    def watched(self: Sampler, logits: Tensor, rows: Any) -> Any:
        given.append(logits)
        return draw(self, logits, rows)

    monkeypatch.setattr(Sampler, "sample", watched)
    model.register_forward_hook(lambda module, args, output: made.append(output.logits))
    model.generate(PROMPTS, custom_generate=sample, do_sample=True, max_new_tokens=3, seed=0, repetition_penalty=1.2)
    assert len(given) == 3
    assert all(mine.dtype == torch.bfloat16 for mine in given)
    assert all(mine.untyped_storage().data_ptr() == its.untyped_storage().data_ptr() for mine, its in zip(given, made))


class Spoils(LogitsProcessor):
    """Sets all logits of one row."""

    def __init__(self, row: int, value: float) -> None:
        self.row, self.value = row, value

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        scores[self.row] = self.value
        return scores


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(
    ("value", "message"),
    [(float("nan"), "row 1 has NaN"), (float("inf"), "row 1 has NaN"), (-float("inf"), "row 1 has no")],
)
def test_rows_without_a_token_are_reported(model: Any, value: float, message: str, do_sample: bool) -> None:
    asked = {"do_sample": do_sample, "logits_processor": LogitsProcessorList([Spoils(1, value)])}
    with pytest.raises(RuntimeError, match=message):
        model.generate(PROMPTS, custom_generate=sample, max_new_tokens=4, **asked)


def test_rows_that_have_ended_may_have_any_logits(model: Any) -> None:
    class Late(Spoils):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
            return super().__call__(input_ids, scores) if input_ids.shape[1] > 8 else scores

    asked = {"max_new_tokens": 6, "eos_token_id": 222, "do_sample": False}  # the third row ends at once
    theirs = model.generate(PROMPTS, **asked)
    assert theirs[2, 8:].tolist() == [222] + [PAD] * 5
    late = LogitsProcessorList([Late(2, float("nan"))])
    assert torch.equal(model.generate(PROMPTS, custom_generate=sample, logits_processor=late, **asked), theirs)


def test_the_examples_of_the_page_run(model: Any, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "sampling.md").read_text()
    loop, adapter = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(loop.splitlines()) <= 20
    prompt_ids = PROMPTS[0].tolist()
    given = {"model": model, "prompt_ids": prompt_ids, "tokenizer": AutoTokenizer.from_pretrained(tiny_model)}

    exec(loop, space := dict(given))
    found = space["state"].history[:, 8:]
    assert capsys.readouterr().out == f"{found.tolist()}\n"
    asked = {"inputs": PROMPTS[:1], "max_new_tokens": 32, "custom_generate": sample, "eos_token_id": 9999}
    others = [{}, {"do_sample": True, "top_k": 0, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 7}]
    for row, other in zip(found, others, strict=True):
        assert row.tolist() == model.generate(**asked, **other)[0, 8:].tolist()

    exec(adapter, space := dict(given))
    shown = given["tokenizer"].decode(space["tokens"][0]).strip()
    assert capsys.readouterr().out.strip() == shown
