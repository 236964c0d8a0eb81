"""The sampler can be used without the engine."""

import subprocess
import sys

SCRIPT = """
import sys, torch, numpy
before = set(sys.modules)
import freewheel.sampling
print(*set(sys.modules) - before)
"""


def test_importing_the_sampler_brings_only_torch_and_numpy() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    added = {name for name in done.stdout.split() if name.partition(".")[0] not in sys.stdlib_module_names}
    assert "freewheel.sampling" in added
    assert all(name == "freewheel" or name.startswith(("freewheel.sampling", "freewheel.ops")) for name in added), added
