"""Sampling, usable on its own: it needs torch and NumPy, and no engine.

state = SamplingState(slots=8, vocab_size=logits.shape[1], max_length=4096)
state.join(0, SamplingParams(temperature=0.8, top_p=0.95), prompt_ids, seed=random_seed())
slots, positions = torch.tensor([0]), torch.tensor([len(prompt_ids)])
samples = Sampler(state).sample(logits, SampleRows(slots, positions))
state.append(slots, positions, samples.tokens)
"""

from freewheel.sampling.grammar import Grammar
from freewheel.sampling.logprobs import Logprobs, prompt_logprobs
from freewheel.sampling.params import SamplingParams
from freewheel.sampling.probabilities import softmax
from freewheel.sampling.rng import choice_seed, random_seed
from freewheel.sampling.sampler import Sampler, SampleRows, Samples, Status
from freewheel.sampling.state import SamplingState

__all__ = [
    "Grammar",
    "Logprobs",
    "SampleRows",
    "Sampler",
    "Samples",
    "SamplingParams",
    "SamplingState",
    "Status",
    "choice_seed",
    "prompt_logprobs",
    "random_seed",
    "softmax",
]
