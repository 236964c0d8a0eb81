"""``freewheel bench divergence``: what a cheaper number format costs in exactness.

The same text goes through the model in float32 and in each format. Printed for each: the text's mean loss, the mean
Kullback-Leibler divergence of the next-token distribution from float32's, and how often the most likely token is the
same.
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from freewheel.models.decoder import Decoder

TEXT = """\
The harbour was quiet when the ferry came in, an hour late and half empty. Marta counted eleven passengers, two bicycles
and one very large dog, and wrote the numbers into her book as she had done every evening for nineteen years. Nobody had
ever asked to see the book. She kept it because the harbour master before her had kept it, and because a number that is
written down stays put, while one that is only remembered drifts like a boat with a bad knot.

To boil potatoes, cover 1 kg of them with cold water, add 10 g of salt, and simmer for about 20 minutes. Test one with a
fork: if it slides off, they are done.

def mean(values):
    if not values:
        raise ValueError("mean of no values")
    total = 0.0
    for value in values:
        total += value
    return total / len(values)

Question: Which planet is the largest in the solar system, and how long does it take to travel once around the Sun?
Answer: Jupiter is the largest planet. One of its years lasts almost twelve of ours.
"""


def logits_of(decoder: "Decoder", tokens: list[int]) -> "Tensor":
    """Logits after each of the tokens, [tokens, vocab], in one pass over a fresh cache."""
    import torch

    from freewheel.models.decoder import kv_cache_shape
    from freewheel.ops.rows import RowBatch

    count, page_size = len(tokens), 16
    pages = -(-count // page_size)
    kv = torch.zeros(decoder.spec.num_layers, *kv_cache_shape(decoder.spec, pages, page_size), dtype=decoder.dtype)
    rows = torch.arange(count)
    batch = RowBatch(torch.tensor(tokens), rows, rows, [range(pages)], rows, (count,), (count,))
    with torch.no_grad():
        return decoder.forward(batch, list(kv))


def compare(exact: "Tensor", logits: "Tensor", tokens: list[int]) -> dict[str, float]:
    """Loss, divergence (nats per token) and agreement (a share) of logits beside exact ones, both [tokens, vocab]."""
    import torch

    reference, other = exact[:-1].double().log_softmax(-1), logits[:-1].double().log_softmax(-1)
    return {
        "loss": float(-other.gather(1, torch.tensor(tokens[1:])[:, None]).mean()),
        "divergence": float((reference.exp() * (reference - other)).sum(-1).mean()),
        "same_top": float((reference.argmax(-1) == other.argmax(-1)).double().mean()),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``freewheel bench divergence``."""
    parser.add_argument("--models", default="smollm2,gemma3-270m", help="separated by commas (default: %(default)s)")
    parser.add_argument("--dtypes", default="auto,int8,bfloat16", help="separated by commas (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to FILE")


def run(args: argparse.Namespace) -> None:
    """Print a line for each model and format, and write JSON."""
    from freewheel.models.load import load

    results: list[dict[str, Any]] = []
    print(f"{'model':14}{'dtype':10}{'tokens':>8}{'loss':>9}{'KL':>10}{'same top':>10}")
    for name in args.models.split(","):
        model = load(name, dtype="float32")
        tokens = model.tokenizer.encode(TEXT)
        exact = logits_of(model.decoder, tokens)
        for dtype in ["float32", *args.dtypes.split(",")]:
            logits = exact if dtype == "float32" else logits_of(load(name, dtype=dtype).decoder, tokens)
            result = compare(exact, logits, tokens)
            results.append({"model": name, "dtype": dtype, "tokens": len(tokens)} | result)
            values = f"{result['loss']:9.4f}{result['divergence']:10.5f}{result['same_top']:10.1%}"
            print(f"{name:14}{dtype:10}{len(tokens):8}{values}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
