"""The sampler can be used without the engine."""

import subprocess
import sys


def modules_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_sampler_brings_only_torch_and_numpy() -> None:
    added = modules_after("import freewheel.sampling") - modules_after("import torch, numpy")
    added = {name for name in added if name.partition(".")[0] not in sys.stdlib_module_names}
    assert added
    assert all(name == "freewheel" or name.startswith(("freewheel.sampling", "freewheel.ops")) for name in added), added
