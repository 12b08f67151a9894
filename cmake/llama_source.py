"""Make the patched llama.cpp tree that a build uses.

    llama_source.py prepare --out DIR [--from TREE_OR_SDIST] --download DIR   a build's own tree, kept up to date
    llama_source.py dev DIR [--from TREE_OR_SDIST] --download DIR             a tree to edit by hand

The source is the pinned llama-cpp-python source distribution (`llama-source.txt`: version and sha256 in one place),
fetched with pip, or a local llama.cpp tree, or a local source distribution. Files whose content does not change are
not touched, so that a changed patch recompiles only what it changes. Standard library only, Python 3.10 or newer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

sys.path.insert(0, str(Path(__file__).resolve().parent))
from apply_patches import (
    STAMP,
    PatchError,
    patched_files,
    patches_hash,
    read_patches,
    require_applied,
    write_if_changed,
)

HERE = Path(__file__).resolve().parent
PIN_FILE = HERE / "llama-source.txt"
PATCH_DIR = HERE.parent / "ggml_patches"
BY_HAND = '"edited by hand"\n'  # the stamp of a tree made by `dev`

# What a build of the libraries and the server never reads.
_SKIPPED_TOP = {
    "app", "benches", "ci", "conversion", "docs", "examples", "gguf-py", "grammars", "media", "models", "pocs",
    "requirements", "skills", "tests",
}  # fmt: skip
_SKIPPED_UI = {"src", "static", "tests", "scripts"}


class SourceError(Exception):
    """The source cannot be had; the text says what to do."""


def read_pin(pin_file: Path = PIN_FILE) -> tuple[str, str, str]:
    """(version, sha256, llama.cpp commit) of the pinned source distribution."""
    text = pin_file.read_text(encoding="utf-8")
    pin = re.search(r"^llama-cpp-python==(\S+) --hash=sha256:([0-9a-f]{64})$", text, re.MULTILINE)
    commit = re.search(r"^# llama\.cpp commit: ([0-9a-f]{40})$", text, re.MULTILINE)
    if not pin:
        raise SourceError(f"{pin_file}: no line 'llama-cpp-python==VERSION --hash=sha256:HASH'")
    return pin[1], pin[2], commit[1] if commit else "unknown"


def wanted(path: str) -> bool:
    """Whether a file of the llama.cpp tree (relative path) is needed for building."""
    parts = PurePosixPath(path).parts
    if any(part.startswith(".") for part in parts) or parts[0] in _SKIPPED_TOP:
        return False
    return not (parts[:2] == ("tools", "ui") and len(parts) > 3 and parts[2] in _SKIPPED_UI)


class Sdist:
    """The llama.cpp files inside a source distribution of llama-cpp-python."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = "sdist " + hashlib.sha256(path.read_bytes()).hexdigest()

    def files(self) -> Iterator[tuple[str, Callable[[], bytes]]]:
        """(relative path, reader) for each needed file."""
        with tarfile.open(self.path) as tar:
            for member in tar:
                name = _below_llama(member.name)
                if name and member.isfile() and wanted(name):
                    yield name, lambda m=member: _extract(tar, m)  # type: ignore[misc]

    def read_some(self, paths: set[str]) -> dict[str, bytes]:
        """The content of those of `paths` that exist."""
        return {name: read() for name, read in self.files() if name in paths}


def _below_llama(name: str) -> str:
    match = re.match(r"[^/]+/vendor/llama\.cpp/(.+)$", name)
    return match[1] if match and ".." not in PurePosixPath(match[1]).parts else ""


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    stream = tar.extractfile(member)
    assert stream is not None  # only called for regular files
    return stream.read()


