"""From logits to tokens."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import chain, groupby
from math import inf, isfinite
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from freewheel.sampling.draw import Draw, Gumbel, Multinomial, TwoLevel
from freewheel.sampling.logprobs import Logprobs, describe
from freewheel.sampling.state import LOGPROBS, PROCESSED, RANDOM, TRUNCATED, SamplingState, Settings
from freewheel.sampling.transforms import transform
from freewheel.sampling.truncation import survivors

# What is derived from so many logits stays in the cache.
CHUNK = 2**20

# So many logits are copied while one more call, for the rows that are neighbours, is made.
CALL = 2**14

# What to add to the logits of eight ids, by the byte that permits some of them.
_FORBIDS = torch.log(torch.from_numpy(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], 1, bitorder="little")))

_EDITED = 1 << 16  # beside the constants of the state's needs


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
        masks: int32 [masks, words], a bit for each id that a grammar permits, 32 ids a word from the lowest bit on;
            words is the vocabulary's size over 32, rounded up.
        mask_rows: int64 [rows], which mask each row has; -1 for none. Kernels take it for granted that the mask exists.
        paths: int64 [rows, depth], the tokens of each row's path in a draft tree, which stand before its position and
            are not in the history; the last one in the last column, -1 where there are none.
        each: most rows of a slot, which are neighbours. Kernels have programs for as many demanding rows as there may
            be.
    """

    slots: Tensor
    positions: Tensor
    masks: Tensor | None = None
    mask_rows: Tensor | None = None
    paths: Tensor | None = None
    each: int = field(default=1, kw_only=True)


@dataclass(frozen=True)
class Samples:
    """What was drawn.

    Attributes:
        tokens: int64 [rows]; -1 where the status is not OK.
        status: uint8 [rows], values of ``Status``.
        logprobs: of the rows that asked for them and have a token, or None where no row asked.
        packed: uint8 [9 * rows], tokens and status, where they lie together and one copy fetches both.
    """

    tokens: Tensor
    status: Tensor
    logprobs: Logprobs | None
    packed: Tensor | None = None

    @classmethod
    def unpack(cls, packed: Tensor, logprobs: Logprobs | None) -> "Samples":
        """Views of what is packed."""
        rows = packed.shape[0] // 9
        return cls(packed[: 8 * rows].view(torch.int64), packed[8 * rows :], logprobs, packed)


