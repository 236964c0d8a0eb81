"""What the kernels know about each sequence, by slot, on the device.

A slot's numbers are one row of ``settings``. What changes single logits lies in a row of edits, which only slots have
that ask for such changes: for each id of the vocabulary one bit in each of four planes and a count,

    bits    [rows, 5, words]  allowed | seen | touched | listed | ranks (listed ids before the word, not a bit plane)

in a row of counts, which only slots with penalties have,

    counts  [count rows, vocab]  how often the output has the id

and in a list: five numbers for each listed id, in ascending order (the id, its bias as float32 bits, whether it is held
back, where the bad words that end in it begin, how many these are), then two for each word (where its tokens begin, how
many precede its last one), then these tokens. Places are relative to the list's start. What comes of it lies in

    values  [drawn rows, vocab]  the edited logits of the touched ids; written and read within one call
"""

from collections.abc import Collection, Mapping, Sequence
from math import e, log2

import numpy as np
import torch

from freewheel.sampling.pool import ListPool, upload

(
    SEED, NEEDS, EDITED_UNTIL, TEMPERATURE, TOP_K, TOP_P, MIN_P, PROMPT_LENGTH, MIN_TOKENS, REPETITION, FREQUENCY,
    PRESENCE, EDIT_ROW, EDIT_KINDS, EDIT_LIST, LISTED_COUNT, ALTERNATIVES, SCALE, ENDS,
) = range(19)  # fmt: skip
"""Columns of the settings: int64, or float64 seen as int64."""

MOST_ENDS = 8
COLUMNS = ENDS + MOST_ENDS
"""From ``ENDS`` on there are ids, each plus one, at which the sequence ends; 0 where there are fewer."""

ALLOWED, SEEN, TOUCHED, LISTED, RANKS, PLANES = range(6)
LIMITED, PENALISED, KIND_BITS = 1, 2, 2
"""Kinds of edits: some ids only are allowed; penalties. The bits above them are the slot's row of counts."""


