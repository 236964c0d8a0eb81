"""Freewheel's sampler in ``generate`` of the transformers library, 5.10 or later.

model.generate(**inputs, custom_generate=sample, do_sample=True, top_p=0.9, max_new_tokens=64, seed=7)

``generate`` prepares inputs, cache, processors and stopping criteria as always, and :func:`sample` decodes. Nothing of
transformers is imported here: it is the caller.
"""

import sys
from collections.abc import Sequence
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from freewheel.sampling.params import SamplingParams
from freewheel.sampling.rng import choice_seed, random_seed
from freewheel.sampling.sampler import Sampler, SampleRows, Status
from freewheel.sampling.state import SamplingState

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
    from transformers.generation.streamers import BaseStreamer

# Refused, unless None or this.
_NEUTRAL = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "constraints": None,
    "force_words_ids": None,
    "penalty_alpha": 0.0,
    "dola_layers": None,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "use_mtp": False,
    "output_scores": False,
    "output_attentions": False,
    "output_hidden_states": False,
}

# Refused: what would come between the sampler's truncation and its draw.
_FOREIGN = {
    "TopHLogitsWarper": "top_h",
    "TypicalLogitsWarper": "typical_p",
    "EpsilonLogitsWarper": "epsilon_cutoff",
    "EtaLogitsWarper": "eta_cutoff",
    "WatermarkLogitsProcessor": "watermarking_config",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config",
}

# The sampler's order, but that it bans first of all, which is the same: -inf stays, whatever bias and penalty it gets.
_ORDER = {
    "logit_bias": 0,
    "repetition_penalty": 1,
    "banned": 2,
    "held_back": 2,
    "temperature": 3,
    "top_k": 4,
    "top_p": 5,
    "min_p": 6,
    "nothing": 7,
}


