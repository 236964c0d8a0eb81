"""An engine whose device drafts gives the answers of one that does not. Without a device kernels are interpreted."""

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from freewheel.cache.pool import KVPool
from freewheel.engine.runner import Runner
from freewheel.request import Request, Sequence
from freewheel.sampling import Samples, SamplingParams, SamplingState

pytest.importorskip("triton", reason="Triton is made for Linux only")

from mock_model import Collected, collect, run
from test_device_runner import DEVICE, make_engine

from freewheel.engine.device_runner import DeviceRunner
from freewheel.engine.draft_step import GUESSED, DeviceDrafts, DraftStep
from freewheel.engine.drafting import DeviceDrafting, Guess, StepTimes, judged
from freewheel.engine.engine import Engine
from freewheel.engine.ring import Outbox
from freewheel.ops import attention_gpu
from freewheel.speculative import NgramIndex, draft

pytestmark = pytest.mark.usefixtures("few_programs", "many_drafts")
ASKED: list[tuple[list[int], dict[str, Any]]] = [
    ([5, 6, 7, 5, 6], {"temperature": 0.0, "max_tokens": 12}),
    ([11, 12, 11, 12, 11, 12], {"temperature": 0.6, "logprobs": 2, "max_tokens": 11}),
    ([20, 21], {"temperature": 0.3, "max_tokens": 4, "n": 2}),
    ([30, 31, 32], {"temperature": 0.3, "max_tokens": 5, "frequency_penalty": 0.5}),
    ([40, 41, 42, 43], {"temperature": 0.0, "max_tokens": 3, "prompt_logprobs": 1}),
    (
        [222, 222, 222],
        {"temperature": 0.3, "max_tokens": 8, "frequency_penalty": 0.1, "logit_bias": {222: 2.0}, "min_tokens": 4},
    ),
    ([222, 222, 222], {"temperature": 0.0, "max_tokens": 12}),
]


@pytest.fixture
def real_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    """It decides what pays, with drafts that cost little."""
    of = StepTimes.of
    monkeypatch.setattr(StepTimes, "of", lambda *args: [(rows, 1 + rows / 1000) for rows, _ in of(*args)])


def requests() -> list[Request]:
    return [
        Request(f"r{i}", tuple(prompt), SamplingParams(seed=i, ignore_eos=True, **params))
        for i, (prompt, params) in enumerate(ASKED)
    ]


def assert_same(got: Collected, expected: Collected) -> None:
    assert got.tokens == expected.tokens
    assert got.finish_reason is expected.finish_reason
    assert len(got.logprobs) == len(expected.logprobs)
    for mine, other in zip(got.logprobs, expected.logprobs):
        assert mine.token_ids == other.token_ids
        assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-3)


@pytest.fixture(scope="module")
def expected(copying_model: Path) -> dict[tuple[str, int], Collected]:
    return run(make_engine(copying_model, "cpu", Runner), requests())


def speculating(path: Path, lookahead: int, pages: int = 24, **options: Any) -> Engine:
    engine = make_engine(path, DEVICE, DeviceRunner, lookahead, pages, speculation=True, **options)
    assert engine.speculation is not None
    return engine