def most_bytes(slots: int, drawn: int, vocab_size: int) -> int:
    """What rows of edits and counts take if each slot has one, with those they replace as they grow; and edited logits.

    Rows double. The lists are not counted. ``drawn`` are the most rows of a draw.
    """
    rows = 1 << max(slots - 1, 0).bit_length()
    return rows * (PLANES * 4 * -(-vocab_size // 32) + 4 * vocab_size) * 3 // 2 + 4 * drawn * vocab_size


class Tables:
    """The device's side of a ``SamplingState``.

    Attributes:
        settings: int64 [slots, COLUMNS].
        lists: pool of int32, the lists described above.
        bits: int32 [rows, PLANES, words].
        values: float32 [drawn rows, vocab]; none before any slot has edits.
        counts: int32 [count rows, vocab].
        count_rows: the row of counts of each slot that has one.
        moves: how often storage has moved to a larger place: a CUDA graph captured before the last move is void.
    """

    def __init__(self, slots: int, drawn: int, vocab_size: int, device: torch.device) -> None:
        self._drawn = drawn
        self.vocab_size = vocab_size
        self.words = -(-vocab_size // 32)
        self.device = device
        self.settings = torch.zeros(slots, COLUMNS, dtype=torch.int64, device=device)
        self.settings.view(torch.float64)[:, SCALE] = log2(e)  # a slot that nobody has joined is greedy
        self.lists = ListPool(slots, torch.int32, device)
        self.bits = torch.zeros(0, PLANES, self.words, dtype=torch.int32, device=device)
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self.values = torch.zeros(0, vocab_size, device=device)
        self.moves = 0
        self._rows: dict[int, int] = {}
        self._free_rows: list[int] = []
        self.count_rows: dict[int, int] = {}
        self._free_count_rows: list[int] = []

    def join(self, slot: int, integers: Mapping[int, int], reals: Mapping[int, float]) -> None:
        """Write the slot's numbers, by column, in one transfer; columns that are not named become 0."""
        row = np.zeros(COLUMNS, np.int64)
        row[list(integers)] = list(integers.values())
        row.view(np.float64)[list(reals)] = list(reals.values())
        upload(self.settings[slot], torch.from_numpy(row))

    def edit(
        self,
        slot: int,
        *,
        allowed: Collection[int] | None,
        seen: Collection[int] | None,
        output: Sequence[int],
        bias: Mapping[int, float],
        held_back: Collection[int],
        bad_words: Sequence[Sequence[int]],
    ) -> dict[int, int]:
        """Give the slot a row of edits and a list.

        Args:
            slot: a slot without any.
            allowed: the ids that may be drawn, or None for all.
            seen: ids of prompt and output, if the slot has penalties.
            output: tokens it has already made.
            bias: added to the logits of these ids.
            held_back: ids not drawn until the output has ``min_tokens``.
            bad_words: token sequences whose last one is not drawn after the others.

        Returns:
            columns of its settings.
        """
        words: dict[int, list[Sequence[int]]] = {}
        for word in bad_words:
            words.setdefault(word[-1], []).append(word[:-1])
        listed = sorted({*bias, *held_back, *words})
        planes = np.zeros((PLANES, self.words * 32), dtype=bool)
        planes[ALLOWED, list(allowed or ())] = True
        planes[SEEN, list(seen or ())] = True
        planes[LISTED, listed] = True
        planes[TOUCHED] = planes[SEEN] | planes[LISTED]
        bits = np.packbits(planes, axis=1, bitorder="little").view(np.int32)
        in_words = planes[LISTED].reshape(-1, 32).sum(1)
        bits[RANKS] = in_words.cumsum() - in_words

        if not len(self.values):
            self.make_room(self._drawn)
        row = self._take_row(slot)
        upload(self.bits[row], torch.from_numpy(bits))
        kinds = (allowed is not None) * LIMITED
        if seen is not None:
            count_row = self._take_count_row(slot)
            kinds |= PENALISED | count_row << KIND_BITS
            made = torch.empty(len(output), dtype=torch.int64, device=self.device)
            upload(made, torch.tensor(output, dtype=torch.int64))
            self.counts[count_row].zero_().scatter_add_(0, made, torch.ones_like(made, dtype=torch.int32))
        columns = {EDIT_ROW: row, EDIT_KINDS: kinds, LISTED_COUNT: len(listed)}
        if listed:
            columns[EDIT_LIST] = self._put_list(slot, listed, bias, held_back, words)
        return columns

    def make_room(self, drawn: int) -> None:
        """Let so many rows be drawn at once where any slot has edits."""
        if self.values.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"sample {drawn} rows once before a graph is captured: memory is made then")
        self.values = torch.zeros(drawn, self.vocab_size, device=self.device)
        self.moves += 1

    def leave(self, slot: int) -> None:
        """Free the slot's rows of edits and counts and its list.

        A slot that had them is greedy from now on: others may take them over, and a row that still names the slot must
        not write there. The numbers of one that had none do no harm, and stay until another sequence joins.
        """
        self.lists.drop(slot)
        if slot in self._rows:
            self._free_rows.append(self._rows.pop(slot))
            if slot in self.count_rows:
                self._free_count_rows.append(self.count_rows.pop(slot))
            self.join(slot, {}, {SCALE: log2(e)})

    def _put_list(
        self,
        slot: int,
        listed: Sequence[int],
        bias: Mapping[int, float],
        held_back: Collection[int],
        words: Mapping[int, Sequence[Sequence[int]]],
    ) -> int:
        """Store the slot's list; where it starts."""
        first_word = 5 * len(listed)
        first_token = first_word + 2 * sum(map(len, words.values()))
        entries, heads, tokens = [], [], []
        for token in listed:
            mine = words.get(token, ())
            number = int(np.float32(bias.get(token, 0.0)).view(np.int32))
            entries += [token, number, token in held_back, first_word + len(heads), len(mine)]
            for before in mine:
                heads += [first_token + len(tokens), len(before)]
                tokens += before
        capacity = len(self.lists.entries)
        start = self.lists.put(slot, torch.tensor(entries + heads + tokens, dtype=torch.int32))
        self.moves += len(self.lists.entries) != capacity
        return start

    def _take_row(self, slot: int) -> int:
        if not self._free_rows:
            rows = len(self.bits)
            self._free_rows = list(range(rows, max(1, 2 * rows)))
            added = len(self._free_rows)
            self.bits = torch.cat([self.bits, self.bits.new_zeros(added, PLANES, self.words)])
            self.moves += 1
        self._rows[slot] = self._free_rows.pop()
        return self._rows[slot]

    def _take_count_row(self, slot: int) -> int:
        if not self._free_count_rows:
            rows = len(self.counts)
            self._free_count_rows = list(range(rows, max(1, 2 * rows)))
            added = self.counts.new_zeros(len(self._free_count_rows), self.vocab_size)
            self.counts = torch.cat([self.counts, added])
            self.moves += 1
        self.count_rows[slot] = self._free_count_rows.pop()
        return self.count_rows[slot]
