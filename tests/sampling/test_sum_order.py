"""A row's floats are added up in the same order whatever its neighbours are, and wherever it lies in memory.

Neighbours decide which variants of the kernels serve it. The order of a sum follows from how the compiler spreads its
floats, which the interpreter knows nothing of; integers may be added up in any order.
"""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from freewheel.sampling.draw import BLOCK

pytest.importorskip("triton", reason="Triton is made for Linux only")

COMPILED = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


@pytest.mark.parametrize(
    ("dtype", "vocab"),
    [("bfloat16", 49_152), ("float32", 49_152), ("bfloat16", 50_257)],
    ids=["bfloat16", "float32", "rows that are read in small pieces"],
)
def test_all_variants_add_up_floats_in_the_same_order(dtype: str, vocab: int) -> None:
    script = [sys.executable, str(Path(__file__).with_name("sum_layouts.py")), dtype, str(vocab)]
    done = subprocess.run(script, capture_output=True, text=True, env=COMPILED, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    orders: dict[tuple[str, str, int], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for line in done.stdout.splitlines():
        draw, kernel, variant, sums = json.loads(line)
        for length, spread in sums:
            orders[draw, kernel, length][spread].append(variant)
    for kernel, variants in (("draw", 6), ("draw_plain", 4), ("check", 2)):
        found = orders["two_level", kernel, BLOCK]
        assert len({variant for same in found.values() for variant in same}) == variants
    assert not {key: dict(spreads) for key, spreads in orders.items() if len(spreads) > 1}