class Sampler:
    """Draws one token for each row, as its slot in the state asks.

    A row's token depends on its own logits, parameters, history, seed and position alone: not on the other rows.

    Torch makes the passes over the vocabulary, many rows at a time. What remains of each row are a few hundred numbers,
    for which NumPy's dispatch, or none at all, costs less.
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
        self._fused = None
        if state.tables is not None:
            from freewheel.sampling.fused import FusedSampler  # only here: it imports Triton

            self._fused = FusedSampler(state, draw)

    @property
    def demand(self) -> Hashable:
        """What the sequences in slots ask together: a captured :meth:`sample` serves as long as it stays."""
        return None if self._fused is None else self._fused.demand

    def sample(self, logits: Tensor, rows: SampleRows) -> Samples:
        """Draw a token for each row. The caller appends it to the state before it draws the sequence's next one.

        Args:
            logits: [rows, vocab_size], any float type (float64 is rounded to float32); not modified. Kernels
                copy them where a row's bits could follow from its place in memory: never if they are contiguous.
            rows: where each row belongs.

        Raises:
            ValueError: logits, slots, positions and masks of shapes or types that do not fit; on CPUs, a mask that
                does not exist.
        """
        count, vocab = rows.slots.shape[0], self.state.vocab_size  # len of a tensor takes a microsecond
        if logits.shape != (count, vocab) or rows.positions.shape != rows.slots.shape:
            raise ValueError(
                f"logits must have the shape {(count, vocab)}, of {count} slots and a vocabulary of {vocab}, and there "
                f"must be as many positions: here are {tuple(logits.shape)} and {tuple(rows.positions.shape)}"
            )
        masks, mask_rows, words = rows.masks, rows.mask_rows, -(-vocab // 32)
        if (masks is None) != (mask_rows is None) or (mask_rows is not None and len(mask_rows) != count):
            raise ValueError("masks and mask_rows go together, and mask_rows must say for each row which mask it has")
        if masks is not None and (masks.dtype != torch.int32 or not len(masks) or masks.shape[1:] != (words,)):
            raise ValueError(f"masks must have {words} words of 32 bits, int32, and be at least one")
        if rows.paths is not None and (rows.paths.dim() != 2 or len(rows.paths) != count):
            raise ValueError(f"paths must have a row for each of {count}, not the shape {tuple(rows.paths.shape)}")
        if self._fused is not None:
            return self._sample_fused(self._fused, logits, rows)
        logits, valid = logits.detach(), self.state.valid_vocab_size
        logits = logits[:, :valid] if valid < vocab else logits
        masked = [-1] * count if masks is None or mask_rows is None else mask_rows.tolist()
        if masks is not None and max(masked, default=-1) >= len(masks):
            raise ValueError(f"mask_rows has {max(masked)}, and there are {len(masks)} masks")
        settings, positions = [self.state.settings[slot] for slot in rows.slots.tolist()], rows.positions.tolist()
        kinds = [
            asked.needs & (RANDOM | TRUNCATED) | (asked.edited(position) or mask >= 0) * _EDITED
            for asked, position, mask in zip(settings, positions, masked)
        ]
        tokens, statuses = [-1] * len(kinds), [0] * len(kinds)
        processed: dict[int, Tensor] = {}
        for kind, members in _groups(kinds, valid):
            at = _index(members)
            values = logits if len(members) == len(kinds) else logits[at]
            if kind & _EDITED:
                values = self._edit(values, rows, at)
            asked, values = [settings[row] for row in members], values.cpu().float()
            drawn, health = self._tokens(kind, values, asked, [positions[row] for row in members])
            for i, row in enumerate(members):
                tokens[row], statuses[row] = drawn[i], health[i]
                if asked[i].needs & PROCESSED and not health[i]:
                    processed[row] = _left(values[i], asked[i])

        found = torch.from_numpy(np.array(tokens, np.int64)), torch.from_numpy(np.array(statuses, np.uint8))
        logprobs = self._describe(logits, settings, tokens, statuses, processed)
        return Samples(found[0].to(logits.device), found[1].to(logits.device), logprobs)

    def _sample_fused(self, fused: Any, logits: Tensor, rows: SampleRows) -> Samples:
        """The same by Triton's kernels, which do not wait for the device."""
        if logits.dtype == torch.float64:
            logits = logits.float()
        count = rows.slots.shape[0]
        samples = Samples.unpack(torch.empty(9 * count, dtype=torch.uint8, device=logits.device), None)
        described = fused.sample(
            logits, rows.slots, rows.positions, rows.masks, rows.mask_rows, samples.tokens, samples.status,
            paths=rows.paths, each=rows.each,
        )  # fmt: skip
        if described is None:
            return samples
        return replace(samples, logprobs=Logprobs(torch.arange(count, device=logits.device), *described))

    def _describe(
        self,
        logits: Tensor,
        settings: Sequence[Settings],
        tokens: Sequence[int],
        statuses: Sequence[int],
        processed: Mapping[int, Tensor],
    ) -> Logprobs | None:
        """Log probabilities of the rows that asked for them and have a token."""
        if not any(asked.needs & LOGPROBS for asked in settings):
            return None
        asking = [row for row, asked in enumerate(settings) if asked.needs & LOGPROBS and not statuses[row]]
        return describe(
            torch.tensor(asking, dtype=torch.int64, device=logits.device),
            [processed.get(row, logits[row]) for row in asking],
            [settings[row].temperature or 1.0 if row in processed else 1.0 for row in asking],
            [tokens[row] for row in asking],
            [settings[row].alternatives for row in asking],
        )

    def _edit(self, logits: Tensor, rows: SampleRows, at: slice | list[int]) -> Tensor:
        """A float32 copy with masks, bias and penalties; all NaN where the model gave NaN or +inf.

        Args:
            logits: those of the rows that ``at`` selects.
            rows: of the whole batch.
            at: an index of rows.
        """
        values = logits.to(torch.float32, copy=True)
        sick = ~(values.amax(1) < torch.inf)
        if rows.masks is not None and rows.mask_rows is not None:
            forbids = _FORBIDS.to(values.device)
            for row, mask in zip(values, rows.mask_rows[at].tolist()):
                if mask >= 0:  # a table, as masked_fill takes seven times as long where bits are mixed
                    bits = rows.masks[mask].view(torch.uint8).int().to(values.device)
                    row += forbids.index_select(0, bits).view(-1)[: len(row)]
        paths = None if rows.paths is None else rows.paths[at]
        transform(self.state, values, rows.slots[at], rows.positions[at], paths)
        if sick.any():  # a mask must not hide it
            values[sick] = torch.nan
        return values

    def _tokens(
        self, kind: int, logits: Tensor, settings: Sequence[Settings], positions: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Tokens and status of rows of one kind, whose logits, float32 in host memory, are edited."""
        if not kind & RANDOM:
            values = logits.numpy()
            tokens = values.argmax(1).tolist()  # the first of the largest, or NaN
            statuses = [_status(values[row, token]) for row, token in enumerate(tokens)]
            return [-1 if status else token for token, status in zip(tokens, statuses)], statuses
        peaks = logits.amax(1, keepdim=True)
        statuses = [_status(peak) for [peak] in peaks.tolist()]
        if any(statuses):
            fine = [row for row, status in enumerate(statuses) if not status]
            tokens = [-1] * len(statuses)
            if fine:
                rest = [settings[row] for row in fine], [positions[row] for row in fine]
                for row, token in zip(fine, self._tokens(kind, logits[fine], *rest)[0]):
                    tokens[row] = token
        elif kind & TRUNCATED:
            tokens = [
                self._draw.truncated(logits[row : row + 1], peaks[row : row + 1], asked, position)
                for row, (asked, position) in enumerate(zip(settings, positions))
            ]
        else:
            tokens = self._draw.rows(logits, peaks, settings, positions)
        return tokens, statuses


def _status(peak: float) -> int:
    """Of a row whose largest logit this is."""
    if isfinite(peak):
        return 0
    return Status.EMPTY if peak == -inf else Status.NAN


def _groups(kinds: Sequence[int], vocab: int) -> Iterator[tuple[int, Sequence[int]]]:
    """The rows of each kind, ascending, as many at a time as a chunk holds: neighbours, where a copy costs more."""
    runs: dict[int, list[list[int]]] = {}
    for kind, run in groupby(range(len(kinds)), kinds.__getitem__):
        runs.setdefault(kind, []).append([*run])
    most = max(1, CHUNK // vocab)
    for kind, parts in runs.items():
        rows = [*chain.from_iterable(parts)]
        if kind & _EDITED or len(parts) * CALL > len(rows) * vocab:  # what is edited is copied in any case
            parts = [rows]
        for part in parts:
            for start in range(0, len(part), most):
                yield kind, part[start : start + most]


def _index(rows: Sequence[int]) -> slice | list[int]:
    """An index of the rows, ascending: a slice, which copies nothing, where they are neighbours."""
    return slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] < len(rows) else list(rows)


def _left(logits: Tensor, settings: Settings) -> Tensor:
    """The logits of one row, -inf where truncation drops the id."""
    if not settings.needs & TRUNCATED:
        return logits
    ids = torch.from_numpy(survivors(logits, settings)[0])
    return torch.full_like(logits, -torch.inf).index_copy_(0, ids, logits[ids])
