"""Apply kvfold's patches to a llama.cpp tree, strictly.

A hunk is applied only where its old lines (context and removed lines) occur exactly once in the file. There is no
fuzz: a hunk that moved is applied at its new place and the offset is reported; a hunk whose lines changed, vanished or
became ambiguous fails, and then nothing at all is written.

Standard library only, Python 3.10 or newer. As a program:

    apply_patches.py TREE PATCH_DIR            apply; does nothing when the tree's stamp says it is done
    apply_patches.py TREE PATCH_DIR --check    exit status 1 unless every hunk applies; writes nothing
    apply_patches.py TREE PATCH_DIR --report   like --check, with one line for each hunk
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

STAMP = ".kvfold-patched"
_HUNK_HEAD = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class PatchError(Exception):
    """A patch is malformed or does not fit; the text names patch, file and hunk."""


@dataclass
class Hunk:
    """One change: `old` lines become `new` lines, expected at line `line` (1-based) of the old file."""

    line: int
    old: list[str]
    new: list[str]
    added: int

    @property
    def label(self) -> str:
        """The first added line, for people to recognise the hook by."""
        kept = set(self.old)
        return next((text.strip() for text in self.new if text not in kept), "(removal)")


@dataclass
class FilePatch:
    """All hunks of one patch file for one source file (path relative to the tree, with `/`)."""

    patch: str
    path: str
    hunks: list[Hunk] = field(default_factory=list)


@dataclass
class HunkResult:
    """What became of a hunk. `found` is its 1-based line in the tree, or None with the reason in `error`."""

    file: FilePatch
    hunk: Hunk
    found: int | None
    error: str = ""

    def describe(self) -> str:
        """One line for a report."""
        where = f"{self.file.path}:{self.hunk.line}"
        if self.found is None:
            return f"FAILED   {where}  {self.error}  [{self.hunk.label}]"
        if self.found != self.hunk.line:
            return f"moved    {where}  by {self.found - self.hunk.line:+d} lines  [{self.hunk.label}]"
        return f"applied  {where}  [{self.hunk.label}]"


def parse_patch(text: str, name: str) -> list[FilePatch]:
    """Parse a unified diff. Lines keep no newline; raises PatchError for anything that is not plain hunks."""
    files: list[FilePatch] = []
    lines = text.splitlines()
    i = 0
    while i < len(lines):
        line = lines[i]
        if line.startswith("+++ "):
            path = line[4:].split("\t")[0].strip()
            files.append(FilePatch(name, path.split("/", 1)[1] if path.startswith(("a/", "b/")) else path))
        elif match := _HUNK_HEAD.match(line):
            if not files:
                raise PatchError(f"{name}: a hunk before any '+++ file' line")
            n_old, n_new = (int(match[g]) if match[g] is not None else 1 for g in (2, 4))
            hunk = Hunk(int(match[1]), [], [], 0)
            while len(hunk.old) < n_old or len(hunk.new) < n_new:
                i += 1
                body = lines[i] if i < len(lines) else "?"
                kind, content = body[:1], body[1:]
                if kind in (" ", ""):
                    hunk.old.append(content)
                    hunk.new.append(content)
                elif kind == "-":
                    hunk.old.append(content)
                elif kind == "+":
                    hunk.new.append(content)
                    hunk.added += 1
                else:
                    raise PatchError(f"{name}: line {i + 1} is no hunk line, or the counts of its @@ line are wrong")
            if len(hunk.old) != n_old or len(hunk.new) != n_new:
                raise PatchError(f"{name}: the counts of the @@ line before line {i + 1} are wrong")
            if not hunk.old:
                raise PatchError(f"{name}: the hunk at line {hunk.line} has no context")
            files[-1].hunks.append(hunk)
        i += 1
    if not any(f.hunks for f in files):
        raise PatchError(f"{name}: no hunks found")
    return files


def patch_paths(patch_dir: Path) -> list[Path]:
    """The patch files in the order they are applied."""
    return sorted(patch_dir.glob("*.patch"))


def read_patches(patch_dir: Path) -> list[FilePatch]:
    """All file patches of a directory, in order."""
    return [f for path in patch_paths(patch_dir) for f in parse_patch(path.read_text(encoding="utf-8"), path.name)]


def patches_hash(patch_dir: Path) -> str:
    """A hash over the names and the content of all patches."""
    digest = hashlib.sha256()
    for path in patch_paths(patch_dir):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _places(lines: list[str], old: list[str], start: int) -> list[int]:
    n = len(old)
    return [i for i in range(start, len(lines) - n + 1) if lines[i] == old[0] and lines[i : i + n] == old]


def _closest(lines: list[str], old: list[str]) -> str:
    """Why a hunk was not found: its first line that is nowhere in the file."""
    present = set(lines)
    missing = next((text for text in old if text not in present), None)
    if missing is None:
        return "its context lines are no longer together"
    return f"gone from the file: '{missing.strip()}'"


def apply_to_text(text: str, file: FilePatch) -> tuple[str, list[HunkResult]]:
    """Apply one file's hunks to its text. Failed hunks are left out and reported."""
    lines = text.split("\n")
    results: list[HunkResult] = []
    shift = 0  # lines that earlier hunks added
    start = 0
    for hunk in file.hunks:
        places = _places(lines, hunk.old, start)
        if len(places) == 1:
            at = places[0]
            lines[at : at + len(hunk.old)] = hunk.new
            results.append(HunkResult(file, hunk, at + 1 - shift))
            shift += len(hunk.new) - len(hunk.old)
            start = at + len(hunk.new)
        elif places:
            near = ", ".join(str(p + 1 - shift) for p in places[:4])
            results.append(HunkResult(file, hunk, None, f"fits at {len(places)} places (lines {near})"))
        else:
            results.append(HunkResult(file, hunk, None, _closest(lines, hunk.old)))
    return "\n".join(lines), results


