"""The engine: requests in, one step after the other, replies out. It knows token ids and nothing of text."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from math import isnan
from operator import attrgetter
from time import perf_counter
from typing import Any, NamedTuple

from freewheel.cache.pool import KVPool
from freewheel.cache.radix import Node, PrefixCache
from freewheel.config import EngineConfig
from freewheel.engine.buckets import BUCKETS, MAX_DRAFT_ROWS, most_drawn
from freewheel.engine.drafting import DeviceDrafting, Drafting, Pace, StepTimes
from freewheel.engine.limits import Limits
from freewheel.engine.runner import Decoder, InFlight, Runner, Sampled, Span, StepResult
from freewheel.engine.scheduler import Capacity, Entry, pages_for, plan
from freewheel.engine.stopping import cut, max_length, stop_ids
from freewheel.grammar import Compiler, Matcher
from freewheel.request import FinishReason, Request, Sequence, Stats, StepOutput, TokenLogprobs
from freewheel.sampling import Sampler, SamplingState, Status, choice_seed, random_seed
from freewheel.sampling.params import shown
from freewheel.speculative import NgramIndex, SpeculationMetrics

# Scoring a prompt needs a row of logits for every token, as a draft does: a step's [rows, vocab_size] must stay small.
MAX_SCORED_ROWS = 128
PAGES_AHEAD = 8  # that a sequence is given beyond what its drafts need, where the device makes them

_rank = attrgetter("rank")

ERRORS: dict[int, str] = {
    Status.EMPTY: "no token is left to draw: masks and truncation exclude every one",
    Status.NAN: "the model's logits are NaN or infinite",
}


class Engine:
    """Continuous batching over a paged key-value cache, for one thread.

    Every request that :meth:`add` accepts gets exactly one output with a ``finish_reason`` for each of its choices,
    except those that :meth:`finish` ends on the caller's own account.

    Args:
        decoder: the model.
        pool: its key-value cache, with room for at least one sequence of ``max_model_len`` tokens.
        config: options; memory and length are already settled in ``pool`` and ``max_model_len``.
        max_model_len: most tokens of a sequence.
        vocab_size: width of the logits.
        valid_vocab_size: ids that the tokenizer knows; only these are drawn and accepted.
        eos_token_ids: every end-of-sequence id.
        corpus: what drafts may come from, beside each sequence's own tokens.
        runner: makes what runs the steps.
        grammars: compiles those of requests; None: there are no requests with one.

    Attributes:
        limits: what it takes.
        runner: what it made.
        grammars: as given.
        lookahead: steps that are launched before the first of them is read; may change between steps.
        preemptions: how often a sequence had to give up its slot.

    Raises:
        ValueError: the pool is too small, or the device is none to speculate on.
    """

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        config: EngineConfig,
        *,
        max_model_len: int,
        vocab_size: int,
        valid_vocab_size: int | None = None,
        eos_token_ids: Iterable[int] = (),
        corpus: NgramIndex | None = None,
        runner: Callable[[Any, KVPool, Sampler], Runner] = Runner,
        grammars: Compiler | None = None,
    ) -> None:
        if pool.num_pages < pages_for(max_model_len, pool.page_size):
            raise ValueError(
                f"max_model_len: {max_model_len} tokens do not fit into {pool.num_pages} pages of {pool.page_size}"
            )
        kernels = config.uses_kernels(pool.device.type)
        if config.speculation and pool.device.type != "cpu" and not kernels:
            raise ValueError("speculation must not be True on CUDA devices with fused=False: there kernels draft")
        self.config = config
        self.grammars = grammars
        self._pool = pool
        self._cache = PrefixCache(pool.num_pages, pool.page_size)
        self._state = SamplingState(
            config.max_num_seqs + 1,  # the last is that of idle rows
            vocab_size,
            max_model_len,
            valid_vocab_size=valid_vocab_size,
            drawn=most_drawn(config),
            device=pool.device,
            fused=config.uses_kernels(pool.device.type),
        )
        self.limits = Limits(
            max_model_len,
            vocab_size,
            self._state.valid_vocab_size,
            frozenset(eos_token_ids),
            repeatable=config.draw != "multinomial",
        )
        self.runner = runner(decoder, pool, Sampler(self._state, draw=config.draw))
        self._slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._requests: dict[str, list[Sequence]] = {}  # choices that have not ended
        self._waiting: list[Sequence] = []  # by rank
        self._running: dict[int, Sequence] = {}  # by key
        self._ranked: list[Sequence] = []  # the same by rank, or empty if that has changed
        self._added = 0
        self._keys = 0
        self._outputs: list[StepOutput] = []
        self._flights: deque[tuple[list[_Row], InFlight, float]] = deque()  # and when they were launched
        self._busy: tuple[float, float | None] = 0.0, None  # seconds so far, and since when it is again
        default = 1 if pool.device.type == "cuda" else 0
        self.lookahead = default if config.lookahead is None else config.lookahead
        self._more_ahead = 0  # where nobody drafts: guesses and plans take the host longer than a step, now and then
        self._drafting: Drafting | DeviceDrafting | None = None
        self._pace = Pace()
        self._most_rows = config.most_rows(pool.device.type)
        if config.speculation and kernels:
            times = StepTimes(self.runner.seconds, config.draft_nodes, self._most_rows)
            self._drafting = DeviceDrafting(times, config.draft_nodes)
            self._more_ahead = int(config.lookahead is None and self.lookahead > 0)
        elif config.speculation:
            self._drafting = Drafting(config, self._pace, corpus)
            self.lookahead = 0
        self.preemptions = 0

    def preparations(self) -> list[tuple[str, Callable[[], None]]]:
        """What can be done before the first request comes, with its name; else it is done when first needed."""
        return self.runner.preparations()

    @property
    def has_unfinished(self) -> bool:
        """Whether :meth:`step` has something to do or to tell."""
        return bool(self._requests or self._outputs)

    @property
    def speculation(self) -> SpeculationMetrics | None:
        """What drafts have brought, over all requests; None where there are none."""
        return self._drafting and self._drafting.metrics

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence."""
        return self.limits.max_model_len

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for one."""
        return len(self._waiting)

    @property
    def stats(self) -> Stats:
        """What it does now, for those who watch."""
        pages = self._pool.num_pages
        return Stats(
            len(self._running), len(self._waiting), self.preemptions, pages, pages - self._cache.available,
            self.busy_seconds,
        )  # fmt: skip

    @property
    def busy_seconds(self) -> float:
        """How long there was a step on its way, from its launch until its results were here, up to now."""
        seconds, since = self._busy
        return seconds if since is None else seconds + perf_counter() - since

    def add(self, request: Request, *, checked: bool = False) -> None:
        """Queue a request.

        Args:
            request: its ``request_id`` differs from those of all unfinished requests.
            checked: it is what :meth:`Limits.validate` returned, which need not be repeated.

        Raises:
            ValueError: see :meth:`Limits.validate`, or its ``request_id`` is in use.
        """
        if request.request_id in self._requests:
            raise ValueError(f"request_id {shown(request.request_id)} is in use")
        if not checked:
            request = self.limits.validate(request, self.grammars)
        params = request.params
        seed = params.seed
        if seed is None:
            seed = random_seed() if self.config.seed is None else choice_seed(self.config.seed, self._added)
        prompt = list(request.prompt_ids)
        stops = stop_ids(params, self.limits.eos_token_ids)  # like the prompt, one for all choices: it may be long
        sequences = [
            Sequence(
                request,
                index,
                tokens=prompt,
                key=self._keys + index,
                seed=choice_seed(seed, index),
                stop_ids=stops,
                max_length=max_length(params, len(prompt), self.max_model_len),
                node=self._cache.root,
            )
            for index in range(params.n)
        ]
        self._added += 1
        self._keys += params.n
        leader, *followers = sequences
        for follower in followers:
            follower.leader = leader
        leader.followers = followers
        self._requests[request.request_id] = sequences
        insort(self._waiting, leader, key=_rank)

    def abort(self, request_id: str) -> None:
        """End a request at once, with a reply from the next step; a request that is not there is ignored."""
        for sequence in list(self._requests.get(request_id, ())):
            self._end(sequence, StepOutput(request_id, sequence.index, finish_reason=FinishReason.ABORT))

    def finish(self, request_id: str, index: int) -> None:
        """End one choice without a reply: the caller has found its end. One that is not there is ignored."""
        for sequence in self._requests.get(request_id, ()):
            if sequence.index == index:
                self._end(sequence, None)
                return

    def step(self) -> list[StepOutput]:
        """Launch the rows of one step, and return what the step brought that was launched ``lookahead`` steps before.

        Or a step more, if it is the engine's choice: what is known late makes drafts worse, where there are any.

        What the decoder raises passes through; the caller then has to :meth:`abort` what it had added.
        """
        rows = self._schedule()
        if rows:
            drafting, asked = self._drafting, list[Sequence]()
            if isinstance(drafting, DeviceDrafting):
                asked = self._draft_ahead(rows, drafting)
            elif drafting is not None:
                self._draft(rows, drafting)
            self._note_busy()
            for sequence, span, _ in rows:
                sequence.launched = span.start + span.rows + span.nodes
                sequence.pending += span.sample + span.nodes
                sequence.slack += span.nodes
            try:
                flight = self._launch([row.span for row in rows])
            except BaseException:
                self._note_idle()
                for sequence, _, stay in rows:  # some may have got their token: they begin again, and get the same
                    if stay == sequence.stay:
                        self._preempt(sequence)
                raise
            self._flights.append((rows, flight, perf_counter()))
            if asked and isinstance(drafting, DeviceDrafting):
                drafting.review(asked, self._most_nodes)
        drafts = isinstance(self._drafting, DeviceDrafting) and self._drafting.planned
        ahead = self.lookahead + (0 if drafts else self._more_ahead)
        self._land(max(len(self._flights) - ahead, not rows))
        return self._take_outputs()

    def _catch_up(self) -> None:
        """Read all steps before the one that is being launched: its masks go by their tokens."""
        self._land(len(self._flights))
        self._note_busy()

    def _land(self, count: int) -> None:
        """Read the results of so many steps."""
        for _ in range(min(count, len(self._flights))):
            landed, flight, launched = self._flights.popleft()
            asked = perf_counter()
            result = flight.result()
            self._note_idle()
            if isinstance(self._drafting, DeviceDrafting):
                self._drafting.landed([row.span for row in landed], launched, asked, perf_counter())
            self._retire(landed, result)

    def _note_busy(self) -> None:
        if self._busy[1] is None:
            self._busy = self._busy[0], perf_counter()

    def _note_idle(self) -> None:
        """Unless a step is on its way."""
        if not self._flights:
            self._busy = self.busy_seconds, None

    def _launch(self, spans: list[Span]) -> InFlight:
        if not isinstance(self._drafting, Drafting):
            return self.runner.launch(spans, self._catch_up)
        began = perf_counter()
        flight = self.runner.launch(spans, self._catch_up)
        if all(span.draft or span.rows == 1 for span in spans):  # what prompts take says nothing about drafts
            self._pace.observe(sum(span.rows for span in spans), perf_counter() - began)
        return flight

    def check(self) -> None:
        """Verify pages, prefix tree, slots and queues against each other.

        Raises:
            AssertionError: saying what is wrong.
        """
        self._cache.check(sequence.pages for sequence in self._running.values())
        taken = [sequence.slot for sequence in self._running.values()]
        assert sorted(taken + self._slots) == list(range(self.config.max_num_seqs)), "a slot is lost or taken twice"
        assert all(not sequence.pages and sequence.slot < 0 for sequence in self._waiting), "it waits and holds"
        assert self._waiting == sorted(self._waiting, key=_rank), "the queue is out of order"
        known = {sequence.key for sequences in self._requests.values() for sequence in sequences}
        parked = {
            follower.key for sequence in (*self._waiting, *self._running.values()) for follower in sequence.followers
        }
        queued = {sequence.key for sequence in self._waiting}
        assert known == parked | queued | self._running.keys(), "a sequence is lost"
        for sequence in self._running.values():
            assert self._pool.page_table[sequence.slot] is sequence.pages, "a page table is not what its sequence holds"
            size = self._pool.page_size
            assert sequence.computed <= len(sequence.pages) * size
            drafted = 0 if self._drafting is None else (1 + self.lookahead) * self.config.draft_nodes
            if isinstance(self._drafting, DeviceDrafting):
                drafted += PAGES_AHEAD * size
            longest = max(sequence.length, sequence.launched) + drafted
            assert len(sequence.pages) <= pages_for(longest, size), "it holds a page that it has no use for"
            assert self._cache.path(sequence.node) == sequence.pages[: sequence.node.depth]
            private = sum(self._cache.pages.references[page] == 1 for page in sequence.pages)
            assert self._count_private(sequence.pages) == private, "pages are not shared from the beginning on"

    def _schedule(self) -> list["_Row"]:
        """Plan the step, and do to queues, slots and pages what the plan says."""
        steady = self._steady()
        if steady:
            return steady
        if self._drafting is not None:
            self._give_back_pages()
        while True:
            offers: dict[int, _Offer] = {}
            running = [self._entry(sequence) for sequence in self._running.values()]
            capacity = Capacity(
                self._most_rows,
                len(self._slots),
                self._cache.available,
                self._pool.page_size,
                MAX_SCORED_ROWS,
            )
            outcome = plan(running, self._candidates(offers), capacity)
            if outcome.preempt is None:
                break
            if any(sequence.slack for sequence in self._running.values()):
                return []  # what is in flight may give back pages
            self._preempt(self._running[outcome.preempt])

        for key, _ in outcome.rows:  # all before the first allocation, which must not evict what another one shares
            if key in offers:
                self._admit(offers[key])
        planned = [(self._running[key], count) for key, count in outcome.rows]
        self._secure(
            (sequence, len(sequence.tokens) if sequence.key in offers else sequence.launched + count)
            for sequence, count in planned
        )
        return [_Row(sequence, _span(sequence, count), sequence.stay) for sequence, count in planned]

    def _steady(self) -> list["_Row"]:
        """What the plan says where nobody waits, all decode, and rows and pages suffice: a row each. Else nothing."""
        if self._waiting or len(self._running) > self._most_rows:
            return []
        if not self._ranked:
            self._ranked = sorted(self._running.values(), key=_rank)
        size = self._pool.page_size
        rows: list[_Row] = []
        short: list[tuple[Sequence, int]] = []
        for sequence in self._ranked:
            start, length = sequence.launched, sequence.length
            if length != start + 1 or length >= sequence.max_length or sequence.scoring:
                return []
            if start == len(sequence.pages) * size:
                short.append((sequence, length))
            span = Span(sequence.slot, start, 1, True)
            if sequence.matcher is not None:
                span = span._replace(matcher=_active(sequence))
            rows.append(_Row(sequence, span, sequence.stay))
        if len(short) > self._cache.available:
            return []
        if short:
            self._secure(short)
        return rows

    def _draft(self, rows: list["_Row"], drafting: Drafting) -> None:
        """Add drafts to the rows of those who decode, by rank, as far as rows and pages are left."""
        left = min(
            self._most_rows - sum(row.span.rows for row in rows),
            MAX_SCORED_ROWS - sum(len(row.span.scored) for row in rows),
        )
        decoding = [i for i, row in enumerate(rows) if row.span.rows == 1 and row.span.sample]
        if not decoding:
            return
        drafting.price(len(decoding))
        size, pages = self._pool.page_size, self._cache.available
        needs: list[tuple[Sequence, int]] = []
        for i in decoding:
            sequence, span, _ = rows[i]
            most = min(left, (len(sequence.pages) + pages) * size - span.start - 1)
            tree = drafting.draft(sequence, most) if most > 0 else None
            if tree is not None:
                rows[i] = rows[i]._replace(span=span._replace(rows=tree.rows, draft=tree))
                left -= len(tree.tokens)
                end = span.start + tree.rows
                pages -= max(pages_for(end, size) - len(sequence.pages), 0)
                needs.append((sequence, end))
        if needs:
            self._secure(needs)

    def _draft_ahead(self, rows: list["_Row"], drafting: DeviceDrafting) -> list[Sequence]:
        """Let the device draft for those who decode, by rank, as far as rows and pages are left.

        The host goes on as if all were accepted: it knows how far a sequence gets at most.

        Returns:
            Those of whom it was asked how much to draft.
        """
        decoding = [i for i, row in enumerate(rows) if row.span.rows == 1 and row.span.sample and not row.span.scored]
        sequences = [rows[i].sequence for i in decoding]
        asked = sequences if 0 < len(sequences) <= BUCKETS[-1] else []
        wanted = drafting.nodes(asked, self._most_nodes) if asked else [0] * len(sequences)
        guessing = bool(asked) and drafting.guessing and not any(wanted)
        if not (guessing or any(wanted) or any(sequence.slack for sequence in sequences)):
            return asked
        left = min(self._most_rows - sum(row.span.rows for row in rows), MAX_DRAFT_ROWS - len(decoding))
        # All that run find another page, and those who wait find all there are.
        size, pages = self._pool.page_size, 0 if self._waiting else max(self._cache.available - len(self._running), 0)
        free = self._cache.pages.free - len(self._running)
        needs: list[tuple[Sequence, int]] = []
        for i, sequence, nodes in zip(decoding, sequences, wanted):
            slot, start = rows[i].span[:2]
            if nodes:
                nodes = max(min(nodes, left, (len(sequence.pages) + pages) * size - start - 1), 0)
                left -= nodes
                end = start + 1 + nodes
                if end > len(sequence.pages) * size:
                    missing = pages_for(end, size) - len(sequence.pages)
                    # To tell the device of a page takes a launch, so the next steps get theirs as well.
                    rest = pages_for(sequence.max_length, size) - len(sequence.pages) - missing
                    ahead = min(PAGES_AHEAD, rest, max(min(pages, free) - missing, 0))
                    pages, free = pages - missing - ahead, free - missing - ahead
                    needs.append((sequence, min(end + ahead * size, sequence.max_length)))
            guess, follows = guessing and self._most_nodes(sequence) > 0, sequence.slack > 0
            if nodes or guess or follows:
                span = Span(slot, start, 1, True, nodes=nodes, guess=guess, follows=follows, matcher=_active(sequence))
                rows[i] = _Row(sequence, span, sequence.stay)
        if needs:
            self._secure(needs)
        return asked

    def _most_nodes(self, sequence: Sequence) -> int:
        """Of a draft that the device makes."""
        return max(sequence.max_length - sequence.length - 1, 0)

    def _candidates(self, offers: dict[int, "_Offer"]) -> Iterator[Entry]:
        """Waiting sequences with what the prefix cache offers them, looked up as the scheduler gets to them."""
        size = self._pool.page_size
        lowest = max((sequence.rank[0] for sequence in self._running.values()), default=0)
        for sequence in self._waiting:
            if not self._slots and sequence.rank[0] >= lowest:
                return  # without a look: no slot is free, nor can one be taken
            offer = offers[sequence.key] = self._offer(sequence)
            pages = len(offer.pages)
            private, idle = self._count_private(offer.pages), sum(map(self._cache.pages.is_idle, offer.pages))
            yield self._entry(sequence)._replace(computed=pages * size, pages=pages, private=private, idle=idle)

    def _entry(self, sequence: Sequence) -> Entry:
        # Some can only wait for what is in flight: their last token, or scores, which come in order.
        in_flight = sequence.launched > sequence.computed
        waits = in_flight and (sequence.length >= sequence.max_length or sequence.scoring)
        return Entry(
            sequence.key,
            sequence.rank,
            sequence.launched if waits else sequence.length,
            sequence.launched,
            len(sequence.pages),
            self._count_private(sequence.pages) if self._waiting else 0,  # only a waiting one asks for them
            scoring=sequence.scoring,
        )

    def _count_private(self, pages: list[int]) -> int:
        """Pages that have one holder: neighbours, as who holds a page holds those before it."""
        references = self._cache.pages.references
        first, behind = (bisect_left(pages, bound, key=lambda page: -references[page]) for bound in (-1, 0))
        return behind - first

    def _offer(self, sequence: Sequence) -> "_Offer":
        """Pages that already hold a sequence's beginning."""
        if self.config.enable_prefix_caching:
            node = self._cache.match(sequence.tokens, sequence.reusable)
            return _Offer(sequence, node, self._cache.path(node))
        choices = self._requests[sequence.request.request_id]  # those that wait have computed nothing
        furthest = max(choices, key=attrgetter("computed"))
        shared = min(furthest.computed, sequence.prompt_length, sequence.reusable)
        return _Offer(sequence, sequence.node, furthest.pages[: shared // self._pool.page_size])

    def _admit(self, offer: "_Offer") -> None:
        """Give a waiting sequence a slot and the pages it shares."""
        sequence = offer.sequence
        self._remove_waiting(sequence)
        self._running[sequence.key] = sequence
        self._ranked = []
        sequence.slot = slot = self._slots.pop()
        self._cache.retain(offer.pages)
        sequence.node = offer.node
        self._pool.set_pages(slot, 0, offer.pages)
        sequence.pages = self._pool.page_table[slot]
        sequence.computed = sequence.launched = len(sequence.pages) * self._pool.page_size
        if not sequence.preempted:
            sequence.tokens = sequence.tokens.copy()
            sequence.cached_tokens = sequence.computed
        if sequence.matcher is None and sequence.request.grammar is not None:
            sequence.matcher = sequence.request.grammar.matcher(self._end_ids(sequence.stop_ids))
        try:
            self._state.join(
                slot,
                sequence.request.params,
                sequence.request.prompt_ids,
                seed=sequence.seed,
                end_ids=self._end_ids(sequence.stop_ids),
                noticed_ids=sequence.stop_ids,
                bad_word_ids=sequence.request.bad_word_ids,
                output_ids=sequence.output_ids,
                checked=True,
            )
        except BaseException:  # memory may be short where tables grow; the slot has nothing of the sequence
            self._preempt(sequence)
            raise
        self.runner.enter(slot)

    def _end_ids(self, stops: Iterable[int]) -> list[int]:
        """What ``min_tokens`` holds back: all that ends a sequence, and the model's ends even if they are ignored."""
        return [*self.limits.eos_token_ids.union(stops)]

    def _secure(self, needs: Iterable[tuple[Sequence, int]]) -> None:
        """Make sure of pages for the first tokens, so many, of each sequence."""
        size = self._pool.page_size
        missing = [
            (sequence, count)
            for sequence, tokens in needs
            if (count := pages_for(tokens, size) - len(sequence.pages)) > 0
        ]
        fresh = self._cache.allocate(sum(count for _, count in missing))
        left = iter(fresh)
        for sequence, count in missing:
            self._pool.set_pages(sequence.slot, len(sequence.pages), islice(left, count))
        self._pool.clear(fresh)

    def _give_back_pages(self) -> None:
        """Give back what rejected drafts needed. As long as there is enough for all, the next ones do not ask anew."""
        for sequence in self._running.values():
            needed = pages_for(max(sequence.launched, len(sequence.tokens)), self._pool.page_size)
            if needed < len(sequence.pages):
                self._cache.release(sequence.pages[needed:])
                del sequence.pages[needed:]

    def _preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back to the queue. It keeps its tokens, and computes again what is not cached."""
        self._vacate(sequence)
        sequence.computed = sequence.launched = 0
        sequence.node = self._cache.root
        sequence.preempted = True
        self.preemptions += 1
        insort(self._waiting, sequence, key=_rank)

    def _vacate(self, sequence: Sequence) -> None:
        """Take slot and pages from a running sequence."""
        del self._running[sequence.key]
        self._ranked = []
        self._cache.release(sequence.pages)
        sequence.pages = []
        self._state.leave(sequence.slot)
        self._slots.append(sequence.slot)
        sequence.slot = -1
        sequence.stay += 1
        sequence.pending = sequence.slack = 0
        sequence.ngrams = None

    def _remove_waiting(self, sequence: Sequence) -> None:
        del self._waiting[bisect_left(self._waiting, sequence.rank, key=_rank)]

    def _retire(self, rows: list["_Row"], result: StepResult) -> None:
        """Hand each sequence what the step brought it, unless it has ended or left its slot since."""
        caching, size, drafting = self.config.enable_prefix_caching, self._pool.page_size, self._drafting
        brought = result.by_span([row.span for row in rows])
        told = nodes = accepted = 0
        for (sequence, span, stay), (sampled, walked, scored, drafted) in zip(rows, brought):
            if stay != sequence.stay:
                continue
            error = None if scored is None else _add_scores(sequence, scored)
            output = StepOutput(sequence.request.request_id, sequence.index)
            if walked is not None:
                error = self._add_walked(sequence, span, drafted, walked, output)
            else:
                if sampled is not None:
                    token, status, logprobs = sampled
                    sequence.pending -= 1
                    error = ERRORS.get(status, error)
                    if error is None:
                        error = self._add_run(sequence, [token], None if logprobs is None else [logprobs], output)
                if drafted[0] and isinstance(drafting, DeviceDrafting):
                    drafting.observe(sequence, *drafted)
                # Not less than before: pages of others may have been taken over meanwhile.
                computed = len(sequence.tokens) - 1 if span.follows else span.start + span.rows
                sequence.computed = max(sequence.computed, computed)
                if sampled is None and computed == len(sequence.tokens):  # nothing but the prompt was asked for
                    output.finish_reason = FinishReason.LENGTH
            if error is not None:
                refused = sequence.matcher and sequence.matcher.error
                output.finish_reason, output.error = FinishReason.ERROR, refused or error
            elif caching and len(sequence.tokens) // size > sequence.node.depth and self._is_sound(sequence):
                self._share(sequence)  # a page more may be full
            if sequence.computed >= sequence.prompt_length:
                if sequence.followers:
                    self._release_followers(sequence)
                if len(sequence.tokens) - len(output.token_ids) == sequence.prompt_length:  # the first there is
                    output.prompt_logprobs = sequence.prompt_logprobs
                    output.cached_tokens = sequence.cached_tokens
            if output.token_ids:
                told, nodes, accepted = told + 1, nodes + output.drafted, accepted + output.accepted
            if output.finish_reason is not None:
                self._end(sequence, output)
            elif output.token_ids:
                self._outputs.append(output)
        if drafting is not None:
            drafting.metrics.observe(nodes, accepted, told)

    def _add_run(
        self, sequence: Sequence, tokens: list[int], logprobs: list[TokenLogprobs] | None, output: StepOutput
    ) -> str | None:
        """Append new tokens, up to where the sequence ends. Returns an error where the grammar ends too early."""
        room, matcher = sequence.max_length - len(sequence.tokens), sequence.matcher
        count, output.finish_reason = cut(tokens, sequence.stop_ids, room, matcher and matcher.advance)
        if count < len(tokens):
            tokens, logprobs = tokens[:count], logprobs and logprobs[:count]
        if output.finish_reason is FinishReason.STOP:
            output.stop_reason = sequence.stop_ids.get(tokens[-1])
            output.complete = tokens[-1] not in sequence.stop_ids
        sequence.tokens += tokens
        output.token_ids, output.logprobs = tokens, logprobs
        least = sequence.prompt_length + sequence.request.params.min_tokens
        if output.finish_reason is FinishReason.STOP and len(sequence.tokens) < least:
            return "grammar: it permits nothing more, and min_tokens is not reached"
        return None

    def _add_walked(
        self,
        sequence: Sequence,
        span: Span,
        drafted: tuple[int, int],
        walked: list[Sampled],
        output: StepOutput,
    ) -> str | None:
        """Append what the walk through a draft of so many nodes, so deep, brought, and note what became of it.

        An error is returned if a draw failed before the end.
        """
        tokens = [token for token, status, _ in walked if not status]
        error = ERRORS.get(walked[-1][1])  # a walk ends where the draw fails
        early = None
        sequence.pending -= 1 + span.nodes
        sequence.slack -= span.nodes
        if tokens:
            logprobs = None if walked[0][2] is None else [entry for _, _, entry in walked if entry is not None]
            early = self._add_run(sequence, tokens, logprobs, output)
        accepted = len(walked) - 1
        output.drafted, output.accepted = drafted[0], min(accepted, len(output.token_ids))
        assert self._drafting is not None
        self._drafting.observe(sequence, drafted[1], accepted)
        sequence.computed, sequence.launched = len(sequence.tokens) - 1, sequence.length - 1
        return early if output.finish_reason else error

    def _is_sound(self, sequence: Sequence) -> bool:
        """Whether what it computed is known to be finite.

        One NaN makes those of all rows of its chunk NaN, earlier ones as well, and they must not become anyone else's.
        """
        if sequence.sound:
            return True
        return self._pool.is_finite(sequence.pages[sequence.node.depth : sequence.computed // self._pool.page_size])

    def _share(self, sequence: Sequence) -> None:
        """Exchange pages with the prefix tree: full ones go in, and what others computed meanwhile is taken over."""
        size = self._pool.page_size
        node, replaced = self._cache.advance(
            sequence.node, sequence.tokens, sequence.pages, sequence.computed, sequence.reusable
        )
        sequence.node = node
        if replaced:
            self._pool.set_pages(sequence.slot, replaced[0], sequence.pages[replaced[0] :])
        taken_over = node.depth * size - sequence.computed
        if taken_over > 0:
            sequence.computed += taken_over
            sequence.launched = max(sequence.launched, sequence.computed)
            if not sequence.preempted:
                sequence.cached_tokens += taken_over

    def _release_followers(self, sequence: Sequence) -> None:
        """Let the choices that wait for this one's prompt join the queue."""
        for follower in sequence.followers:
            insort(self._waiting, follower, key=_rank)
        sequence.followers = []

    def _end(self, sequence: Sequence, output: StepOutput | None) -> None:
        """Forget a sequence, wherever it is, and leave its reply."""
        if sequence.slot >= 0:
            self._vacate(sequence)
        elif sequence.leader and sequence in sequence.leader.followers:
            sequence.leader.followers.remove(sequence)
        else:
            self._remove_waiting(sequence)
        self._release_followers(sequence)
        request_id = sequence.request.request_id
        self._requests[request_id].remove(sequence)
        if not self._requests[request_id]:
            del self._requests[request_id]
        if output is not None:
            self._outputs.append(output)

    def _take_outputs(self) -> list[StepOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs


def _active(sequence: Sequence) -> Matcher | None:
    """What the sequence's next token has to obey."""
    matcher = sequence.matcher
    return None if matcher is None or matcher.ended else matcher


class _Row(NamedTuple):
    """What a step computes of a sequence, at which of its stays in a slot."""

    sequence: Sequence
    span: Span
    stay: int


class _Offer(NamedTuple):
    """The beginning of a waiting sequence that others have computed."""

    sequence: Sequence
    node: Node
    pages: list[int]


def _span(sequence: Sequence, count: int) -> Span:
    start, known = sequence.launched, sequence.length
    sample = start + count == known < sequence.max_length
    if not sequence.scoring:
        return Span(sequence.slot, start, count, sample, matcher=_active(sequence))
    assert sequence.prompt_logprobs is not None
    scored = range(len(sequence.prompt_logprobs) - 1, min(start + count, sequence.prompt_length - 1))
    alternatives = sequence.request.params.prompt_logprobs or 0
    return Span(sequence.slot, start, count, sample, scored, alternatives, matcher=_active(sequence))


def _add_scores(sequence: Sequence, scores: list[TokenLogprobs]) -> str | None:
    """Append to the prompt's log probabilities; return an error if the model failed on them."""
    assert sequence.prompt_logprobs is not None
    sequence.prompt_logprobs.extend(scores)
    return ERRORS[Status.NAN] if any(isnan(score.logprobs[0]) for score in scores) else None
