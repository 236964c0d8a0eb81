"""How the sampler's kernels add up floats, by what Triton's compiler makes of them for a GPU that need not be there.

    python sum_layouts.py DTYPE VOCAB

prints for each variant of a kernel that reads tiles of logits, as JSON: the draw, the kernel, what the variant is, and
its sums: of how many floats, and how these are spread. Kernels are interpreted in the process of the tests.
"""

import json
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton._C import libtriton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

from freewheel.sampling import SamplingParams, SamplingState
from freewheel.sampling.draw import ATTEMPTS
from freewheel.sampling.fused import FusedSampler, Launch

TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.uint8: "u8"}
TYPES |= {torch.int32: "i32", torch.int64: "i64"}
REDUCTION = re.compile(r'"tt\.reduce"\([^)]*\) <\{axis = (\d+)[^}]*\}> \(\{(.*?)\}\) : \((.*?)\) ->', re.DOTALL)
OPERAND = re.compile(r"tensor<([0-9x]+)xf\d+, (.*)>")
SPREAD = "sizePerThread", "threadsPerWarp", "warpsPerCTA"

PLAIN, DEMANDING = SamplingParams(), SamplingParams(top_p=0.9)
EVERYTHING = SamplingParams(top_p=0.9, repetition_penalty=1.2, logprobs=3)
# The rows, whether there are grammar masks, and the draw.
BATCHES = [
    ([DEMANDING, PLAIN], False, "two_level"),
    ([EVERYTHING, PLAIN], True, "two_level"),
    ([DEMANDING, *[PLAIN] * 8], False, "two_level"),
    ([*[EVERYTHING] * 8, PLAIN], True, "two_level"),
    ([*[DEMANDING] * 63, PLAIN], False, "two_level"),
    ([*[EVERYTHING] * 63, PLAIN], True, "two_level"),
    ([DEMANDING], False, "gumbel"),
    ([DEMANDING] * 64, False, "gumbel"),
]


# Where rows of logits may lie in memory: their distance, in rows and ids, and where the first one begins.
PLACES = [(1, 0, 0), (1, 1, 0), (16, 0, 0), (1, 47, 0), (1, 0, 1)]


class Launched(NamedTuple):
    kernel: Any
    args: tuple[Any, ...]
    warps: int


class Recorder(FusedSampler):
    """Notes what it would launch on a GPU."""

    def __init__(self, state: SamplingState, draw: str) -> None:
        super().__init__(state, draw)
        self._chained = True
        self.launches: list[Launched] = []

    def _launch(self, one: Launch, inputs: Any, work: Any, results: Any) -> None:
        places = (work,) if "work" in one.kernel.arg_names else ()
        arguments = *(results[i] for i in one.results), *one.sizes, *one.constants
        self.launches.append(Launched(one.kernel, (inputs, *places, *arguments), one.warps))


