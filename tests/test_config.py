"""Options of an engine are refused with their name."""

from typing import Any

import pytest

from freewheel.config import EngineConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be a positive integer"),
        ({"page_size": True}, "page_size must be a positive integer"),
        ({"max_num_batched_tokens": 3, "max_num_seqs": 4}, r"max_num_batched_tokens \(3\) must be at least max_num_seqs"),
        ({"max_model_len": -1}, "max_model_len must be a positive integer"),
        ({"kv_cache_memory": 2.5}, "kv_cache_memory must be a positive integer"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching must be True or False"),
        ({"lookahead": -1}, "lookahead must be an integer from 0 to 8 or None"),
        ({"lookahead": True}, "lookahead must be an integer from 0 to 8 or None"),
        ({"draw": "fast"}, "draw must be 'two_level', 'gumbel' or 'multinomial'"),
        ({"seed": 2**63}, "seed must be a signed 64-bit integer"),
        ({"seed": 1, "draw": "multinomial"}, "seed must be None"),
    ],
    ids=str,
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)
