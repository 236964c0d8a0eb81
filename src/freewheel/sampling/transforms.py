"""Changes to the logits before anything is drawn: masks, then bias, then penalties."""

import torch
from torch import Tensor

from freewheel.sampling.state import SamplingState


def transform(
    state: SamplingState, logits: Tensor, slots: Tensor, positions: Tensor, paths: Tensor | None = None
) -> None:
    """Apply all that the rows' slots ask for, in the order of the contract.

    Args:
        logits: float32 [rows, valid_vocab_size], changed in place.
        slots, positions: int64 [rows].
        paths: int64 [rows, depth], see ``SampleRows``.
    """
    _keep_allowed(state, logits, slots)
    _ban_bad_words(state, logits, slots, positions, paths)
    _hold_back_ends(state, logits, slots, positions)
    _add_bias(state, logits, slots)
    _penalise(state, logits, slots, positions, paths)


def _keep_allowed(state: SamplingState, logits: Tensor, slots: Tensor) -> None:
    rows, ids = state.allowed.gather(slots)
    kept = logits[rows, ids]
    logits[state.allowed.lengths[slots] > 0] = -torch.inf
    logits[rows, ids] = kept


def _ban_bad_words(
    state: SamplingState, logits: Tensor, slots: Tensor, positions: Tensor, paths: Tensor | None
) -> None:
    rows, ids = state.bad_words.gather(slots)
    _, distances = state.bad_word_distances.gather(slots)
    last = distances == 0
    before = state.tokens_before(slots[rows], positions[rows], distances, None if paths is None else paths[rows])
    differs = (before != ids) & ~last
    # A word's last token is banned if no other one differs: the running count has not grown since the word before.
    differing = differs.cumsum(0)[last]
    banned = last.nonzero().flatten()[differing.diff(prepend=differing.new_zeros(1)) == 0]
    logits[rows[banned], ids[banned]] = -torch.inf


def _hold_back_ends(state: SamplingState, logits: Tensor, slots: Tensor, positions: Tensor) -> None:
    held = state.holds_back(slots, positions).nonzero().flatten()
    rows, ids = state.held_back.gather(slots[held])
    logits[held[rows], ids] = -torch.inf


def _add_bias(state: SamplingState, logits: Tensor, slots: Tensor) -> None:
    rows, ids = state.bias_ids.gather(slots)
    _, values = state.bias_values.gather(slots)
    logits[rows, ids] += values


def _penalise(state: SamplingState, logits: Tensor, slots: Tensor, positions: Tensor, paths: Tensor | None) -> None:
    penalised = (state.count_rows[slots] >= 0).nonzero().flatten()
    if not len(penalised):
        return
    asking = None if paths is None else paths[penalised]
    rows, ids, output_counts = state.seen_tokens(slots[penalised], positions[penalised], asking)
    rows = penalised[rows]
    drawable = ids < logits.shape[1]
    rows, ids, output_counts = rows[drawable], ids[drawable], output_counts[drawable]
    repetition, frequency, presence = (
        penalty[slots[rows]] for penalty in (state.repetition, state.frequency, state.presence)
    )
    values = logits[rows, ids]
    # Dividing a negative logit would raise it: a repeated token must lose whatever the sign.
    values = torch.where(values > 0, values / repetition, values * repetition)
    # An id that was seen several times is written several times, with the same value.
    logits[rows, ids] = values - frequency * output_counts - presence * (output_counts > 0)
