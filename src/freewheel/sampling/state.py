"""What the sampler knows about each running sequence, by slot: what it asks on the host, the rest on the device.

A sequence takes a slot when it joins and gives it back when it leaves. Joining writes a few numbers and lists into the
slot's places; a step only appends tokens. Nothing is rebuilt, and a slot that asked for nothing costs nothing.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from math import e, log2
from typing import Any, NamedTuple

import torch
from torch import Tensor

from freewheel.sampling import tables
from freewheel.sampling.params import SamplingParams, check_seed
from freewheel.sampling.pool import ListPool, upload
from freewheel.sampling.tables import Tables

RANDOM, TRUNCATED, NUCLEUS, EDITED, LOGPROBS, PROCESSED, DEMANDING, PLAIN = NEEDS = tuple(1 << bit for bit in range(8))
"""What a slot needs: a draw, from what top-k, top-p or min-p leave, a nucleus of the whole vocabulary; masks, bias or
penalties; log probabilities, taken after all changes; anything but a draw; nothing else, now or once its edits end."""

ALWAYS = torch.iinfo(torch.int64).max


class Settings(NamedTuple):
    """What one sequence asks of the draw.

    Attributes:
        needs: a sum of the constants of this module.
        seed: a signed 64-bit integer.
        temperature: 0 or above.
        top_k: 1 to vocab; vocab keeps all.
        top_p: in (0, 1]; 1 keeps all.
        min_p: 0 to 1; 0 keeps all.
        alternatives: log probabilities to report beside the token's.
        edited_until: the position from which on masks, bias and penalties leave the logits alone.
        count_row: the row that counts the output tokens; -1 without penalties.
    """

    needs: int = 0
    seed: int = 0
    temperature: float = 0.0
    top_k: int = 1
    top_p: float = 1.0
    min_p: float = 0.0
    alternatives: int = 0
    edited_until: int = 0
    count_row: int = -1

    def edited(self, position: int) -> bool:
        """Whether masks, bias or penalties change the logits of the token at this position."""
        return position < self.edited_until


class SamplingState:
    """Per-slot parameters, token history and counts.

    Attributes:
        vocab_size: ids that the model knows; prompts may hold any of them.
        valid_vocab_size: ids that may be drawn, the first of the vocabulary.
        max_length: longest sequence, prompt and output.
        settings: what the sequence of each slot asks.
        history: int64 [slots, max_length], the tokens of each sequence.

    A state with tables keeps there what the kernels need, and none of what follows, which is for torch's operations:

        prompt_lengths: int64 [slots].
        repetition, frequency, presence: float32 [slots], the penalties.
        min_tokens: int64 [slots]; 0 for slots that have no id to hold back.
        allowed, held_back, bias_ids: pools of ids; bias_values: pool of float32, parallel to bias_ids.
        count_rows: int64 [slots], the row that counts the slot's output tokens; -1 for slots without penalties.
        bad_words: pool of the words' ids, word after word; bad_word_distances: parallel to it, how far each id is from
            its word's last one.
    """

    def __init__(
        self,
        slots: int,
        vocab_size: int,
        max_length: int,
        *,
        valid_vocab_size: int | None = None,
        drawn: int = 0,
        device: torch.device | str = "cpu",
        fused: bool | None = None,
    ) -> None:
        """Make room for ``slots`` sequences.

        Args:
            slots: sequences that can run at once.
            vocab_size: width of the model's logits.
            max_length: longest sequence in tokens.
            valid_vocab_size: ids that the tokenizer knows, where the head is padded beyond it.
            drawn: rows that are drawn at once at most, if more than slots: kernels find room for as many.
            device: where the logits will be.
            fused: keep the tables that the Triton kernels read. None does so for CUDA devices.
        """

        def numbers(dtype: torch.dtype, fill: float = 0) -> Tensor:
            return torch.full((slots,), fill, dtype=dtype, device=device)

        self.vocab_size = vocab_size
        self.valid_vocab_size = vocab_size if valid_vocab_size is None else min(valid_vocab_size, vocab_size)
        self.max_length = max_length
        self.device = torch.device(device)
        self.settings = [Settings()] * slots
        self.history = torch.zeros(slots, max_length, dtype=torch.int64, device=device)
        self.prompt_lengths = numbers(torch.int64)
        self.repetition = numbers(torch.float32, 1)
        self.frequency = numbers(torch.float32)
        self.presence = numbers(torch.float32)
        self.min_tokens = numbers(torch.int64)
        self.allowed = ListPool(slots, torch.int64, device)
        self.held_back = ListPool(slots, torch.int64, device)
        self.bias_ids = ListPool(slots, torch.int64, device)
        self.bias_values = ListPool(slots, torch.float32, device)
        self.bad_words = ListPool(slots, torch.int64, device)
        self.bad_word_distances = ListPool(slots, torch.int64, device)
        self.count_rows = numbers(torch.int64, -1)
        self._output_counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._free_count_rows: list[int] = []
        self._users: Counter[int] = Counter()
        self.changes = 0  # how often a slot was taken or given back
        fused = self.device.type == "cuda" if fused is None else fused
        self.tables = Tables(slots, max(slots, drawn), vocab_size, self.device) if fused else None

    def join(
        self,
        slot: int,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        *,
        seed: int,
        end_ids: Iterable[int] = (),
        noticed_ids: Iterable[int] = (),
        bad_word_ids: Iterable[Sequence[int]] = (),
        output_ids: Sequence[int] = (),
        checked: bool = False,
    ) -> None:
        """Give a sequence the slot.

        Args:
            slot: a slot that is free.
            params: what the request asks.
            prompt_ids: its prompt.
            seed: key of its draws, a signed 64-bit integer (``choice_seed`` of the request's seed).
            end_ids: ids that end a sequence; with ``params.stop_token_ids`` they are held back for ``min_tokens``.
            noticed_ids: ids that end the sequence, for kernels to notice some of them.
            bad_word_ids: token sequences of ``params.bad_words``.
            output_ids: tokens it has already made, when it comes back after a preemption.
            checked: ``params.check_vocabulary`` has passed with the same ids, and need not be repeated.

        Raises:
            ValueError: ids outside the vocabulary, a sequence longer than ``max_length``, or a seed of more bits. The
                slot is as it was.
        """
        seed = check_seed(seed)
        bad_word_ids = [word for word in bad_word_ids if len(word)]
        end_ids = tuple(end_ids)
        if not checked:
            params.check_vocabulary(self.valid_vocab_size, bad_word_ids, end_ids)
        tokens = torch.tensor([*prompt_ids, *output_ids], dtype=torch.int64)
        if len(tokens) > self.max_length:
            raise ValueError(f"the sequence has {len(tokens)} tokens, more than the limit of {self.max_length}")
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            raise ValueError(f"the prompt has an id outside the vocabulary of {self.vocab_size} tokens")
        self.leave(slot)

        upload(self.history[slot, : len(tokens)], tokens)
        top_k = min(params.top_k or self.valid_vocab_size, self.valid_vocab_size)
        needs = 0
        if params.temperature > 0.0:
            truncated = top_k < self.valid_vocab_size or params.top_p < 1.0 or params.min_p > 0.0
            needs |= RANDOM | TRUNCATED if truncated else RANDOM
            if truncated and top_k == self.valid_vocab_size and params.top_p < 1.0:
                needs |= NUCLEUS
        if params.logprobs is not None:
            needs |= LOGPROBS | PROCESSED if params.logprobs_mode == "processed" else LOGPROBS
        edited = params.allowed_token_ids or params.logit_bias or bad_word_ids or params.uses_penalties
        edited_until = ALWAYS if edited else 0
        ids = set()
        if params.min_tokens:
            # An end id outside the vocabulary (some configurations say -1) can't be drawn anyway.
            ids = {token for token in (*end_ids, *params.stop_token_ids) if 0 <= token < self.valid_vocab_size}
            if ids:
                edited_until = max(edited_until, len(prompt_ids) + params.min_tokens)
        if edited_until:
            needs |= EDITED
        if needs & ~RANDOM:
            needs |= DEMANDING
        if not needs & (TRUNCATED | LOGPROBS) and edited_until < ALWAYS:
            needs |= PLAIN
        count_row, columns = -1, {}
        if self.tables is None:
            count_row = self._put(slot, params, tokens, len(prompt_ids), ids, bad_word_ids)
        elif edited_until:
            columns = self.tables.edit(
                slot,
                allowed=params.allowed_token_ids,
                seen={*prompt_ids, *output_ids} if params.uses_penalties else None,
                output=output_ids,
                bias=dict(params.logit_bias or ()),
                held_back=ids,
                bad_words=bad_word_ids,
            )
            count_row = self.tables.count_rows.get(slot, -1)
        self.settings[slot] = Settings(
            needs=needs,
            seed=seed,
            temperature=params.temperature,
            top_k=top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            alternatives=params.logprobs or 0,
            edited_until=edited_until,
            count_row=count_row,
        )
        self._users.update(need for need in NEEDS if needs & need)
        self.changes += 1
        if self.tables is not None:
            self.tables.join(
                slot,
                {
                    tables.SEED: seed,
                    tables.NEEDS: needs,
                    tables.EDITED_UNTIL: edited_until,
                    tables.TOP_K: top_k,
                    tables.PROMPT_LENGTH: len(prompt_ids),
                    tables.MIN_TOKENS: params.min_tokens,
                    tables.ALTERNATIVES: params.logprobs or 0,
                    **{tables.ENDS + i: id + 1 for i, id in enumerate(islice(noticed_ids, tables.MOST_ENDS))},
                    **columns,
                },
                {
                    tables.TEMPERATURE: params.temperature,
                    tables.SCALE: log2(e) / (params.temperature or 1.0),
                    tables.TOP_P: params.top_p,
                    tables.MIN_P: params.min_p,
                    tables.REPETITION: params.repetition_penalty,
                    tables.FREQUENCY: params.frequency_penalty,
                    tables.PRESENCE: params.presence_penalty,
                },
            )

    def _put(
        self,
        slot: int,
        params: SamplingParams,
        tokens: Tensor,
        prompt_length: int,
        held_back: Collection[int],
        bad_word_ids: Sequence[Sequence[int]],
    ) -> int:
        """Note for torch's operations what the sequence asks; the row that counts its output, or -1."""
        self.prompt_lengths[slot] = prompt_length
        self.repetition[slot] = params.repetition_penalty
        self.frequency[slot] = params.frequency_penalty
        self.presence[slot] = params.presence_penalty
        if held_back:
            self.held_back.put(slot, torch.tensor(sorted(held_back), dtype=torch.int64))
            self.min_tokens[slot] = params.min_tokens
        if params.allowed_token_ids:
            self.allowed.put(slot, torch.tensor(params.allowed_token_ids, dtype=torch.int64))
        if params.logit_bias:
            bias = dict(params.logit_bias)
            self.bias_ids.put(slot, torch.tensor(list(bias.keys()), dtype=torch.int64))
            self.bias_values.put(slot, torch.tensor(list(bias.values()), dtype=torch.float32))
        if bad_word_ids:
            distances = [distance for word in bad_word_ids for distance in reversed(range(len(word)))]
            self.bad_words.put(slot, torch.tensor([token for word in bad_word_ids for token in word]))
            self.bad_word_distances.put(slot, torch.tensor(distances))
        if not params.uses_penalties:
            return -1
        count_row = self._count(tokens[prompt_length:].to(self.device))
        self.count_rows[slot] = count_row
        return count_row

    def asked(self, need: int) -> int:
        """How many sequences have this need."""
        return self._users[need]

    def append(self, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Add a token drawn for each of ``slots`` at the end of its sequence; all int64 [rows].

        Slots are distinct; on CPUs one may have several tokens, in the order of their positions. A row without a token
        (-1, see ``Samples.status``) is left as it is. So is, on CUDA devices, one whose position is not below
        ``max_length``; the host does not see it.

        Raises:
            IndexError: such a position, on other devices.
        """
        if self.tables is not None:
            from freewheel.sampling.fused import append  # only here: it imports Triton

            append(self, slots, positions, tokens)
            return
        history: Any = self.history
        output_counts: Any = self._output_counts
        if self.device.type == "cpu":  # to write a number through NumPy costs a tenth
            history, output_counts = history.numpy(), output_counts.numpy()
        for slot, position, token in zip(slots.tolist(), positions.tolist(), tokens.tolist()):
            if token >= 0:
                history[slot, position] = token
                row = self.settings[slot].count_row
                if row >= 0:
                    output_counts[row, token] += 1

    def leave(self, slot: int) -> None:
        """Give the slot back."""
        settings = self.settings[slot]
        if self.tables is not None:
            self.tables.leave(slot)
        else:
            lists = self.allowed, self.held_back, self.bias_ids, self.bias_values
            for pool in (*lists, self.bad_words, self.bad_word_distances):
                pool.drop(slot)
            self.min_tokens[slot] = 0
            if settings.count_row >= 0:
                self._free_count_rows.append(settings.count_row)
                self.count_rows[slot] = -1
        self._users.subtract(need for need in NEEDS if settings.needs & need)
        self.settings[slot] = Settings()
        self.changes += 1

    def holds_back(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Bool [rows]: whether the output is still shorter than ``min_tokens``."""
        return positions - self.prompt_lengths[slots] < self.min_tokens[slots]

    # The two views of what came before a row. Whatever reads history goes through them, and they see a row's path.

    def tokens_before(self, slots: Tensor, positions: Tensor, distances: Tensor, paths: Tensor | None = None) -> Tensor:
        """The token that lies ``distances`` before each position; -1 before the first. All int64 [rows].

        At distance 0 it is anything.

        Args:
            paths: int64 [rows, depth], see ``SampleRows``.
        """
        index = positions - distances
        before = self.history[slots, index.clamp(min=0)].where(index >= 0, -1)
        if paths is None or not paths.shape[1]:
            return before
        column, last = paths.shape[1] - distances, paths.shape[1] - 1
        on_path = paths[torch.arange(len(paths), device=paths.device), column.clamp(0, last)].where(column >= 0, -1)
        return on_path.where(on_path >= 0, before)

    def seen_tokens(
        self, slots: Tensor, positions: Tensor, paths: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All tokens before each row's position, end to end, repeated ones too. For slots with penalties.

        Args:
            paths: int64 [rows, depth], see ``SampleRows``.

        Returns:
            rows int64 [total], which row each token belongs to; tokens int64 [total]; output counts int32 [total], how
            often the row's output has this token.
        """
        rows = torch.repeat_interleave(positions)
        within = torch.arange(len(rows), device=rows.device) - (positions.cumsum(0) - positions)[rows]
        own = None if paths is None else paths[rows]
        tokens = self.tokens_before(slots[rows], positions[rows], positions[rows] - within, own)
        counts = self._output_counts if self.tables is None else self.tables.counts
        output_counts = counts[self.count_rows[slots][rows], tokens]
        if own is not None:
            output_counts = output_counts + (own == tokens[:, None]).sum(1, dtype=torch.int32)
        return rows, tokens, output_counts

    def _count(self, output: Tensor) -> int:
        """A row that counts ``output`` int64 [length]; rows are added as slots first need them."""
        if not self._free_count_rows:
            rows = len(self._output_counts)
            self._free_count_rows = list(range(rows, max(1, 2 * rows)))
            added = self._output_counts.new_zeros(len(self._free_count_rows), self.vocab_size)
            self._output_counts = torch.cat([self._output_counts, added])
        row = self._free_count_rows.pop()
        self._output_counts[row] = torch.bincount(output, minlength=self.vocab_size)
        return row