def sample(
    model: Any,
    input_ids: Tensor,
    logits_processor: "LogitsProcessorList",
    stopping_criteria: "StoppingCriteriaList",
    generation_config: "GenerationConfig",
    *,
    seed: int | Sequence[int | None] | None = None,
    streamer: "BaseStreamer | None" = None,
    **model_kwargs: Any,
) -> Any:
    """Decode, greedily or by sampling, as ``custom_generate`` of ``model.generate``.

    Temperature, ``top_k``, ``top_p``, ``min_p``, ``repetition_penalty``, ``bad_words_ids``, ``suppress_tokens``,
    ``min_length``, ``min_new_tokens`` and a ``sequence_bias`` of single tokens are Freewheel's to apply. They are known
    by the processors that ``generate`` made of them. Any other processor (one of the user's, that of
    ``no_repeat_ngram_size``, one with a value that ``SamplingParams`` has no room for...) gets a float32 copy of the
    logits, together with the processors before it: each is applied once, in the order of transformers. Otherwise the
    sampler reads the logits in the model's own type.

    Tokens have the distribution that transformers gives them, but for rounding and:

    - Where logits are equal, top-k keeps exactly k and prefers small ids, and so does top-p. (Transformers keeps all
      that equal the k-th, and leaves open which of equals top-p keeps.)
    - Padding, where ``attention_mask`` is 0, is no part of a prompt: a row's tokens don't depend on its neighbours'
      lengths. (The repetition penalty of transformers sees the padding's id. ``min_length`` and ``max_length`` count
      padding there and here; ``min_new_tokens`` and ``max_new_tokens`` don't.)
    - Logits with NaN or +inf, or none above -inf, are an error. (Transformers has a token for them, if greedy.)

    Args:
        model: a language model of transformers, encoder-decoders too.
        input_ids: int64 [rows, length], the (decoder's) prompts, each ``num_return_sequences`` times.
        logits_processor, stopping_criteria, generation_config: as ``generate`` prepares them.
        seed: the key of the draws, a signed 64-bit integer: one for all prompts, or a list with each prompt's. None
            takes a random one. As everywhere in Freewheel, equal prompts with equal seeds get equal tokens; the
            sequences of ``num_return_sequences`` differ.
        streamer: gets prompts and tokens. The one passed to ``generate``, which doesn't hand it on, is found.
        model_kwargs: for the model.

    Returns:
        int64 [rows, total length]; with ``return_dict_in_generate`` the output class of transformers with sequences,
        cache and, if asked for, ``logits``: the model's, float32.

    Raises:
        ValueError: something is asked that can't be honoured; it names the field.
        RuntimeError: a row has no token left to draw, or NaN or +inf among its logits.
    """
    withheld = _withheld(model)
    _refuse(model, generation_config, logits_processor, withheld)
    if streamer is not None and withheld["streamer"] is None:
        streamer.put(input_ids.cpu())
    streamer = streamer or withheld["streamer"]
    (rows, width), device = input_ids.shape, input_ids.device
    pad = None
    if any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria):
        if generation_config._pad_token_tensor is None:
            raise ValueError("pad_token_id must be set: rows that have ended are padded")
        pad = generation_config._pad_token_tensor.to(device)
    keep_logits, kept = generation_config.output_logits and generation_config.return_dict_in_generate, ()
    crossed = model.config.is_encoder_decoder

    # What is read from the device is read before it has work to wait for.
    seeds = _seeds(seed, rows, generation_config.num_return_sequences or 1)
    prompts = _prompts(input_ids, model_kwargs.get("decoder_attention_mask" if crossed else "attention_mask"))
    others, params, banned, end_ids = _translate(logits_processor, width, generation_config.do_sample)
    compiles = model._valid_auto_compile_criteria(model_kwargs, generation_config)
    forward = model.get_compiled_call(generation_config.compile_config) if compiles else model
    outputs = model._prefill(input_ids, generation_config, model_kwargs)

    max_length = max(width + 1, stopping_criteria.max_length or 0, generation_config.max_length or 0)
    state = SamplingState(rows, outputs.logits.shape[-1], max_length, device=device)
    banned = [word for word in banned if all(0 <= token < state.vocab_size for token in word)]  # the rest never occur
    foreign = [token for token in dict(params.logit_bias or ()) if token >= state.vocab_size]
    if foreign:
        raise ValueError(f"sequence_bias has id {foreign[0]}, outside the vocabulary of {state.vocab_size} tokens")
    for row, prompt in enumerate(prompts):
        state.join(row, params, prompt, seed=seeds[row], bad_word_ids=banned, end_ids=end_ids)
    sampler, slots = Sampler(state), torch.arange(rows, device=device)
    positions = torch.tensor([len(prompt) for prompt in prompts], device=device)
    unfinished = torch.ones(rows, dtype=torch.bool, device=device)
    with model._optimize_model_for_decode():
        while True:
            model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs, is_encoder_decoder=crossed)
            logits = outputs.logits[:, -1].to(device)
            del outputs  # a whole prompt's logits may be large
            if keep_logits:
                kept += (logits.to(torch.float32, copy=True),)
            if others:
                logits = others(input_ids, logits.to(torch.float32, copy=True))
            samples = sampler.sample(logits, SampleRows(slots, positions))
            failed = (samples.status != Status.OK) & unfinished
            tokens = samples.tokens.clamp(min=0)  # -1 where a row failed, which no criterion may look up
            if pad is not None:
                tokens = torch.where(unfinished, tokens, pad)
            state.append(slots, positions, tokens)
            positions = positions + 1
            input_ids = torch.cat([input_ids, tokens[:, None]], dim=1)
            unfinished = unfinished & ~stopping_criteria(input_ids, None)  # pyright: ignore[reportArgumentType]
            # The step's one look at the device, which the loop of transformers takes too.
            going, any_failed = torch.stack([unfinished.any(), failed.any()]).tolist()
            if any_failed:
                row = int(failed.nonzero()[0])
                empty = samples.status[row] == Status.EMPTY
                raise RuntimeError(f"row {row} has {'no token left to draw' if empty else 'NaN or +inf as a logit'}")
            if streamer is not None:
                streamer.put(tokens.cpu())
            if not going:
                break
            new = 1 if model_kwargs["use_cache"] else None
            inputs = model.prepare_inputs_for_generation(input_ids, next_sequence_length=new, **model_kwargs)
            outputs = forward(**inputs, return_dict=True)
    if streamer is not None:
        streamer.end()
    if not generation_config.return_dict_in_generate:
        return input_ids
    utils = sys.modules["transformers.generation.utils"]
    kind = utils.GenerateEncoderDecoderOutput if crossed else utils.GenerateDecoderOnlyOutput
    cache = next((model_kwargs[name] for name in utils.ALL_CACHE_NAMES if name in model_kwargs), None)
    return kind(sequences=input_ids, logits=kept if keep_logits else None, past_key_values=cache)


def _withheld(model: Any) -> dict[str, Any]:
    """What the ``generate`` that is running was passed and keeps from a callable without a word."""
    frame = sys._getframe()
    while frame := frame.f_back:
        place = frame.f_globals.get("__name__"), frame.f_code.co_name
        if place == ("transformers.generation.utils", "generate") and frame.f_locals.get("self") is model:
            break
    arguments = frame.f_locals if frame else {}
    return {name: arguments.get(name) for name in ("streamer", "assistant_model", "synced_gpus")}


def _refuse(model: Any, config: Any, processors: Sequence[Any], withheld: dict[str, Any]) -> None:
    """Raise a ``ValueError`` for what can't be honoured."""
    refused = [name for name, neutral in _NEUTRAL.items() if getattr(config, name, None) not in (None, neutral)]
    refused += [_FOREIGN[kind] for kind in map(_kind, processors) if kind in _FOREIGN]
    if withheld["assistant_model"] is not None:
        refused.append("assistant_model")
    # None stands for whether the model is sharded.
    if model._extract_generation_mode_kwargs(None, {}, withheld["synced_gpus"], None, None)["synced_gpus"]:
        refused.append("synced_gpus")
    if refused:
        raise ValueError(f"{refused[0]} can't be combined with Freewheel's sampler")


