"""How the command line refuses."""

from __future__ import annotations

import pytest

from kvfold import cli


def check_refusal(capsys: pytest.CaptureFixture[str], arguments: list[str], word: str) -> None:
    """``kvfold ARGUMENTS`` ends with status 1 and one line that names what is wrong."""
    try:
        code = cli.main(arguments)
    except SystemExit as stop:
        code = int(str(stop.code))
    captured = capsys.readouterr()
    assert code == 1
    assert word in captured.err
    assert len(captured.err.splitlines()) == 1
