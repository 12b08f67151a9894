"""The patches: strict application, the line budget, the table that documents them, and one pin in one place."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "cmake"))
import apply_patches as ap  # noqa: E402
import llama_source as ls  # noqa: E402

MAX_ADDED = 90  # of all patches together: hook points only

PATCH = """\
--- a/src/a.cpp
+++ b/src/a.cpp
@@ -2,2 +2,3 @@
 two
+hook
 three
"""
TEXT = "one\ntwo\nthree\nfour\n"


def apply(text: str, patch: str = PATCH) -> tuple[str, list[ap.HunkResult]]:
    (file,) = ap.parse_patch(patch, "0001-a.patch")
    return ap.apply_to_text(text, file)


def test_hunk_in_place() -> None:
    out, (result,) = apply(TEXT)
    assert out == "one\ntwo\nhook\nthree\nfour\n"
    assert result.found == result.hunk.line == 2


def test_moved_hunk_is_applied_and_its_offset_reported() -> None:
    out, (result,) = apply("zero\nzero\n" + TEXT)
    assert out == "zero\nzero\none\ntwo\nhook\nthree\nfour\n"
    assert result.found == 4
    assert "+2 lines" in result.describe()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("one\ntwo \nthree\n", "gone from the file: 'two'"),  # even white space counts: no fuzz
        ("one\nthree\ntwo\n", "no longer together"),
        (TEXT + TEXT, "fits at 2 places"),
    ],
)
def test_hunk_that_does_not_fit_fails_with_the_reason(text: str, reason: str) -> None:
    out, (result,) = apply(text)
    assert out == text
    assert result.found is None
    assert reason in result.describe()


@pytest.mark.parametrize(
    "patch",
    [
        "no diff at all\n",
        "@@ -1 +1,2 @@\n one\n+two\n",
        "--- a/x\n+++ b/x\n@@ -1,3 +1,4 @@\n one\n+two\n",
        "--- a/x\n+++ b/x\n@@ -0,0 +1 @@\n+two\n",
    ],
)
def test_malformed_patch_is_refused(patch: str) -> None:
    with pytest.raises(ap.PatchError, match="bad"):
        ap.parse_patch(patch, "bad.patch")


def make_tree(path: Path, text: str = TEXT) -> Path:
    (path / "src").mkdir(parents=True)
    (path / "src" / "a.cpp").write_text(text)
    (path / "src" / "b.cpp").write_text("b\n")
    (path / "src" / "llama-kv-cache.cpp").write_text("cache\n")  # what makes it a llama.cpp tree
    return path


def make_patches(path: Path, patch: str = PATCH) -> Path:
    path.mkdir(exist_ok=True)
    (path / "0001-a.patch").write_text(patch)
    return path


def run_tool(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "cmake" / "apply_patches.py"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_program_applies_once_and_then_does_nothing(tmp_path: Path) -> None:
    tree, patches = make_tree(tmp_path / "tree"), make_patches(tmp_path / "patches")
    assert run_tool(tree, patches, "--check").returncode == 0
    assert (tree / "src" / "a.cpp").read_text() == TEXT
    assert run_tool(tree, patches).returncode == 0
    assert run_tool(tree, patches).returncode == 0
    assert (tree / "src" / "a.cpp").read_text() == "one\ntwo\nhook\nthree\nfour\n"


def test_program_writes_nothing_when_one_hunk_fails(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree")
    patches = make_patches(tmp_path / "patches")
    (patches / "0002-b.patch").write_text("--- a/src/b.cpp\n+++ b/src/b.cpp\n@@ -1 +1,2 @@\n gone\n+hook\n")
    result = run_tool(tree, patches)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "0002-b.patch" in result.stderr
    assert (tree / "src" / "a.cpp").read_text() == TEXT
    assert not (tree / ap.STAMP).exists()


def test_changed_patches_touch_only_the_files_they_change(tmp_path: Path) -> None:
    source = ls.LocalTree(make_tree(tmp_path / "tree"))
    patches, out = make_patches(tmp_path / "patches"), tmp_path / "out"
    ls.make_tree(source, out, patches)
    old = 1_000_000_000
    for file in out.rglob("*.cpp"):
        os.utime(file, (old, old))
    ls.make_tree(source, out, patches)
    assert all(int(file.stat().st_mtime) == old for file in out.rglob("*.cpp"))

    make_patches(tmp_path / "patches", PATCH.replace("hook", "other"))
    ls.make_tree(source, out, patches)
    assert (out / "src" / "a.cpp").read_text() == "one\ntwo\nother\nthree\nfour\n"
    assert int((out / "src" / "b.cpp").stat().st_mtime) == old

    (patches / "0001-a.patch").rename(patches / "0001-b.patch")
    (patches / "0001-b.patch").write_text("--- a/src/b.cpp\n+++ b/src/b.cpp\n@@ -1 +1,2 @@\n b\n+hook\n")
    ls.make_tree(source, out, patches)
    assert (out / "src" / "a.cpp").read_text() == TEXT
    assert (out / "src" / "b.cpp").read_text() == "b\nhook\n"


def test_what_is_no_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ls.SourceError, match="neither a"):
        ls.open_source(tmp_path, tmp_path)


@pytest.fixture(scope="session")
def pinned_sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pinned source distribution: from an earlier build of this checkout, else fetched with pip."""
    for found in sorted(ROOT.glob("build/**/download/*.tar.gz")):
        try:
            return ls.fetch_sdist(found.parent)
        except ls.SourceError:
            continue
    pytest.importorskip("scikit_build_core", reason="pip reads the metadata of llama-cpp-python with it")
    return ls.fetch_sdist(tmp_path_factory.mktemp("sdist"))


def test_patches_apply_to_the_pin_without_offset(pinned_sdist: Path) -> None:
    patches = ap.read_patches(ls.PATCH_DIR)
    source = ls.Sdist(pinned_sdist)
    _, results = ap.patched_files(patches, source.read_some({f.path for f in patches}).get)
    assert results
    assert [r.describe() for r in results if r.found != r.hunk.line] == []


def added_lines() -> dict[str, int]:
    added: dict[str, int] = {}
    for file in ap.read_patches(ls.PATCH_DIR):
        added[file.path] = added.get(file.path, 0) + sum(hunk.added for hunk in file.hunks)
    return added


def test_line_budget() -> None:
    assert sum(added_lines().values()) <= MAX_ADDED


def test_table_matches_the_patches_and_gives_reasons() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| (.*?) \| (\d+) \|$", (ls.PATCH_DIR / "README.md").read_text(), re.MULTILINE)
    assert {path: int(count) for path, _, count in rows} == added_lines()
    assert [path for path, reason, _ in rows if len(reason) < 10] == []


def test_the_pin_and_the_dependency_agree() -> None:
    version, _, commit = ls.read_pin()
    assert f'"llama-cpp-python=={version}"' in (ROOT / "pyproject.toml").read_text()
    assert re.fullmatch(r"[0-9a-f]{40}", commit)