def _seeds(seed: Any, rows: int, choices: int) -> list[int]:
    """The rows' keys, from those of their prompts."""
    given = list(seed) if isinstance(seed, list | tuple) else [seed] * (rows // choices)
    if len(given) != rows // choices:
        raise ValueError(f"seed has {len(given)} entries for {rows // choices} prompts")
    checked = [SamplingParams(seed=one).seed for one in given]
    seeds = [random_seed() if one is None else one for one in checked]
    return [choice_seed(seeds[row // choices], row % choices) for row in range(rows)]


def _prompts(input_ids: Tensor, mask: Any) -> list[list[int]]:
    """The rows' tokens without padding. The mask also covers what is in the cache already."""
    ids, width = input_ids.tolist(), input_ids.shape[1]
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] < width:
        return ids
    real = mask[:, mask.shape[1] - width :].tolist()
    return [[token for token, here in zip(*row) if here] for row in zip(ids, real)]


def _translate(processors: Any, width: int, do_sample: Any) -> tuple[Any, SamplingParams, list[Any], list[int]]:
    """From the end of the processors, take what the sampler does, as far as its order is theirs.

    Args:
        processors: a ``LogitsProcessorList``.
        width: of the prompts, padding included.
        do_sample: whether not greedy.

    Returns:
        the processors that are left, a list of the same type; parameters; ``bad_word_ids`` and ``end_ids`` of
        ``SamplingState.join``.
    """
    left, asked, place = type(processors)(processors), {}, len(_ORDER)
    while left and (meaning := _meaning(left[-1], width)) and _takes(*meaning):
        field, value = meaning
        known = asked.get(field)
        if field == "banned":
            value = value + (known or [])
        elif field == "held_back" and known and known[1] == value[1]:
            value = max(known, value)
        elif known is not None:
            break
        if _ORDER[field] > place:
            break
        asked[field], place = value, _ORDER[field]
        left.pop()
    asked.pop("nothing", None)
    banned, (least, end_ids) = asked.pop("banned", []), asked.pop("held_back", (0, []))
    if not do_sample:
        asked["temperature"] = 0.0
    return left, SamplingParams(max_tokens=None, min_tokens=max(least, 0), **asked), banned, end_ids


def _takes(field: str, value: Any) -> bool:
    """Whether the value is within the sampler's bounds; if not, the processor of transformers may well have a use."""
    try:
        SamplingParams(**({field: value} if field in SamplingParams.__dataclass_fields__ else {}))
    except ValueError:
        return False
    return True


def _kind(processor: Any) -> str:
    """The name of a processor's class; empty for one that is not of transformers: a subclass may do anything."""
    kind = type(processor)
    return kind.__name__ if kind.__module__ == "transformers.generation.logits_process" else ""


def _meaning(processor: Any, width: int) -> tuple[str, Any] | None:
    """A field of ``_ORDER`` and its value: what a processor asks of the sampler. None if it asks something else."""
    drops = getattr(processor, "filter_value", -inf) == -inf
    truncates = drops and getattr(processor, "min_tokens_to_keep", 1) == 1
    match _kind(processor):
        case "SequenceBiasLogitsProcessor":
            biases = {ids[0]: bias for ids, bias in processor.sequence_bias.items() if len(ids) == 1 and isfinite(bias)}
            return ("logit_bias", biases) if len(biases) == len(processor.sequence_bias) else None
        case "RepetitionPenaltyLogitsProcessor" if not processor.prompt_ignore_length:
            return "repetition_penalty", processor.penalty
        case "NoBadWordsLogitsProcessor":
            return "banned", list(processor.sequence_bias)
        case "SuppressTokensLogitsProcessor":
            return "banned", [(token,) for token in processor.suppress_tokens.tolist()]
        case "MinLengthLogitsProcessor":
            return "held_back", (processor.min_length - width, processor.eos_token_id.tolist())
        case "MinNewTokensLengthLogitsProcessor":
            length = processor.prompt_length_to_skip + processor.min_new_tokens
            return "held_back", (length - width, processor.eos_token_id.tolist())
        case "TemperatureLogitsWarper":
            return "temperature", processor.temperature
        case "TopKLogitsWarper" if drops:
            return "top_k", processor.top_k
        case "TopPLogitsWarper" if truncates:
            return "top_p", processor.top_p
        case "MinPLogitsWarper" if truncates:
            return "min_p", processor.min_p
        case "LogitNormalization":
            return "nothing", True
    return None
