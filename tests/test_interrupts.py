"""Ctrl-C is held back to the end of a block."""

import signal

import pytest

from freewheel.interrupts import held_interrupts


def test_ctrl_c_waits_for_the_end_of_the_block() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), held_interrupts() as held:  # noqa: PT012
        assert not held
        signal.raise_signal(signal.SIGINT)
        assert held
        done.append("all of it")
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("error", [None, AttributeError("module 'numpy' has no attribute 'matrix'")])
def test_ctrl_c_counts_whatever_became_of_it_within_the_block(error: Exception | None) -> None:
    came = False
    with pytest.raises(KeyboardInterrupt), held_interrupts(at_once_too=True):  # noqa: PT012
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            came = True
        if error:
            raise error
    assert came
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
