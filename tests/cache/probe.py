"""Opens one context in a process of its own and tells what happened, for cases that must not take the tests down.

As a program: ``python probe.py JSON`` with the arguments of :func:`probe`; prints one line of JSON. An abort shows as a
negative return code.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def resident_bytes() -> int:
    """Resident size of this process (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def probe(model: Path | str, kv_type: str = "f16", **options: Any) -> dict[str, Any]:
    """Load a model, open a context, decode eight tokens. Options as for ``harness.Context``.

    Returns ``ok``, ``error`` (the message of what failed), ``stats``, ``resident_growth`` (bytes, by opening the
    context), ``returncode``, ``stderr``.
    """
    request = json.dumps({"model": str(model), "kv_type": kv_type, **options})
    done = subprocess.run([sys.executable, __file__, request], capture_output=True, text=True, timeout=120, check=False)
    lines = done.stdout.strip().splitlines()
    try:
        result = json.loads(lines[-1])
    except (IndexError, ValueError):
        result = {"ok": False, "error": ""}
    return {**result, "returncode": done.returncode, "stderr": done.stderr}


def main() -> int:
    options = json.loads(sys.argv[1])
    from harness import KVFOLD, Context, HarnessError, Model

    result: dict[str, Any] = {"ok": False}
    try:
        model = Model(options.pop("model"))
        before = resident_bytes()
        with Context(model, **options) as context:
            result["resident_growth"] = resident_bytes() - before
            context.feed(list(range(8)), chunk=8)
            if options["kv_type"] in KVFOLD:
                result["stats"] = context.stats()
        model.close()
        result["ok"] = True
    except (HarnessError, ValueError, TypeError, KeyError) as error:
        result["error"] = f"{type(error).__name__}: {error}"
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
