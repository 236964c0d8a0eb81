"""What a step brings to the host."""

import pytest
import torch

from freewheel.engine.runner import Launched
from freewheel.sampling import Logprobs, Sampler, SampleRows, Samples, SamplingParams, SamplingState


def test_only_rows_that_asked_get_log_probabilities() -> None:
    """The kernels describe every row: those that did not ask have the rank 0."""
    described = Logprobs(
        rows=torch.arange(3),
        token_logprobs=torch.tensor([float("nan"), -0.5, float("nan")]),
        ranks=torch.tensor([0, 1, 0]),
        top_ids=torch.tensor([[-1, -1], [4, 9], [-1, -1]]),
        top_logprobs=torch.tensor([[-torch.inf] * 2, [-0.5, -1.5], [-torch.inf] * 2]),
        top_ranks=torch.tensor([[0, 0], [1, 2], [0, 0]]),
    )
    samples = Samples(torch.tensor([7, 4, -1]), torch.tensor([0, 0, 1], dtype=torch.uint8), described)
    result = Launched(samples, [], torch.device("cpu")).result()
    assert (result.tokens, result.statuses) == ([7, 4, -1], [0, 0, 1])
    assert result.logprobs[0] is result.logprobs[2] is None
    assert result.logprobs[1] is not None
    assert list(result.logprobs[1]) == [[4, 9], [-0.5, -1.5], [1, 2]]


@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_token_is_listed_once_with_the_rank_of_its_logit(count: int, temperature: float) -> None:
    """First the token itself, then the most likely ones without it, in the total order, whatever ties."""
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0, 0.0, 2.0, 2.0, -1.0]).repeat(20, 1)
    state, rows = SamplingState(20, 8, 4), SampleRows(torch.arange(20), torch.ones(20, dtype=torch.int64))
    for slot in range(20):
        state.join(slot, SamplingParams(temperature=temperature, logprobs=count), [0], seed=slot)
    result = Launched(Sampler(state).sample(logits, rows), [], torch.device("cpu")).result()
    top, ranks, logprobs = [1, 3, 2, 5, 6][:count], [6, 1, 3, 1, 7, 3, 3, 8], logits[0].log_softmax(0)
    assert result.tokens == [1] * 20 or {*result.tokens} - {*top}, "a token outside the list was drawn, too"
    for token, entry in zip(result.tokens, result.logprobs):
        assert entry is not None
        assert entry.token_ids == [token, *(id for id in top if id != token)]
        assert entry.ranks == [ranks[id] for id in entry.token_ids]
        assert entry.logprobs == pytest.approx(logprobs[entry.token_ids].tolist())
