"""The built-in models give the tokens that transformers' own GGUF loading gives, in float32.

The reference files were written by scripts/make_reference_tokens.py: ten prompts, 100 greedy tokens each. Each
position is checked against the reference's own history, so that one close call does not hide what comes after it.
"""

import json
from pathlib import Path

import pytest
import torch

from freewheel import LLM, SamplingParams
from freewheel.bench.divergence import logits_of
from freewheel.models.load import load

DATA = Path(__file__).parents[1] / "data"
MODELS = ["smollm2", "gemma3-270m"]

# Two float32 implementations differ by about this much in a logit. Where the reference's best token leads by
# less, the other order is no error.
CLOSE = 2e-3


def reference(name: str) -> dict:
    return json.loads((DATA / f"reference_{name}.json").read_text())


@pytest.mark.real
@pytest.mark.parametrize("name", MODELS)
def test_logits_choose_the_reference_tokens_at_every_position(name: str) -> None:
    decoder, data = load(name, dtype="float32").decoder, reference(name)
    for case in data["cases"]:
        prompt, tokens = case["prompt_token_ids"], case["token_ids"]
        logits = logits_of(decoder, prompt + tokens)[len(prompt) - 1 : -1]
        logits = logits.index_fill(1, torch.tensor(data["eos"]), -torch.inf)
        chosen = logits.argmax(1).tolist()
        for position, (ours, theirs, gap) in enumerate(zip(chosen, tokens, case["gaps"])):
            assert ours == theirs or gap < CLOSE, f"{case['prompt']!r} differs at {position} where the lead is {gap}"
        best = logits.topk(2).values
        gaps = (best[:, 0] - best[:, 1]).tolist()
        assert max(abs(ours - theirs) for ours, theirs in zip(gaps, case["gaps"])) < CLOSE


@pytest.mark.real
@pytest.mark.parametrize("name", MODELS)
def test_the_engine_generates_the_reference_tokens(name: str) -> None:
    data = reference(name)
    with LLM(name, dtype="float32", max_model_len=256, max_num_seqs=10) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=100, min_tokens=100)
        prompts = [case["prompt_token_ids"] for case in data["cases"]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for case, output in zip(data["cases"], outputs):
        pairs = zip(output.outputs[0].token_ids, case["token_ids"], case["gaps"])
        first = next(((position, gap) for position, (ours, theirs, gap) in enumerate(pairs) if ours != theirs), None)
        assert first is None or first[1] < CLOSE, f"{case['prompt']!r} differs at {first}"
