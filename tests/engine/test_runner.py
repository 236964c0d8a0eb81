"""What a step brings to the host."""

import torch

from freewheel.engine.runner import Launched
from freewheel.sampling import Logprobs, Samples


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
