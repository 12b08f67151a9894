"""Write ggml_patches/ from a llama.cpp tree that was edited by hand.

    make_patches.py EDITED_TREE [--pristine TREE_OR_SDIST] [--check]

One patch for each changed file, with as few context lines as make every hunk's place unique in its file. The table in
ggml_patches/README.md gets the new line counts; a file that is new there gets the reason `?`, to be filled in. Without
--pristine the pinned source distribution is used (downloaded into build/download when it is not there yet).
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "cmake"))
from apply_patches import PatchError, apply_to_text, failures, parse_patch, patch_paths  # noqa: E402
from llama_source import PATCH_DIR, SourceError, open_source, wanted  # noqa: E402

MAX_CONTEXT = 12
MAX_ADDED = 90
_ROW = re.compile(r"^\| `([^`]+)` \| (.*?) \| (\d+) \|$")


def _count(lines: list[str], part: list[str]) -> int:
    n = len(part)
    return sum(1 for i in range(len(lines) - n + 1) if lines[i] == part[0] and lines[i : i + n] == part)


def make_hunks(old: list[str], new: list[str]) -> list[tuple[int, int, int, int]]:
    """(old start, old end, new start, new end) of each hunk, context included, 0-based half-open."""
    codes = [c for c in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes() if c[0] != "equal"]
    hunks: list[tuple[int, int, int, int]] = []
    for _, i1, i2, j1, j2 in codes:
        before = after = 1
        while True:
            a, b = max(0, i1 - before), min(len(old), i2 + after)
            part = old[a:b]
            distinct = any(line.strip() for line in part) and _count(old, part) == 1
            if distinct or (before >= MAX_CONTEXT and after >= MAX_CONTEXT):
                break
            if before <= after:
                before += 1
            else:
                after += 1
        c, d = j1 - (i1 - a), j2 + (b - i2)
        if hunks and a < hunks[-1][1]:  # the contexts overlap: one hunk
            hunks[-1] = (hunks[-1][0], b, hunks[-1][2], d)
        else:
            hunks.append((a, b, c, d))
    return hunks


def make_patch(path: str, old_text: str, new_text: str) -> tuple[str, int]:
    """(unified diff, number of added lines) for one file."""
    old, new = old_text.split("\n"), new_text.split("\n")
    out = [f"--- a/{path}", f"+++ b/{path}"]
    added = 0
    for a, b, c, d in make_hunks(old, new):
        out.append(f"@@ -{a + 1},{b - a} +{c + 1},{d - c} @@")
        for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old[a:b], new[c:d], autojunk=False).get_opcodes():
            if tag == "equal":
                out += [" " + line for line in old[a + i1 : a + i2]]
            else:
                out += ["-" + line for line in old[a + i1 : a + i2]]
                out += ["+" + line for line in new[c + j1 : c + j2]]
                added += j2 - j1
    return "\n".join(out) + "\n", added


def update_table(readme: Path, added: dict[str, int]) -> None:
    """Bring the table of ggml_patches/README.md up to date, keeping the reasons that are there."""
    lines = readme.read_text(encoding="utf-8").splitlines()
    reasons = {m[1]: m[2] for line in lines if (m := _ROW.match(line))}
    head = next(i for i, line in enumerate(lines) if line.startswith("|---"))
    end = next((i for i in range(head + 1, len(lines)) if not lines[i].startswith("|")), len(lines))
    rows = [f"| `{path}` | {reasons.get(path, '?')} | {n} |" for path, n in sorted(added.items())]
    rows.append(f"| total | at most {MAX_ADDED} | {sum(added.values())} |")
    text = "\n".join(lines[: head + 1] + rows + lines[end:]) + "\n"
    if readme.read_text(encoding="utf-8") != text:
        readme.write_text(text, encoding="utf-8")


def main() -> int:
    """Command line; see the module text."""
    parser = argparse.ArgumentParser(description="Write ggml_patches/ from a llama.cpp tree that was edited by hand.")
    parser.add_argument("tree", type=Path)
    parser.add_argument("--pristine", type=Path, help="unedited llama.cpp tree or llama-cpp-python source distribution")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when ggml_patches/ is out of date")
    args = parser.parse_args()
    tree: Path = args.tree

    texts: dict[str, str] = {}
    added: dict[str, int] = {}
    try:
        source = open_source(args.pristine, ROOT / "build" / "download")
        known = set()
        for path, read in source.files():
            known.add(path)
            edited = tree / path
            if not edited.exists():
                raise SourceError(f"{path} is missing in {tree}: patches never remove files")
            before, after = read(), edited.read_bytes()
            if before != after:
                texts[path], added[path] = make_patch(path, before.decode(), after.decode())
                (parsed,) = parse_patch(texts[path], path)
                rebuilt, results = apply_to_text(before.decode(), parsed)
                for failed in failures(results):
                    raise PatchError(failed.describe())
                if rebuilt.encode() != after:
                    raise PatchError(f"{path}: the patch does not reproduce the edited file")
        for file in tree.rglob("*"):
            name = file.relative_to(tree).as_posix()
            if file.is_file() and wanted(name) and name not in known and not name.endswith((".orig", ".rej", "~")):
                raise SourceError(f"{name} is new in {tree}: new files belong into cpp/")
    except (SourceError, PatchError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1

    names = {
        f"{i:04d}-{re.sub(r'[^a-z0-9]+', '-', path.lower()).strip('-')}.patch": path
        for i, path in enumerate(sorted(texts), 1)
    }
    if args.check:
        now = {p.name: p.read_text(encoding="utf-8") for p in patch_paths(PATCH_DIR)}
        return 0 if now == {name: texts[path] for name, path in names.items()} else 1
    for stale in patch_paths(PATCH_DIR):
        if stale.name not in names:
            stale.unlink()
    for name, path in names.items():
        target = PATCH_DIR / name
        if not target.exists() or target.read_text(encoding="utf-8") != texts[path]:
            target.write_text(texts[path], encoding="utf-8")
        print(f"{added[path]:4d}  {path}")
    update_table(PATCH_DIR / "README.md", added)
    total = sum(added.values())
    print(f"{total:4d}  added lines in {len(added)} files (at most {MAX_ADDED})")
    return 0 if total <= MAX_ADDED else 1


if __name__ == "__main__":
    sys.exit(main())
