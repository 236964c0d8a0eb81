"""The cases of the sampler's benchmark, and the systems that it compares, each as a function from logits to tokens."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import cycle
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Fields = dict[str, Any]
Draw = Callable[["Tensor"], "Tensor"]
Maker = Callable[[Sequence[Fields], "Tensor"], Draw | None]

TEMPERATURE = {"temperature": 0.8}
TRUNCATED = {**TEMPERATURE, "top_k": 50, "top_p": 0.95}
EVERYTHING = {
    **TRUNCATED,
    "min_p": 0.02,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "logit_bias": dict.fromkeys(range(0, 200, 10), 1.0),
}
ONE = "one with everything"
CASES: dict[str, Fields] = {
    "greedy": {"temperature": 0.0},
    "temperature": TEMPERATURE,
    "top-k, top-p": TRUNCATED,
    "top-p": {**TEMPERATURE, "top_p": 0.95},
    "everything": EVERYTHING,
    ONE: TEMPERATURE,  # but the row in the middle
}
PROMPT, OUTPUT = range(100, 200), range(150, 250)
POSITIONS = 64


def most_of(requests: Sequence[Fields]) -> Fields:
    """What a system does for every row that can't treat rows apart: what the one asks that asks for most."""
    return max(requests, key=len)


def torch_draw(requests: Sequence[Fields], logits: "Tensor") -> Draw:
    """How a program in torch draws: for every row of the batch all that one of them asks."""
    fields = most_of(requests)
    scale, top_k, top_p, min_p = (fields.get(name, 0) for name in ("temperature", "top_k", "top_p", "min_p"))
    seen, counts, bias = (logits.new_zeros(logits.shape[1]).float() for _ in range(3))
    seen[[*PROMPT, *OUTPUT]], counts[OUTPUT] = 1.0, 1.0
    for token, value in fields.get("logit_bias", {}).items():
        bias[token] = value

    def edited(logits: "Tensor") -> "Tensor":
        values = logits.float() + bias
        repetition = seen * (fields["repetition_penalty"] - 1.0) + 1.0
        values = (values / repetition).where(values > 0, values * repetition)
        return values - fields["frequency_penalty"] * counts - fields["presence_penalty"] * (counts > 0)

    def draw(logits: "Tensor") -> "Tensor":
        if not scale:
            return logits.argmax(-1)
        values = (edited(logits) if "logit_bias" in fields else logits.float()) / scale
        if not top_p:
            return values.softmax(-1).multinomial(1)
        values, ids = values.sort(-1, descending=True)
        if top_k:
            values[:, top_k:] = -float("inf")
        shares = values.softmax(-1)
        shares[(shares.cumsum(-1) - shares >= top_p) | (shares < min_p * shares[:, :1])] = 0.0
        return ids.gather(1, shares.multinomial(1))

    return draw


def gumbel_draw(requests: Sequence[Fields], logits: "Tensor") -> Draw | None:
    """Temperature and softmax, then the largest share over exponential noise."""
    del logits
    if most_of(requests) != TEMPERATURE:
        return None

    def draw(logits: "Tensor") -> "Tensor":
        shares = (logits.float() / TEMPERATURE["temperature"]).softmax(-1)
        return shares.div_(shares.new_empty(shares.shape).exponential_()).argmax(-1)

    return draw


def flashinfer_draw(requests: Sequence[Fields], logits: "Tensor") -> Draw | None:
    """FlashInfer's softmax, which takes float32, and its draws by rejection; it has no bias and no penalties.

    Seed and offset are fixed, as a CUDA graph would fix them in any case.
    """
    del logits
    fields, kernels = most_of(requests), import_module("flashinfer.sampling")
    if not fields["temperature"] or "logit_bias" in fields:
        return None
    noise = {"seed": 0, "offset": 0}

    def draw(logits: "Tensor") -> "Tensor":
        shares = kernels.softmax(logits.float(), temperature=fields["temperature"])
        if "top_k" in fields:
            how = {"filter_apply_order": "joint", **noise}
            return kernels.top_k_top_p_sampling_from_probs(shares, fields["top_k"], fields["top_p"], **how)
        if "top_p" in fields:
            return kernels.top_p_sampling_from_probs(shares, fields["top_p"], **noise)
        return kernels.sampling_from_probs(shares, **noise)

    return draw


