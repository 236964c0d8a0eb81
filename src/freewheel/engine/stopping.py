"""When a sequence ends. All the rules are here.

Of all events the earliest token decides; on the same token a stop counts before the length, so that the reason does not
depend on how many tokens a step brings. Ids and lengths are known to the engine (:func:`cut`), stop strings only where
text is made (:class:`TextStop`); the two meet in :mod:`freewheel.engine.outputs`.
"""

from collections.abc import Iterable, Mapping, Sequence

from freewheel.engine.detokenize import StopStrings
from freewheel.request import FinishReason
from freewheel.sampling import SamplingParams


def stop_ids(params: SamplingParams, eos_token_ids: Iterable[int]) -> dict[int, int | None]:
    """The ids that end a sequence, and what it reports as ``stop_reason``: None for an end-of-sequence id."""
    ids: dict[int, int | None] = {token: token for token in params.stop_token_ids}
    if not params.ignore_eos:
        ids.update(dict.fromkeys(eos_token_ids))
    return ids


def max_length(params: SamplingParams, prompt_length: int, max_model_len: int) -> int:
    """Most tokens of prompt and output together."""
    if params.max_tokens is None:
        return max_model_len
    return min(prompt_length + params.max_tokens, max_model_len)


def cut(tokens: Sequence[int], stops: Mapping[int, int | None], room: int) -> tuple[int, FinishReason | None]:
    """Where a run of new tokens ends.

    Args:
        tokens: one or more new tokens of a sequence.
        stops: see :func:`stop_ids`. Before ``min_tokens`` the sampler never draws one of them.
        room: tokens that the sequence may still take, at least 1.

    Returns:
        How many of the tokens are kept, and why the sequence ends with the last of these, if it does.
    """
    for count, token in enumerate(tokens[:room], 1):
        if token in stops:
            return count, FinishReason.STOP
    if len(tokens) >= room:
        return room, FinishReason.LENGTH
    return len(tokens), None


class TextStop:
    """Finds stop strings in a sequence's text, from what token number ``min_tokens`` brings on."""

    def __init__(self, params: SamplingParams) -> None:
        assert not isinstance(params.stop, str)  # normalised
        self._strings = StopStrings(params.stop, params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens

    def push(self, text: str, token_count: int) -> tuple[str, str | None]:
        """What can be sent, and the stop string that is complete, if one is.

        Args:
            text: new text.
            token_count: tokens of the output so far, with those that brought the text.
        """
        if token_count < self._min_tokens:
            return text, None
        return self._strings.push(text)

    def flush(self) -> str:
        """What was held back, when the text ends without a stop string."""
        return self._strings.flush()
