"""The sampler's two paths."""

import pytest


@pytest.fixture(params=[False, True], ids=["torch", "kernels"])
def fused(request: pytest.FixtureRequest) -> bool:
    """Whether the Triton kernels draw, for tests of what holds on both paths."""
    if request.param:
        pytest.importorskip("triton", reason="Triton is made for Linux only")
    return request.param