def transformers_draw(requests: Sequence[Fields], logits: "Tensor") -> Draw:
    """The logits processors of transformers in the order of its ``generate``, for every row what one of them asks.

    It has no frequency and presence penalties: "everything" goes without.
    """
    import torch

    library: Any = import_module("transformers")
    fields, processors = most_of(requests), library.LogitsProcessorList()
    if "logit_bias" in fields:
        bias = {(token,): value for token, value in fields["logit_bias"].items()}
        processors.append(library.SequenceBiasLogitsProcessor(bias))
        processors.append(library.RepetitionPenaltyLogitsProcessor(fields["repetition_penalty"]))
    if fields["temperature"]:
        processors.append(library.TemperatureLogitsWarper(fields["temperature"]))
    for name, warper in (
        ("top_k", library.TopKLogitsWarper),
        ("top_p", library.TopPLogitsWarper),
        ("min_p", library.MinPLogitsWarper),
    ):
        if name in fields:
            processors.append(warper(fields[name]))
    seen = torch.tensor([[*PROMPT, *OUTPUT]], device=logits.device).repeat(len(logits), 1)

    def draw(logits: "Tensor") -> "Tensor":
        scores = processors(seen, logits.to(torch.float32, copy=True))
        return scores.softmax(-1).multinomial(1) if fields["temperature"] else scores.argmax(-1)

    return draw


def freewheel_draw(requests: Sequence[Fields], logits: "Tensor") -> Draw:
    """This engine's sampler, one request a row; each call is at the next position."""
    import torch

    from freewheel.sampling import Sampler, SampleRows, SamplingParams, SamplingState

    state = SamplingState(len(requests), logits.shape[1], 512, device=logits.device)
    for slot, fields in enumerate(requests):
        state.join(slot, SamplingParams(**fields), PROMPT, seed=slot, output_ids=OUTPUT)
    slots, length = torch.arange(len(requests), device=logits.device), len(PROMPT) + len(OUTPUT)
    rows = cycle([SampleRows(slots, torch.full_like(slots, length + step)) for step in range(POSITIONS)])
    sampler = Sampler(state)
    return lambda logits: sampler.sample(logits, next(rows)).tokens


SYSTEMS: dict[str, Maker] = {
    "torch": torch_draw,
    "gumbel": gumbel_draw,
    "flashinfer": flashinfer_draw,
    "transformers": transformers_draw,
    "freewheel": freewheel_draw,
}
PACKAGES = ("flashinfer", "transformers")  # which may be missing


def usable_systems(names: str | None, device: str) -> dict[str, Maker]:
    """The named systems, or all of them, but for those that cannot run here: for each of these a line is printed.

    Raises:
        ValueError: an unknown name, or nothing left.
    """
    chosen = names.split(",") if names else list(SYSTEMS)
    for name in chosen:
        if name not in SYSTEMS:
            raise ValueError(f"systems: unknown system {name!r} (known: {', '.join(SYSTEMS)})")
    missing = {}
    for name in PACKAGES:
        if name in chosen:
            try:
                import_module(name)
            except ImportError as error:
                missing[name] = str(error)
    if "flashinfer" in chosen and device == "cpu":
        missing["flashinfer"] = "it needs a CUDA device"
    for name, reason in missing.items():
        print(f"skipped    {name}: {reason}")
    systems = {name: SYSTEMS[name] for name in chosen if name not in missing}
    if not systems:
        raise ValueError(f"systems: {names!r} leaves none to measure")
    return systems


def cases_of(cases: Mapping[str, Fields], batch: int) -> Iterator[tuple[str, list[Fields]]]:
    """Each case, but for ``ONE`` without other rows, and what every row of the batch asks in it.

    The demanding row stands in the middle: the plain ones are no neighbours.
    """
    for case, fields in cases.items():
        if case != ONE or batch > 1:
            yield case, [EVERYTHING if case == ONE and row == batch // 2 else fields for row in range(batch)]


def workloads(
    systems: Mapping[str, Maker], logits: "Tensor", cases: Mapping[str, Fields] = CASES
) -> Iterator[tuple[str, dict[str, Draw]]]:
    """Each case, and a draw of every system that can do it, for logits [batch, vocab]."""
    for case, requests in cases_of(cases, len(logits)):
        draws = {name: make(requests, logits) for name, make in systems.items()}
        yield case, {name: draw for name, draw in draws.items() if draw}
