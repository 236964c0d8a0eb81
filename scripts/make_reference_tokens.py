"""Write tests/data/reference_<model>.json: what transformers' own GGUF loading generates greedily in float32.

    python scripts/make_reference_tokens.py smollm2 gemma3-270m

For each of ten prompts: its token ids, 100 greedy tokens and, for each, how far its logit lies above the runner-up's.
Takes a minute or two for each model, most of it transformers reading the file; tests compare with the written file.
"""

import json
import sys
from pathlib import Path

PROMPTS = (
    "Why is the sky blue?",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea,",
    "The three laws of thermodynamics are:\n1.",
    "Translate to German: Good morning, my friend.",
    "In 1969, 2 astronauts walked on the Moon for 151 minutes and",
    "Ingredients: 200 g flour, 3 eggs, 1/2 l milk.\nMethod:",
    "Dear Ms. Lovelace,\n\nThank you for your letter of",
    "SELECT name, COUNT(*) FROM users",
)
TOKENS = 100


def main() -> None:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    from freewheel.models.gguf import read_gguf
    from freewheel.models.store import resolve
    from freewheel.models.tokenizer import Tokenizer

    for name in sys.argv[1:]:
        path = resolve(name)
        # transformers rebuilds these files' tokenizers inexactly; what is compared here is the model.
        tokenizer = Tokenizer.from_gguf(read_gguf(path).metadata)
        end_ids = sorted(tokenizer.eos_token_ids)
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
        cases = []
        for prompt in PROMPTS:
            ids = torch.tensor([tokenizer.encode(prompt)])
            with torch.inference_mode():
                out = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=TOKENS,
                    min_new_tokens=TOKENS,
                    do_sample=False,
                    output_logits=True,
                    return_dict_in_generate=True,
                    eos_token_id=end_ids,
                    pad_token_id=0,
                )
            # min_new_tokens forbids the end of sequence; the gap is among what was allowed.
            logits = torch.stack(out.logits)[:, 0]
            logits[:, end_ids] = float("-inf")
            best = logits.topk(2).values
            cases.append(
                {
                    "prompt": prompt,
                    "prompt_token_ids": ids[0].tolist(),
                    "token_ids": out.sequences[0, ids.shape[1] :].tolist(),
                    "gaps": [round(gap, 4) for gap in (best[:, 0] - best[:, 1]).tolist()],
                }
            )
        report = {"transformers": transformers.__version__, "eos": end_ids, "cases": cases}
        target = Path(__file__).parents[1] / "tests" / "data" / f"reference_{name}.json"
        target.write_text(json.dumps(report, indent=1) + "\n")
        print(target)


if __name__ == "__main__":
    main()