def launches(
    asked: list[SamplingParams],
    masked: bool,
    draw: str,
    dtype: torch.dtype,
    vocab: int,
    place: tuple[int, int, int] = PLACES[0],
) -> list[Launched]:
    """What gives each of ``asked`` a token."""
    rows = len(asked)
    state = SamplingState(rows, vocab, 8, device="cpu", fused=True)
    for slot, params in enumerate(asked):
        state.join(slot, params, [1, 2], seed=slot)
    slots, zeros = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
    masks = (torch.zeros(1, -(-vocab // 32), dtype=torch.int32), zeros) if masked else (None, None)
    recorder = Recorder(state, draw)
    results = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.uint8)
    stride, start = place[0] * vocab + place[1], place[2]
    logits = torch.empty(rows * stride + start, dtype=dtype).as_strided((rows, vocab), (stride, 1), start)
    recorder.sample(logits, slots, zeros + 2, *masks, *results)
    return recorder.launches


class Special(NamedTuple):
    """What a kernel is specialised for: the kinds of its arguments, its constants, and which are multiples of 16."""

    kinds: dict[str, Any]
    constants: dict[str, Any]
    aligned: dict[tuple[int, ...], list[list[Any]]]


def specialised(launch: Launched) -> Special:
    """As Triton does it for these arguments."""
    aligned: dict[tuple[int, ...], list[list[Any]]] = {}

    def kind(arg: Any, *path: int) -> str:
        if (arg.data_ptr() if isinstance(arg, Tensor) else arg) % 16 == 0:
            aligned[path] = [["tt.divisibility", 16]]
        return "*" + TYPES[arg.dtype] if isinstance(arg, Tensor) else "i32"

    kinds: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    for i, (name, arg) in enumerate(zip(launch.kernel.arg_names, launch.args, strict=True)):
        if name.isupper():
            kinds[name], constants[name] = "constexpr", arg
        elif isinstance(arg, tuple):
            kinds[name] = type(arg)(*[kind(one, i, j) for j, one in enumerate(arg)])
        else:
            kinds[name] = kind(arg, i)
    return Special(kinds, constants, aligned)


def compiled(launch: Launched, special: Special) -> str:
    """The kernel once its layouts are chosen."""
    source: Any = ASTSource(launch.kernel, special.kinds, constexprs=special.constants, attrs=special.aligned)
    # As triton.compile does it, without the stages that come after: they take most of the time.
    ir: Any = vars(libtriton)["ir"]
    target = GPUTarget("cuda", 90, 32)
    backend: Any = make_backend(target)
    options = backend.parse_options({"num_warps": launch.warps, "enable_fp_fusion": False})
    context, stages = ir.context(), {}
    ir.load_dialects(context)
    backend.load_dialects(context)
    backend.add_stages(stages, options, source.language)
    code = backend.get_codegen_implementation(options), backend.get_module_map()
    module: Any = source.make_ir(target, options, *code, context)
    for stage in ("ttir", "ttgir"):
        module = stages[stage](module, {"target": target, **vars(options)})
    return str(module)


def sums(text: str) -> Iterator[tuple[int, str]]:
    """Each sum of floats: of how many, and how these are spread over registers, the threads of a warp, and warps."""
    layouts = dict(re.findall(r"^(#\w+) = (#.*)$", text, re.MULTILINE))
    for axis, body, type_ in REDUCTION.findall(text):
        if "arith.addf" not in body:
            continue
        operand = OPERAND.fullmatch(type_)
        assert operand, type_
        shape = [int(size) for size in operand[1].split("x")]
        if shape[0] == ATTEMPTS:
            continue  # the values of the draws, each among zeros
        layout = layouts.get(operand[2], operand[2])
        spread = [re.search(rf"{name} = \[([0-9, ]+)\]", layout) for name in SPREAD]
        if all(spread):
            layout = ", ".join(f"{part[0].split()[0]} {part[1].split(', ')[int(axis)]}" for part in spread if part)
        yield shape[int(axis)], layout


def main(dtype: torch.dtype, vocab: int) -> None:
    seen = set()
    cases = [(*batch, PLACES[0]) for batch in BATCHES] + [(*batch, place) for batch in BATCHES[:2] for place in PLACES]
    for asked, masked, draw, place in cases:
        for launch in launches(asked, masked, draw, dtype, vocab, place):
            names = launch.kernel.arg_names
            constants = [f"{name}={arg}" for name, arg in zip(names, launch.args) if name.isupper()]
            variant = " ".join([f"warps={launch.warps}", *constants])
            new = draw, launch.kernel.__name__, variant
            special = specialised(launch)
            if "TILE" in names and (new, str(special)) not in seen:  # the same is compiled to the same
                seen.add((new, str(special)))
                print(json.dumps([*new, list(sums(compiled(launch, special)))]), flush=True)


if __name__ == "__main__":
    main(getattr(torch, sys.argv[1]), int(sys.argv[2]))
