"""Checks on a real model that speculation changes no token: random prompts with random parameters, with and without.

    python scripts/same_tokens.py --model smollm2 --requests 200

Without, each request has room; with, requests share a cache that is too small for them all, so that some are preempted,
prefixes are reused, and others that are cancelled on the way run beside them. In float32, where a row's logits do not
depend on what else is in its step, all must be equal.
"""

import argparse
import random
import sys
from dataclasses import replace
from typing import Any

from freewheel.bench.speculation import CODE, QUESTIONS, TEXTS, edit_prompt, extract_prompt
from freewheel.config import EngineConfig
from freewheel.engine.build import build_engine
from freewheel.engine.inputs import make_request
from freewheel.models.decoder import kv_bytes_per_token
from freewheel.models.load import LoadedModel, load
from freewheel.request import Request
from freewheel.sampling import SamplingParams

Results = dict[tuple[str, int], tuple[list[int], list[tuple[int, ...]], Any]]


def random_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    """Any field that changes what is drawn, each now and then."""

    def some(share: float, **values: Any) -> dict[str, Any]:
        return values if rng.random() < share else {}

    ids = rng.sample(range(vocab_size), 50)
    fields: dict[str, Any] = {"temperature": rng.choice([0.0, 0.0, 0.5, 1.0]), "max_tokens": rng.randint(1, 60)}
    fields |= {"seed": rng.randrange(1000), "ignore_eos": rng.random() < 0.5}
    fields |= some(0.3, top_k=rng.choice([1, 5, 40])) | some(0.3, top_p=rng.choice([0.3, 0.9]))
    fields |= some(0.2, min_p=0.1) | some(0.2, repetition_penalty=1.2) | some(0.2, frequency_penalty=0.4)
    fields |= some(0.2, presence_penalty=-0.3) | some(0.2, logit_bias={ids[0]: 5.0, ids[1]: -100.0})
    fields |= some(0.1, allowed_token_ids=ids) | some(0.2, bad_words=[" the", " a b"]) | some(0.2, stop=[".", "\n\n"])
    fields |= some(0.2, stop_token_ids=ids[2:20]) | some(0.2, n=2) | some(0.2, logprobs=3)
    fields |= some(0.1, prompt_logprobs=1) | some(0.2, min_tokens=min(4, fields["max_tokens"]))
    return SamplingParams(**fields)


def random_requests(model: LoadedModel, count: int, rng: random.Random) -> list[Request]:
    texts = [edit_prompt(number)[0] for number in range(len(CODE))]
    texts += [extract_prompt(number)[0] for number in range(len(TEXTS))]
    requests = []
    for number in range(count):
        ids = model.tokenizer.encode(rng.choice(texts + QUESTIONS))
        prompt = ids[-rng.randint(1, 150) :] if rng.random() < 0.7 else ids[: rng.randint(1, 60)] * rng.randint(1, 2)
        params = random_params(rng, model.tokenizer.vocab_size)
        request = make_request(model.tokenizer, str(number), prompt, params)[0]
        requests.append(replace(request, priority=rng.randint(0, 3)))  # who comes later may take others' slots
    return requests


def run(model: LoadedModel, requests: list[Request], config: EngineConfig, rng: random.Random | None) -> Results:
    """All to their end, or with ``rng`` beside others that are cancelled."""
    engine = build_engine(model, config)
    results: Results = {}
    waiting, cancelled = list(requests), 0
    while waiting or engine.has_unfinished:
        for _ in range(min(len(waiting), 64 if rng is None else rng.randint(0, 2))):
            engine.add(waiting.pop(0))
        if rng is not None and waiting and rng.random() < 0.1:
            engine.add(replace(rng.choice(requests), request_id=f"cancelled {cancelled}"))
            cancelled += 1
        if cancelled and rng is not None and rng.random() < 0.1:
            engine.abort(f"cancelled {rng.randrange(cancelled)}")
        for output in engine.step():
            tokens, likely, _ = results.setdefault((output.request_id, output.index), ([], [], None))
            tokens += output.token_ids
            likely += [tuple(one.token_ids) for one in output.logprobs or ()]
            results[output.request_id, output.index] = tokens, likely, output.error or output.finish_reason
        engine.check()
    if engine.speculation is not None:
        print(f"{engine.speculation}, {engine.preemptions} preemptions, {cancelled} cancelled")
    return {key: result for key, result in results.items() if not key[0].startswith("cancelled")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model = load(args.model, dtype="float32", device=args.device)
    requests = random_requests(model, args.requests, random.Random(args.seed))
    plain = EngineConfig(max_num_seqs=64, max_model_len=512, enable_prefix_caching=False)
    expected = run(model, requests, plain, None)
    page = 16 * kv_bytes_per_token(model.spec, model.decoder.dtype)
    few = EngineConfig(max_num_seqs=24, max_model_len=512, kv_cache_memory=34 * page, speculation=True)
    different = 0
    for shape in ({"draft_width": 1}, {"draft_width": 3, "draft_depth": 6, "draft_nodes": 16}):
        got = run(model, requests, replace(few, **shape), random.Random(args.seed))
        different += (wrong := sum(got.get(key) != one for key, one in expected.items()))
        print(f"{args.model}, {shape}: {wrong} of {len(expected)} choices differ", flush=True)
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
