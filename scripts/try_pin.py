"""Try kvfold's patches on another llama.cpp and say which hooks moved or broke.

    try_pin.py 0.3.37                 another llama-cpp-python version, fetched with pip
    try_pin.py TREE_OR_SDIST          a local llama.cpp tree or llama-cpp-python source distribution

Writes nothing but the download. Exit status 1 when a hook no longer applies. docs/upgrading-llama.cpp.md goes on from
here.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "cmake"))
from apply_patches import PatchError, failures, patched_files, read_patches  # noqa: E402
from llama_source import PATCH_DIR, LocalTree, Sdist, SourceError, open_source, read_pin  # noqa: E402


def fetch(version: str, dest: Path) -> Path:
    """Fetch the source distribution of one version by name."""
    target = dest / f"llama_cpp_python-{version}.tar.gz"
    if not target.exists():
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
            "--no-binary", ":all:", "--no-build-isolation", "--dest", str(dest), f"llama-cpp-python=={version}",
        ]  # fmt: skip
        if subprocess.run(command, check=False).returncode != 0 or not target.exists():
            raise SourceError(f"pip could not fetch the source distribution of llama-cpp-python=={version}")
    return target


def sdist_commit(path: Path) -> str:
    """The llama.cpp commit of a source distribution, if it carries the submodule's HEAD."""
    with tarfile.open(path) as tar:
        for member in tar:
            if member.name.endswith("/.git/modules/vendor/llama.cpp/HEAD"):
                stream = tar.extractfile(member)
                return stream.read().decode().strip() if stream else "unknown"
    return "unknown"


def type_lists(source: Sdist | LocalTree) -> str:
    """The value of GGML_TYPE_COUNT: new tensor types upstream deserve a look."""
    text = source.read_some({"ggml/include/ggml.h"}).get("ggml/include/ggml.h", b"").decode()
    match = re.search(r"GGML_TYPE_COUNT\s*=\s*(\d+)", text)
    return match[1] if match else "?"


def main() -> int:
    """Command line; see the module text."""
    parser = argparse.ArgumentParser(description="Try kvfold's patches on another llama.cpp.")
    parser.add_argument("source", help="llama-cpp-python version, llama.cpp tree or source distribution")
    parser.add_argument("--quiet", action="store_true", help="only hooks that moved or broke")
    args = parser.parse_args()
    downloads = ROOT / "build" / "download"
    try:
        path = Path(args.source)
        if not path.exists():
            if not re.fullmatch(r"\d+(\.\w+)+", args.source):
                raise SourceError(f"'{args.source}' is neither a path that exists nor a version like 0.3.36")
            downloads.mkdir(parents=True, exist_ok=True)
            path = fetch(args.source, downloads)
        source = open_source(path, downloads)
        patches = read_patches(PATCH_DIR)
        _, results = patched_files(patches, source.read_some({f.path for f in patches}).get)
    except (SourceError, PatchError, tarfile.TarError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1

    failed = failures(results)
    moved = [r for r in results if r.found is not None and r.found != r.hunk.line]
    for result in results:
        if not args.quiet or result in failed or result in moved:
            print(result.describe())
    in_place = len(results) - len(failed) - len(moved)
    print(f"{len(results)} hooks: {in_place} in place, {len(moved)} moved, {len(failed)} failed")
    print(f"pinned now: llama-cpp-python {read_pin()[0]}; GGML_TYPE_COUNT in the tried tree: {type_lists(source)}")
    if isinstance(source, Sdist):
        sha256 = hashlib.sha256(source.path.read_bytes()).hexdigest()
        version = re.sub(r"^llama_cpp_python-|\.tar\.gz$", "", source.path.name)
        print("lines for cmake/llama-source.txt:")
        print(f"# llama.cpp commit: {sdist_commit(source.path)}")
        print(f"llama-cpp-python=={version} --hash=sha256:{sha256}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