def patched_files(
    patches: Iterable[FilePatch], read: Callable[[str], bytes | None]
) -> tuple[dict[str, bytes], list[HunkResult]]:
    """Apply patches to the files that `read(path)` returns (None: no such file).

    Returns the new content by path and the result of every hunk. Only use the content when no result failed.
    """
    content: dict[str, str | None] = {}
    results: list[HunkResult] = []
    for file in patches:
        if file.path not in content:
            raw = read(file.path)
            content[file.path] = None if raw is None else raw.decode("utf-8")
        text = content[file.path]
        if text is None:
            results += [HunkResult(file, hunk, None, "the file does not exist") for hunk in file.hunks]
            continue
        content[file.path], applied = apply_to_text(text, file)
        results += applied
    return {path: text.encode("utf-8") for path, text in content.items() if text is not None}, results


def failures(results: Iterable[HunkResult]) -> list[HunkResult]:
    """The results that failed."""
    return [r for r in results if r.found is None]


def require_applied(results: Iterable[HunkResult]) -> None:
    """Raise PatchError naming the first hunk that failed, if any did."""
    failed = failures(results)
    if failed:
        first = failed[0]
        more = f" (and {len(failed) - 1} more hunks)" if len(failed) > 1 else ""
        raise PatchError(
            f"{first.file.patch} does not apply to {first.file.path} near line {first.hunk.line}: {first.error}{more}"
        )


def write_if_changed(path: Path, data: bytes) -> bool:
    """Write a file only when its content differs, so that build tools see no needless change."""
    if path.exists() and path.read_bytes() == data:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return True


def main() -> int:
    """Command line; see the module text."""
    parser = argparse.ArgumentParser(description="Apply kvfold's patches to a llama.cpp tree, strictly.")
    parser.add_argument("tree", type=Path)
    parser.add_argument("patch_dir", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 unless all hunks apply")
    parser.add_argument("--report", action="store_true", help="write nothing; say for each hunk what would happen")
    args = parser.parse_args()
    tree: Path = args.tree

    stamp = tree / STAMP
    if stamp.exists():
        if not (args.check or args.report) and patches_hash(args.patch_dir) in stamp.read_text(encoding="utf-8"):
            return 0
        print(f"error: {tree} is already patched; give a pristine tree", file=sys.stderr)
        return 1

    def read(path: str) -> bytes | None:
        return (tree / path).read_bytes() if (tree / path).is_file() else None

    try:
        content, results = patched_files(read_patches(args.patch_dir), read)
        if args.report:
            for result in results:
                print(result.describe())
        require_applied(results)
    except PatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not (args.check or args.report):
        for path, data in content.items():
            write_if_changed(tree / path, data)
        stamp.write_text(f"patches {patches_hash(args.patch_dir)}\n", encoding="utf-8")
        for result in results:
            if result.found != result.hunk.line:
                print(result.describe())
    return 0


if __name__ == "__main__":
    sys.exit(main())
