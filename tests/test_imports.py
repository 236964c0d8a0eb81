"""The layers import one way, and nothing slow is imported before it is needed."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "freewheel"

# Each part may import the parts listed for it (and itself).
BASE = {"config", "request"}
PARTS = {"sampling", "speculative", "cache", "models", "grammar"}
ALLOWED: dict[str, set[str]] = {
    "config": set(),
    "request": set(),
    "ops": BASE,
    "sampling": {"ops"},
    "speculative": {"ops"},
    "grammar": {"speculative"},
    "cache": BASE | {"ops"},
    "models": BASE | {"ops"},
    "engine": BASE | {"ops"} | PARTS,
    "interrupts": set(),
    "llm": BASE | {"ops", "engine", "interrupts"} | PARTS,
    "bench": BASE | {"ops", "engine", "interrupts", "llm", "server"} | PARTS,
    "server": BASE | {"ops", "engine"} | PARTS,
    "cli": BASE | {"ops", "engine", "interrupts", "llm", "bench", "server"} | PARTS,
}
STANDALONE = {part: {"torch", "numpy", "triton"} for part in ("sampling", "speculative")}


def runtime_imports(path: Path) -> set[str]:
    """Modules that ``path`` imports when it runs: everything outside ``if TYPE_CHECKING`` blocks."""
    modules: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module
            modules.update({node.module} | {f"{node.module}.{alias.name}" for alias in node.names})
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return modules


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


FILES = sorted(path for path in SOURCE.rglob("*.py") if part_of(path) not in ("__init__", "__main__"))


def test_every_part_has_its_rule() -> None:
    assert {part_of(path) for path in FILES} == set(ALLOWED)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_run_one_way(path: Path) -> None:
    part = part_of(path)
    for module in runtime_imports(path):
        names = module.split(".")
        if names[0] == "freewheel" and len(names) > 1:
            assert names[1] in ALLOWED[part] | {part, "__version__"}, f"{part} must not import {module}"
        elif part in STANDALONE and names[0] not in sys.stdlib_module_names:
            assert names[0] in STANDALONE[part] | {"freewheel"}, f"{part} must not import {module}"


def imported_by(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import freewheel", {"torch", "numpy"}),
        ("import freewheel.cli", {"torch", "numpy", "tokenizers", "jinja2", "huggingface_hub"}),
        ("import freewheel.models.store", {"torch", "numpy", "huggingface_hub"}),
        ("import freewheel.sampling", {"tokenizers", "transformers", "huggingface_hub", "triton", "freewheel.engine"}),
        ("import freewheel.speculative", {"triton", "freewheel.sampling", "freewheel.engine"}),
        ("import freewheel.engine.process", {"torch", "numpy", "tokenizers", "freewheel.engine.engine"}),
        ("import freewheel.llm", {"transformers", "huggingface_hub", "gguf", "scipy", "llguidance"}),
    ],
)
def test_nothing_is_imported_before_it_is_needed(code: str, absent: set[str]) -> None:
    assert not imported_by(code) & absent


def test_all_but_the_server_runs_without_what_the_server_is_made_of() -> None:
    script = """
import sys
sys.modules.update(dict.fromkeys(("fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client")))
import freewheel.llm, freewheel.engine.async_engine
from freewheel.cli import main
assert main(["models", "--json"]) == 0
raise SystemExit(main(["serve"]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2
    assert "missing: install freewheel with its extra" in done.stderr
