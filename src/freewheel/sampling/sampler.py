"""From logits to tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import inf, isfinite
from typing import Literal

import torch
from torch import Tensor

from freewheel.sampling.draw import Draw, Gumbel, Multinomial, TwoLevel, block_maxima, greedy
from freewheel.sampling.logprobs import Logprobs, describe
from freewheel.sampling.state import LOGPROBS, PROCESSED, RANDOM, TRUNCATED, SamplingState
from freewheel.sampling.transforms import transform
from freewheel.sampling.truncation import Limits, survivors


class Status(IntEnum):
    """Health of a row: fine, nothing left to draw, or NaN or +inf among its logits."""

    OK = 0
    EMPTY = 1
    NAN = 2


@dataclass(frozen=True)
class SampleRows:
    """Rows to draw for.

    Attributes:
        slots: int64 [rows], each row's place in the sampling state.
        positions: int64 [rows], the absolute position in its sequence of the token to draw; the key of its noise.
    """

    slots: Tensor
    positions: Tensor


@dataclass(frozen=True)
class Samples:
    """What was drawn.

    Attributes:
        tokens: int64 [rows]; -1 where the status is not OK.
        status: uint8 [rows], values of ``Status``.
        logprobs: of the rows that asked for them and have a token, or None where no row asked.
    """

    tokens: Tensor
    status: Tensor
    logprobs: Logprobs | None


class Sampler:
    """Draws one token for each row, as its slot in the state asks.

    A row's token depends on its own logits, parameters, history, seed and position alone: not on the other rows.
    """

    def __init__(
        self, state: SamplingState, *, draw: Literal["two_level", "gumbel", "multinomial"] = "two_level"
    ) -> None:
        """Sample for the sequences of ``state``.

        Args:
            state: the running sequences.
            draw: how to draw. All three sample the same distribution; only the first two are keyed by seed and
                position, "multinomial" takes torch's global generator.
        """
        draws: dict[str, type[Draw]] = {"two_level": TwoLevel, "gumbel": Gumbel, "multinomial": Multinomial}
        if draw not in draws:
            raise ValueError(f"draw must be one of {', '.join(draws)}, not {draw!r}")
        self.state = state
        self._draw = draws[draw]()

    @torch.no_grad()
    def sample(self, logits: Tensor, rows: SampleRows) -> Samples:
        """Draw a token for each row. The caller appends it to the state before it draws the sequence's next one.

        Args:
            logits: [rows, vocab_size], any float type (float64 is rounded to float32); not modified.
            rows: where each row belongs.
        """
        state, slots, positions = self.state, rows.slots, rows.positions
        if logits.dtype == torch.float64:
            logits = logits.float()
        raw = logits[:, : state.valid_vocab_size]
        # Rows are sorted by need on the host: a batch of one kind then takes no index at all.
        needs = state.needs[slots].tolist()
        edited = state.edited(slots, positions).tolist()
        tokens = torch.empty_like(slots)
        statuses = [Status.OK] * len(needs)
        scores: dict[int, Tensor] = {}
        for changed in (False, True):
            members = [row for row, changes in enumerate(edited) if changes == changed]
            if not members:
                continue
            group = _index(members, len(needs))
            values = raw[group]
            if changed:
                values = values.to(torch.float32, copy=isinstance(group, slice))
                sick = ~(values.amax(1) < torch.inf)
                transform(state, values, slots[group], positions[group])
                # A mask must not hide that the model has failed.
                values[sick] = torch.nan
            group_needs = [needs[row] for row in members]
            tokens[group], group_statuses = self._tokens(values, slots[group], positions[group], group_needs)
            for i, (row, status) in enumerate(zip(members, group_statuses)):
                statuses[row] = status
                if needs[row] & PROCESSED and status == Status.OK:
                    scores[row] = self._processed(values[i], slots[row])

        logprobs = None
        if any(need & LOGPROBS for need in needs):
            asking = [row for row, need in enumerate(needs) if need & LOGPROBS and statuses[row] == Status.OK]
            asking_at = torch.tensor(asking, dtype=torch.int64, device=slots.device)
            logprobs = describe(
                asking_at,
                [scores.get(row, raw[row]) for row in asking],
                tokens[asking_at],
                state.logprobs[slots[asking_at]].tolist(),
            )
        return Samples(tokens, torch.tensor(statuses, dtype=torch.uint8, device=slots.device), logprobs)

    def _tokens(
        self, logits: Tensor, slots: Tensor, positions: Tensor, needs: Sequence[int]
    ) -> tuple[Tensor, list[Status]]:
        """Tokens and status of rows whose logits are final but for temperature and truncation."""
        state = self.state
        maxima = block_maxima(logits)
        statuses = [_status(peak) for peak in maxima.amax(1).tolist()]
        kinds = [need & (RANDOM | TRUNCATED) if status == Status.OK else None for need, status in zip(needs, statuses)]
        tokens = torch.full_like(slots, -1)
        if members := [row for row, kind in enumerate(kinds) if kind == 0]:
            group = _index(members, len(needs))
            tokens[group] = greedy(logits[group], maxima[group])
        if members := [row for row, kind in enumerate(kinds) if kind == RANDOM]:
            group = _index(members, len(needs))
            keys = slots[group]
            tokens[group] = self._draw.rows(
                logits[group], maxima[group], state.temperatures[keys], state.seeds[keys], positions[group]
            )
        if members := [row for row, kind in enumerate(kinds) if kind == RANDOM | TRUNCATED]:
            for row, limits in zip(members, self._limits(slots[members])):
                at = slice(row, row + 1)
                tokens[row] = self._draw.truncated(
                    logits[at], maxima[at], limits, state.seeds[slots[at]], positions[at]
                )
        return tokens, statuses

    def _limits(self, slots: Tensor) -> Iterator[Limits]:
        """Temperature, top-k, top-p and min-p of each slot."""
        state = self.state
        columns = (state.temperatures, state.top_k, state.top_p, state.min_p)
        return map(Limits._make, zip(*(column[slots].tolist() for column in columns)))

    def _processed(self, logits: Tensor, slot: Tensor) -> Tensor:
        """The scores of one row after everything, [vocab]; a greedy row is left at temperature 1, untruncated."""
        [limits] = self._limits(slot[None])
        if limits.temperature == 0.0:
            return logits
        if not int(self.state.needs[slot]) & TRUNCATED:
            return (logits.double() - logits.max()) / limits.temperature
        ids, kept = survivors(logits, limits)
        return torch.full_like(logits, -torch.inf, dtype=torch.float64).index_put_((ids,), kept)


def _status(peak: float) -> Status:
    """Of a row with this largest logit."""
    if isfinite(peak):
        return Status.OK
    return Status.EMPTY if peak == -inf else Status.NAN


def _index(members: list[int], count: int) -> slice | list[int]:
    """An index for these of ``count`` rows, which makes no copy where that is all of them."""
    return slice(None) if len(members) == count else members
