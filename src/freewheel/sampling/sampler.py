"""From logits to tokens."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import torch
from torch import Tensor

from freewheel.sampling.draw import Draw, Gumbel, Multinomial, TwoLevel, block_maxima, greedy
from freewheel.sampling.logprobs import Logprobs, describe
from freewheel.sampling.state import SamplingState
from freewheel.sampling.transforms import transform
from freewheel.sampling.truncation import survivors


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
        tokens = torch.full_like(slots, -1)
        status = torch.zeros(len(slots), dtype=torch.uint8, device=slots.device)
        scores: dict[int, Tensor] = {}
        wants_logprobs = state.logprobs[slots] >= 0
        wants_processed = wants_logprobs & state.processed_logprobs[slots]

        edited = state.edited(slots, positions)
        for group in ((~edited).nonzero().flatten(), edited.nonzero().flatten()):
            if not len(group):
                continue
            if edited[group[0]]:
                values = raw[group].float()
                sick = ~(values.amax(1) < torch.inf)
                transform(state, values, slots[group], positions[group])
                # A mask must not hide that the model has failed.
                values[sick] = torch.nan
            else:
                values = _take(raw, group)
            tokens[group], status[group] = self._tokens(values, slots[group], positions[group])
            for i in (wants_processed[group] & (status[group] == Status.OK)).nonzero().flatten().tolist():
                scores[int(group[i])] = self._processed(values[i], slots[group[i]])

        logprobs = None
        if wants_logprobs.any():
            asking = (wants_logprobs & (status == Status.OK)).nonzero().flatten()
            logprobs = describe(
                asking,
                [scores.get(row, raw[row]) for row in asking.tolist()],
                tokens[asking],
                state.logprobs[slots[asking]].tolist(),
            )
        return Samples(tokens, status, logprobs)

    def _tokens(self, logits: Tensor, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and status of rows whose logits are final but for temperature and truncation."""
        state = self.state
        maxima = block_maxima(logits)
        peaks = maxima.amax(1)
        status = torch.full_like(slots, Status.OK).masked_fill_(peaks == -torch.inf, Status.EMPTY)
        status.masked_fill_(~(peaks < torch.inf), Status.NAN)
        fine = status == Status.OK
        random = fine & (state.temperatures[slots] > 0)
        truncated = random & state.truncated[slots]

        tokens = torch.full_like(slots, -1)
        rows = (fine & ~random).nonzero().flatten()
        if len(rows):
            tokens[rows] = greedy(_take(logits, rows), maxima[rows])
        rows = (random & ~truncated).nonzero().flatten()
        if len(rows):
            keys = slots[rows]
            tokens[rows] = self._draw.rows(
                _take(logits, rows), maxima[rows], state.temperatures[keys], state.seeds[keys], positions[rows]
            )
        rows = truncated.nonzero().flatten()
        for row, limits, seed, position in zip(
            rows.tolist(), self._limits(slots[rows]), state.seeds[slots[rows]].tolist(), positions[rows].tolist()
        ):
            tokens[row] = self._draw.survivors(*survivors(logits[row], *limits), seed, position)
        return tokens, status.to(torch.uint8)

    def _limits(self, slots: Tensor) -> Iterable[tuple[float, int, float, float]]:
        """Temperature, top-k, top-p and min-p of each slot."""
        state = self.state
        return zip(
            *(setting[slots].tolist() for setting in (state.temperatures, state.top_k, state.top_p, state.min_p))
        )

    def _processed(self, logits: Tensor, slot: Tensor) -> Tensor:
        """The scores of one row after everything, [vocab]; a greedy row is left at temperature 1, untruncated."""
        [limits] = self._limits(slot[None])
        temperature = limits[0]
        if temperature == 0.0:
            return logits
        if not self.state.truncated[slot]:
            return (logits.double() - logits.max()) / temperature
        ids, kept = survivors(logits, *limits)
        return torch.full_like(logits, -torch.inf, dtype=torch.float64).index_put_((ids,), kept)


def _take(values: Tensor, rows: Tensor) -> Tensor:
    """``values[rows]``, without a copy where that is all of them."""
    return values if len(rows) == len(values) else values[rows]