@pytest.mark.parametrize(("lookahead", "width", "nodes"), [(0, 1, 3), (1, 1, 6), (3, 3, 5)])
def test_answers_are_those_without_drafts(
    copying_model: Path,
    expected: dict[tuple[str, int], Collected],
    lookahead: int,
    width: int,
    nodes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of requests that join and end one after the other, however far the host is behind."""
    if width > 1:
        monkeypatch.setattr(attention_gpu, "rows_per_tile", lambda *_: 4)  # fewer than a tree has
    engine = speculating(copying_model, lookahead, draft_width=width, draft_nodes=nodes, draft_depth=3)
    for name, prepare in engine.preparations():
        if lookahead == 0 and name in ("drafts of up to 2 sequences", "drafts of up to 1 sequences"):
            prepare()
    got = run(engine, requests())
    assert got.keys() == expected.keys()
    for key, one in expected.items():
        assert_same(got[key], one)
    metrics = engine.speculation
    assert metrics is not None
    assert 4 < metrics.accepted < metrics.drafted
    assert got["r5", 0].drafted
    engine.check()


@pytest.mark.parametrize("lookahead", [0, 1])
def test_guesses_tell_what_the_host_would_find(
    copying_model: Path, expected: dict[tuple[str, int], Collected], lookahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps without drafts, now and then: each is judged with the next."""
    guessed: list[tuple[int, int]] = []
    told: list[tuple[Sequence, int, int]] = []
    steps = itertools.cycle([True, False, True, False, False, False, True])

    def nodes(drafting: DeviceDrafting, sequences: list[Sequence], _: object) -> list[int]:
        drafting.guessing = next(steps)
        if drafting.guessing:
            guessed.extend((sequence.key, sequence.length) for sequence in sequences)
        return [0] * len(sequences)

    monkeypatch.setattr(DeviceDrafting, "nodes", nodes)
    monkeypatch.setattr(DeviceDrafting, "observe", lambda _, *outcome: told.append(outcome))
    engine = speculating(copying_model, lookahead, draft_nodes=3)
    asked = [one for one in requests() if one.request_id in ("r0", "r1", "r5", "r6")]
    for turn in (asked, asked[::-1]):  # then in slots of others
        for key, one in run(engine, turn).items():
            assert_same(one, expected[key])
    assert sum(right for _, _, right in told) > 4
    judged_ones: dict[int, list[tuple[int, int]]] = {}
    for sequence, depth, right in told:
        judged_ones.setdefault(sequence.key, []).append((depth, right))
    sequences = {sequence.key: sequence for sequence, _, _ in told}
    for key, outcomes in judged_ones.items():
        like, answer = sequences[key], sequences[key].tokens
        lengths = [length for other, length in guessed if other == key and length < like.max_length - 1]
        wanted = []
        for length, then in itertools.pairwise(lengths):
            index = NgramIndex(like.max_length)
            index.extend(answer[:length])
            found = draft(index, width=1, depth=GUESSED, nodes=min(GUESSED, engine.max_model_len - length))
            like.tokens, like.guess = answer[:then], Guess(length, found.tokens if found else (-1,))
            wanted.append(judged(like))
        assert outcomes == wanted[: len(outcomes)]
        assert len(outcomes) >= len(wanted) - 1 - lookahead


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("guessing", [False, True])
def test_steps_after_a_sequence_has_ended_on_the_device_bring_the_others_what_is_theirs(
    copying_model: Path, guessing: bool, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host, steps ahead, reads a row of which nothing came: before one with a draft, or where all are guesses."""

    def asked(stop: list[int]) -> list[Request]:
        params = [{"max_tokens": 8, "stop_token_ids": stop}, {"max_tokens": 12}]
        prompts = (5, 6, 7, 5, 6), (109, 193, 178, 166, 166, 27, 121, 207, 109, 193)
        return [
            Request(name, prompt, SamplingParams(temperature=0.0, ignore_eos=True, **own))
            for name, prompt, own in zip("ab", prompts, params)
        ]

    def nodes(drafting: DeviceDrafting, sequences: list[Sequence], most: Callable[[Sequence], int]) -> list[int]:
        drafting.guessing = guessing
        return [0 if guessing or one.request.request_id == "a" else min(most(one), 2) for one in sequences]

    plain = make_engine(copying_model, "cpu", Runner)
    stop = run(plain, asked([]))["a", 0].tokens[at]
    expected = run(plain, asked([stop]))
    monkeypatch.setattr(DeviceDrafting, "nodes", nodes)
    engine = speculating(copying_model, 2, draft_nodes=3)
    got = run(engine, asked([stop]))
    for key, one in expected.items():
        assert_same(got[key], one)
    engine.check()


@pytest.mark.usefixtures("real_drafting")
def test_where_drafts_pay_they_are_made(copying_model: Path, expected: dict[tuple[str, int], Collected]) -> None:
    engine = speculating(copying_model, 1, draft_nodes=3)
    [*_, last] = requests()
    assert_same(run(engine, [last])["r6", 0], expected["r6", 0])
    metrics = engine.speculation
    assert metrics is not None
    assert metrics.accepted > metrics.wasted


@pytest.mark.usefixtures("real_drafting")
def test_who_joins_those_who_draft_gets_drafts_as_well(copying_model: Path) -> None:
    engine = speculating(copying_model, 1, draft_nodes=3)
    drafting = engine._drafting
    assert isinstance(drafting, DeviceDrafting)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    got: dict[tuple[str, int], Collected] = {}
    engine.add(Request("first", (222, 222, 222), params))
    while not drafting.planned:
        collect(engine.step(), got)
    engine.add(Request("second", (222, 222, 222, 222), params))
    while engine.has_unfinished:
        collect(engine.step(), got)
    assert got["second", 0].drafted


@pytest.mark.usefixtures("real_drafting")
def test_the_host_is_a_step_further_ahead_while_nobody_drafts(
    copying_model: Path, expected: dict[tuple[str, int], Collected]
) -> None:
    engine = speculating(copying_model, 1, draft_nodes=3)
    engine._more_ahead = 1  # as by default on CUDA devices
    drafting = engine._drafting
    assert isinstance(drafting, DeviceDrafting)
    [*_, last] = requests()
    engine.add(last)
    got: dict[tuple[str, int], Collected] = {}
    ahead: dict[bool, list[int]] = {False: [], True: []}
    while engine.has_unfinished:
        collect(engine.step(), got)
        ahead[drafting.planned].append(len(engine._flights))
    assert_same(got["r6", 0], expected["r6", 0])
    assert max(ahead[False]) == 2
    assert max(ahead[True]) == 1


def test_aborts_leave_the_others_alone(copying_model: Path, expected: dict[tuple[str, int], Collected]) -> None:
    """While drafts are in flight; others take over the slots."""
    engine = speculating(copying_model, 2, draft_nodes=3)
    waiting = requests()
    got: dict[tuple[str, int], Collected] = {}
    for step in range(200):
        if step % 3 == 0 and waiting:
            engine.add(waiting.pop())
        if step == 8:
            engine.abort("r4")
            engine.abort("r2")
        collect(engine.step(), got)
        engine.check()
        if not (waiting or engine.has_unfinished):
            break
    assert not engine.has_unfinished
    for key, one in expected.items():
        if key[0] not in ("r2", "r4"):
            assert_same(got[key], one)


@pytest.mark.parametrize("fails", ["_sample", "_forward"])
def test_a_step_that_fails_changes_no_answer(
    copying_model: Path, expected: dict[tuple[str, int], Collected], fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = speculating(copying_model, 1, draft_nodes=3, graphs=False)  # a graph would not call what fails
    [request] = requests()[:1]
    engine.add(request)
    got: dict[tuple[str, int], Collected] = {}
    while len(got.get(("r0", 0), Collected()).tokens) < 6:
        collect(engine.step(), got)
    original: Callable[..., Any] = getattr(DeviceRunner, fails)
    with monkeypatch.context() as broken:
        broken.setattr(DeviceRunner, fails, lambda *args: [original(*args), 1 / 0])
        with pytest.raises(ZeroDivisionError):
            engine.step()
    while engine.has_unfinished:
        collect(engine.step(), got)
    assert_same(got["r0", 0], expected["r0", 0])


def test_drafts_preempt_nobody(copying_model: Path) -> None:
    """Pages are just enough for plain steps: drafts far ahead of the host have to do without."""
    asked = [
        Request(f"r{i}", (30 + i, 31 + i, 30 + i), SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True))
        for i in range(4)
    ]
    engine = speculating(copying_model, 3, pages=16, draft_nodes=6)
    for request in asked:
        engine.add(request)
    got: dict[tuple[str, int], Collected] = {}
    ended: set[str] = set()
    while engine.has_unfinished:
        collect(engine.step(), got)
        for (name, index), one in got.items():
            if len(one.tokens) >= 10 and name not in ended:  # the last of its fourth page
                engine.finish(name, index)
                ended.add(name)
    assert engine.preemptions == 0
    assert engine.speculation is not None
    assert engine.speculation.accepted
    expected = run(make_engine(copying_model, "cpu", Runner), asked)
    assert all(one.tokens[:10] == expected[key].tokens[:10] for key, one in got.items())


@pytest.mark.parametrize(
    ("size", "rows", "nodes", "tile_rows", "counts"),
    [
        (4, 8, 5, 5, [5, 0, 0]),
        (4, 8, 5, 2, [1, 1, 0, 0]),
        (16, 32, 5, 4, [4, 4, 4, 4, 4, 3, 0, 0, 0]),
        (128, 256, 32, 4, [32] * 5 + [31] + [0] * 59),
        (1, 8, 7, 5, [7]),
        (8, 64, 7, 2, [7] * 8),
        (2, 4, 2, 3, []),
        (4, 16, 5, 2, [3, None, 2, 0]),
        (4, 16, 5, 4, [None, 5]),
    ],
)
def test_tiles_are_those_of_the_rows_and_no_more_than_there_is_room_for(
    size: int, rows: int, nodes: int, tile_rows: int, counts: list[int | None]
) -> None:
    """In buckets that are hardly more than half full as well, whose idle sequences have a tile each.

    Some sequences have ended since their draft was asked for: None.
    """
    device = torch.device(DEVICE)
    state: Any = SimpleNamespace(history=torch.zeros(size + 1, 200, dtype=torch.int64, device=device))
    shared: Any = SimpleNamespace(
        state=state,
        pool=SimpleNamespace(device=device),
        rows_per_tile=lambda _: tile_rows,
        width=1,
        depth=nodes,
        lengths=torch.full((size + 1,), 10, device=device),
        index=SimpleNamespace(extend=lambda *_, **__: None, draft=lambda *_, **__: None),
    )
    step = DraftStep(shared, size, rows, nodes, 1, Outbox(device))
    room = len(step._laid.tiles)
    guarded = torch.full((room + size, 4), -7, dtype=torch.int32, device=device)
    step._laid = step._laid._replace(tiles=guarded)  # kernels get the pointer
    step._tiles = room
    slots = [-1 if count is None else slot for slot, count in enumerate(counts)]
    step.put(slots, [-1] * len(counts), [5] * len(counts))
    step._trees.counts[: len(counts)] = torch.tensor([count or 0 for count in counts], dtype=torch.int32)
    step.begin()
    assert (guarded[room:] == -7).all()
    expected, origin = [], 0
    for slot, count in enumerate(counts):
        if count is None:
            continue
        for first in range(0, 1 + count, tile_rows):
            expected.append([origin + first, min(tile_rows, 1 + count - first), slot, origin])
        origin += 1 + count
    assert [tile for tile in guarded[:room].tolist() if tile[1]] == expected
    rows_of = [slot for slot, count in enumerate(counts) if count is not None for _ in range(1 + count)]
    assert step._laid.slots.tolist() == rows_of + [-1] * (rows - len(rows_of))
    assert step._laid.sample_slots.tolist() == rows_of + [size] * (rows - len(rows_of))


def test_who_ends_within_a_draft_is_idle_and_what_it_accepted_is_in_place() -> None:
    """The host launches more steps before it knows, and shares the pages with others when it does."""
    device, nodes, page_size = torch.device(DEVICE), 4, 4
    state = SamplingState(4, 50, 32, device=device, fused=True)
    state.join(0, SamplingParams(), [10, 11, 12, 13, 14], seed=0, noticed_ids=[4])
    state.join(1, SamplingParams(), [15, 16], seed=0, noticed_ids=[3])
    state.join(2, SamplingParams(), [17], seed=0, noticed_ids=[5])
    pool = KVPool(torch.arange(32.0, device=device).reshape(1, 2, 1, 4, page_size, 1), slots=4)
    table = torch.tensor([[2, 1, 0], [3, 0, 0], [0, 0, 0], [0, 0, 0]], dtype=torch.int32, device=device)
    shared = DeviceDrafts(state, pool, table, rows_per_tile=lambda _: 4, width=2, depth=3)
    none: Any = SimpleNamespace(extend=lambda *_, **__: None, draft=lambda *_, **__: None)
    shared.index = none  # the tree is given
    shared.lengths[:3] = torch.tensor([5, 2, 1])
    step = DraftStep(shared, 4, 8, nodes, 2, Outbox(device))
    step.put([0, 1, 2], [-1] * 3, [nodes, 0, 0])
    step._trees.counts[0] = nodes
    for column, numbers in [("tokens", [20, 21, 4, 30]), ("parents", [-1, -1, 1, 2]), ("depths", [1, 1, 2, 3])]:
        getattr(step._trees, column)[0] = torch.tensor(numbers)
    step.begin()
    # Of the first: at its root the second node, there its end, after which its last node would have been accepted.
    sampled = torch.tensor([21, 0, 4, 30, 31, 6, -1, 0], device=device)
    step.end(Samples(sampled, torch.tensor([0] * 6 + [2, 0], dtype=torch.uint8, device=device), None))
    result = step.launched(None).result()
    assert (result.tokens, result.statuses) == ([21, 4, 6, -1], [0, 0, 0, 2])
    assert state.history[:2, :8].tolist() == [[10, 11, 12, 13, 14, 21, 4, 4], [15, 16, 6, 0, 0, 0, 0, 0]]
    assert step._columns.slots.tolist() == [-1, 1, -1, -1]
    [keys, _] = pool.planes.flatten(1).tolist()
    assert keys[4:8] == [4.0, 6.0, 6.0, 7.0], "place 6 of the first, its second node, goes to place 5"
    assert keys[:4] + keys[8:] == [float(place) for place in (*range(4), *range(8, 16))]
    step.begin()
    assert step._laid.slots.tolist() == [1] + [-1] * 7
