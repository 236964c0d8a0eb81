"""Drafts by kernels, and their walks, beside the host's. Without a CUDA device they run in Triton's interpreter."""

import os
import subprocess
import sys
from random import Random
from typing import Any

import pytest
import torch
from trees import random_tree

from freewheel.speculative import DraftTree, NgramIndex, draft, walk

pytest.importorskip("triton", reason="Triton is made for Linux only")

from freewheel.speculative import device
from freewheel.speculative.device import DeviceIndex, Trees, make_paths, make_trees, walk_trees

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMPILED = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from freewheel.speculative.draft_kernels import Paths, Tables, Trees, draft, extend, walk

types = {
    "tables": Tables("*i64", "*i64", *["*i32"] * 5, "i32", "i32"), "slots": "*i64", "most_nodes": "*i64",
    "most_depths": "*i32", "trees": Trees("*i64", "*i32", "*i32", "*i64", "*i32"), "starts": "*i32", "sampled": "*i64",
    "paths": Paths("*i32", "*i64", "*i32"), "told": "*i64",
}
for kernel, constants in [
    (extend, {"SHIFT": 20, "TILE": 16}),
    (draft, {"LEVELS": 3, "PADDED": 4, "CHAIN": 16, "CAP": 32, "GUESSES": 8, "STEPS": 8, "NODES": 6}),
    (walk, {"NODES": 6, "PADDED": 8}),
]:
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    compile(ASTSource(kernel, signature, constexprs=constants), target=GPUTarget("cuda", 90, 32))
    print(kernel.__name__)