class LocalTree:
    """A pristine llama.cpp tree on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = f"tree {path}"

    def files(self) -> Iterator[tuple[str, Callable[[], bytes]]]:
        """(relative path, reader) for each needed file."""
        for file in sorted(self.path.rglob("*")):
            name = file.relative_to(self.path).as_posix()
            if wanted(name) and file.is_file():
                yield name, file.read_bytes

    def read_some(self, paths: set[str]) -> dict[str, bytes]:
        """The content of those of `paths` that exist."""
        return {name: (self.path / name).read_bytes() for name in paths if (self.path / name).is_file()}


def fetch_sdist(download_dir: Path, pin_file: Path = PIN_FILE) -> Path:
    """The pinned source distribution, from `download_dir` if it is there with the right hash, else fetched by pip."""
    version, sha256, _ = read_pin(pin_file)
    target = download_dir / f"llama_cpp_python-{version}.tar.gz"
    if target.exists() and hashlib.sha256(target.read_bytes()).hexdigest() == sha256:
        return target
    target.unlink(missing_ok=True)
    download_dir.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--no-binary", ":all:", "--no-build-isolation", "--require-hashes",
        "--dest", str(download_dir), "-r", str(pin_file),
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0 or not target.exists():
        lines = [line.strip() for line in (result.stderr or result.stdout).splitlines() if line.strip()] or [
            "no output"
        ]
        reason = next((line for line in reversed(lines) if "ERROR" in line.upper()), (lines or ["no output"])[-1])
        raise SourceError(
            f"fetching llama-cpp-python=={version} with pip failed ({reason}); without a network, fetch its source "
            "distribution elsewhere and pass -DKVFOLD_LLAMA_CPP_DIR=<llama_cpp_python-*.tar.gz or llama.cpp tree>"
        )
    return target


def open_source(source: Path | None, download_dir: Path) -> Sdist | LocalTree:
    """The source to build from: a local tree or source distribution if given, else the pinned one."""
    if source is None:
        return Sdist(fetch_sdist(download_dir))
    if source.is_file():
        return Sdist(source)
    if (source / "vendor" / "llama.cpp" / "CMakeLists.txt").exists():
        source = source / "vendor" / "llama.cpp"
    if not (source / "src" / "llama-kv-cache.cpp").exists():
        raise SourceError(f"'{source}' is neither a llama.cpp tree nor a llama-cpp-python source distribution")
    return LocalTree(source)


def make_tree(source: Sdist | LocalTree, out: Path, patch_dir: Path = PATCH_DIR) -> list[str]:
    """Make or update a patched tree at `out`; returns reports of hunks that moved. Raises PatchError."""
    stamp = out / STAMP
    state: dict[str, object] = {}
    if stamp.exists():
        try:
            read_state = json.loads(stamp.read_text(encoding="utf-8"))
            state = read_state if isinstance(read_state, dict) else {}
        except ValueError:
            state = {}
    wanted_state = (source.id, patches_hash(patch_dir))
    if isinstance(source, Sdist) and (state.get("source"), state.get("patches")) == wanted_state:
        return []
    patches = read_patches(patch_dir)
    targets = {f.path for f in patches}
    pristine = source.read_some(targets)
    content, results = patched_files(patches, pristine.get)
    require_applied(results)

    if state.get("source") != source.id or isinstance(source, LocalTree):
        seen = set()
        for name, read in source.files():
            seen.add(name)
            if name not in content:
                write_if_changed(out / name, read())
        for old in [p for p in out.rglob("*") if p.is_file()] if out.exists() else []:
            if old.relative_to(out).as_posix() not in seen:
                old.unlink()
    else:
        patched = state.get("patched")
        stale = set(patched if isinstance(patched, list) else []) - targets
        for name, data in source.read_some(stale).items():
            write_if_changed(out / name, data)
    for name, data in content.items():
        write_if_changed(out / name, data)
    state = {"source": source.id, "patches": patches_hash(patch_dir), "patched": sorted(targets)}
    stamp.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    return [r.describe() for r in results if r.found != r.hunk.line]


def main() -> int:
    """Command line; see the module text."""
    parser = argparse.ArgumentParser(description="Make the patched llama.cpp tree that a build uses.")
    sub = parser.add_subparsers(dest="command", required=True)
    for name in ("prepare", "dev"):
        p = sub.add_parser(name)
        p.add_argument("--from", dest="source", type=Path, help="a llama.cpp tree or a source distribution")
        p.add_argument("--download", type=Path, required=True, help="where the source distribution is kept")
        p.add_argument("--patches", type=Path, default=PATCH_DIR)
        if name == "prepare":
            p.add_argument("--out", type=Path, required=True)
        else:
            p.add_argument("out", type=Path)
    args = parser.parse_args()
    try:
        if args.command == "dev" and args.out.exists() and any(args.out.iterdir()):
            raise SourceError(f"'{args.out}' exists and is not empty: edits there would be lost")
        stamp = args.out / STAMP
        if args.command == "prepare" and stamp.exists() and stamp.read_text(encoding="utf-8") == BY_HAND:
            raise SourceError(f"'{args.out}' is edited by hand: pass -DKVFOLD_LLAMA_CPP_DIR={args.out} to use it")
        for line in make_tree(open_source(args.source, args.download), args.out, args.patches):
            print(line)
        if args.command == "dev":
            stamp.write_text(BY_HAND, encoding="utf-8")
    except (SourceError, PatchError, OSError, tarfile.TarError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
