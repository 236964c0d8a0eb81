"""When a sequence ends. All the rules are here.

Of all events the earliest token decides; on the same token a stop id counts before a stop string, and either before the
length, so that the reason does not depend on how many tokens a step brings. The token after which a grammar permits
nothing counts like a stop id, but is text. A stop string belongs to the token that completes it: before token number
``min_tokens`` it is ignored. Ids, grammars and lengths are known to the engine (:func:`cut`), stop strings only where
text is made; the two meet in :mod:`freewheel.engine.outputs`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

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


def cut(
    tokens: Sequence[int],
    stops: Mapping[int, int | None],
    room: int,
    completes: Callable[[int], bool] | None = None,
) -> tuple[int, FinishReason | None]:
    """Where a run of new tokens ends.

    Args:
        tokens: one or more new tokens of a sequence.
        stops: see :func:`stop_ids`. Before ``min_tokens`` the sampler never draws one of them.
        room: tokens that the sequence may still take, at least 1.
        completes: is told each token that goes on, and says whether a grammar lets nothing follow it.

    Returns:
        How many of the tokens are kept, and why the sequence ends with the last of these, if it does.
    """
    run = tokens[:room]
    if completes is not None or not stops.keys().isdisjoint(run):  # seldom true, and soon seen
        for count, token in enumerate(run, 1):
            if token in stops or (completes is not None and completes(token)):
                return count, FinishReason.STOP
    if len(tokens) >= room:
        return room, FinishReason.LENGTH
    return len(tokens), None