"""
SMALL: dict[str, Any] = {"orders": (4, 2, 1), "chain": 3, "cap": 6}


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def tree(trees: Trees, row: int) -> DraftTree:
    count = int(trees.counts[row])
    return DraftTree(tuple(trees.tokens[row, :count].tolist()), tuple(trees.parents[row, :count].tolist()))


def text(random: Random, length: int, vocab: int) -> list[int]:
    """Random tokens, with many repetitions."""
    tokens = [random.randrange(vocab)]
    while len(tokens) < length:
        start = random.randrange(len(tokens))
        tokens += tokens[start : start + random.randint(1, 8)] if random.random() < 0.7 else [random.randrange(vocab)]
    return tokens[:length]


class Both:
    """Sequences in slots, and the same on the host."""

    def __init__(self, slots: int, max_length: int, **options: Any) -> None:
        self.tokens = torch.zeros(slots, max_length, dtype=torch.int64, device=DEVICE)
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=DEVICE)
        self.device = DeviceIndex(self.tokens, self.lengths, **options)
        self.host: dict[int, NgramIndex] = {}
        self.make = lambda: NgramIndex(max_length, **options)

    def add(self, slot: int, tokens: list[int], tell: bool = True) -> None:
        if slot not in self.host:
            self.host[slot] = self.make()
        start = len(self.host[slot])
        self.host[slot].extend(tokens)
        self.tokens[slot, start : start + len(tokens)] = torch.tensor(tokens)
        if tell:
            self.lengths[slot] = start + len(tokens)

    def clear(self, slot: int) -> None:
        del self.host[slot]
        self.device.clear(ints(-1, slot))

    def draft(self, slots: list[int], nodes: list[int], depths: list[int], room: int, width: int, many: bool) -> None:
        """Index what is new, and see that all drafts are the host's."""
        self.device.extend(ints(*slots), many=many)
        trees = make_trees(len(slots), room, DEVICE)
        self.device.draft(ints(*slots), ints(*nodes), ints(*depths), trees, width=width)
        for row, (slot, most, depth) in enumerate(zip(slots, nodes, depths)):
            expected = None
            if slot >= 0:
                nodes_left = min(most, room, self.tokens.shape[1] - len(self.host[slot]))
                expected = draft(self.host[slot], width=width, depth=depth, nodes=nodes_left)
            expected = expected or DraftTree()
            assert tree(trees, row) == expected
            count = len(expected.tokens)
            assert trees.depths[row, :count].tolist() == expected.depths
            assert trees.ancestors[row, :count].tolist() == expected.ancestors.tolist()[1:]


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("options", [SMALL, {}], ids=["small", "default"])
def test_drafts_are_those_of_the_host(options: dict[str, Any], width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sequences that grow by a few tokens or by many, come and go; with budgets of all sizes."""
    monkeypatch.setattr(device, "CLEARED", 64)  # of 256
    random = Random(width)
    both = Both(3, 200, **options)
    for slot in range(3):
        both.add(slot, text(random, random.choice([1, 3, 60, 150]), 3))
    many = True
    for step in range(6):
        slots = random.sample([0, 1, 2, -1], 3)
        both.draft(slots, random.choices([0, 1, 3, 7, 12], k=3), random.choices([1, 2, 5], k=3), 7, width, many)
        many = step % 3 == 2
        for slot in range(3):
            if many and random.random() < 0.5:
                both.clear(slot)
            if slot not in both.host or len(both.host[slot]) < 180:
                both.add(slot, text(random, random.randint(1, 20), 3))


def test_what_is_indexed_is_the_same_however_it_came() -> None:
    """At once or a few at a time."""
    tokens = text(Random(0), 150, 4)
    tables = []
    for pieces in ([150], [1, 3, 40, 106], [17] * 8 + [14]):
        both = Both(2, 150, **SMALL)
        for piece in pieces:
            start = len(both.host.get(1, ()))
            both.add(1, tokens[start : start + piece])
            both.device.extend(ints(1), many=piece > 100)
        host, device = both.host[1], both.device.tables
        assert device.heads[1].tolist() == host.heads.tolist()
        assert device.previous[1].tolist() == host.previous.tolist()
        assert device.indexed.tolist() == [[0] * 3, [150] * 3]
        tables.append(device)
    assert all((table.heads[0] == -1).all() for table in tables), "the other slot is as it was"


def test_lengths_may_be_told_with_what_is_to_be_indexed() -> None:
    tokens, both = text(Random(2), 40, 4), Both(3, 60, **SMALL)
    for slot in (0, 2):
        both.add(slot, tokens[:10])
    both.device.extend(ints(0, 2))
    both.add(0, tokens[10:], tell=False)
    both.add(2, tokens[10:30])
    both.device.extend(ints(2, -1, 0), told=ints(-1, 9, 40).long())
    assert both.lengths.tolist() == [40, 0, 30]
    for slot in (0, 2):
        assert both.device.tables.previous[slot].tolist() == both.host[slot].previous.tolist()


def test_walks_are_those_of_the_host() -> None:
    random = Random(1)
    nodes = 12
    expected = [random_tree(random, nodes, 3) for _ in range(8)]
    trees, starts, sampled = make_trees(8, nodes, DEVICE), [], []
    for row, one in enumerate(expected):
        count = len(one.tokens)
        trees.tokens[row, :count], trees.parents[row, :count] = torch.tensor(one.tokens), torch.tensor(one.parents)
        trees.tokens[row, count:], trees.parents[row, count:] = 1, -1  # mean nothing
        trees.counts[row] = count
        starts.append(len(sampled))
        sampled += random.choices([0, 1, 2, -1], [4, 4, 4, 1], k=one.rows)
    paths = make_paths(8, nodes, DEVICE)
    walk_trees(trees, ints(*starts), torch.tensor(sampled, device=DEVICE), paths)
    for row, one in enumerate(expected):
        found, count = walk(one, sampled[starts[row] : starts[row] + one.rows]), int(paths.counts[row])
        assert paths.rows[row, :count].tolist() == found.rows
        assert paths.tokens[row, :count].tolist() == found.tokens


def test_bad_sizes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="room for 2"):
        DeviceIndex(torch.zeros(3, 1, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="chain"):
        DeviceIndex(torch.zeros(3, 9, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), chain=0)
    with pytest.raises(ValueError, match="nodes"):
        make_trees(1, 64, DEVICE)
    one = ints(0)
    index = DeviceIndex(*(torch.zeros(*shape, dtype=torch.int64, device=DEVICE) for shape in ((3, 9), (3,))))
    with pytest.raises(ValueError, match="width"):
        index.draft(one, one, one, make_trees(1, 5, DEVICE), width=5)


def test_kernels_compile_without_a_device() -> None:
    """The interpreter knows no types."""
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=COMPILED, check=False)
    assert done.stdout.split() == ["extend", "draft", "walk"], done.stderr
