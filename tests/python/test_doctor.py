"""``kvfold doctor``: every symptom is found when it is there, and only then."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models

from kvfold import cli, doctor
from kvfold.config import KvConfig
from kvfold.devices import Device
from kvfold.gguf_header import read_gguf_header

GIB = 2**30


@pytest.fixture(autouse=True)
def _runtime(core: object) -> None:
    """All of these need the runtime."""


def _status(findings: list[doctor.Finding]) -> dict[str, str]:
    return {f.check: f.status for f in findings}


def test_a_healthy_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    findings = doctor.check_installation()
    assert {"runtime", "GPU", "threads", "memory"} <= set(_status(findings))
    assert doctor.worst(findings) != doctor.FAIL


@pytest.mark.parametrize(
    ("backends", "driver", "devices", "status", "word"),
    [
        ("cpu", False, [], "ok", "none"),
        ("cpu", True, [], "warn", "-DGGML_CUDA=ON"),
        ("cpu cuda", False, [], "warn", "container"),
        ("cpu cuda", True, [], "fail", "update the driver"),
        ("cpu cuda", True, [Device("CUDA0", "card", 7 * GIB, 8 * GIB, "driver")], "ok", "7.00 GiB"),
        ("cpu cuda", True, [Device("CUDA0", "card", GIB // 8, 8 * GIB, "driver")], "warn", "spill"),
    ],
)
def test_gpu(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    backends: str,
    driver: bool,
    devices: list[Device],
    status: str,
    word: str,
) -> None:
    file = tmp_path / "version"
    if driver:
        file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue\n")
    monkeypatch.setattr(doctor, "_DRIVER_FILE", file)
    monkeypatch.setattr(doctor, "nvml", lambda: None)
    monkeypatch.setattr(doctor, "gpus", lambda: devices)
    finding = doctor.check_gpu(backends)
    assert finding.status == status
    assert word in str(finding)


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "default_threads", lambda: 8)
    assert doctor.check_threads({}).status == "ok"
    assert doctor.check_threads({"OMP_WAIT_POLICY": "passive"}).status == "ok"
    assert "OMP_WAIT_POLICY" in doctor.check_threads({"OMP_WAIT_POLICY": "ACTIVE"}).action
    assert doctor.check_threads({"OMP_NUM_THREADS": "2"}).status == "warn"
    assert doctor.check_threads({"OMP_NUM_THREADS": "8"}).status == "ok"


@pytest.mark.parametrize(
    ("model", "config", "n_ctx", "word"),
    [
        ("llama-64-gqa3", KvConfig("fp4_csa2"), 32768, ""),
        ("llama-64-gqa3", KvConfig("fp4_csa2"), 512, "exact tail"),
        ("llama-64-gqa3", KvConfig("fp4_csa2", group=2), 65536, "kv_group=2"),
        ("gemma3-256-iswa", KvConfig("fp4"), 512, "sliding-window"),
    ],
)
def test_memory_that_is_not_as_low_as_expected(
    tiny_path: Callable[[str], Path], model: str, config: KvConfig, n_ctx: int, word: str
) -> None:
    finding = doctor.check_saving(read_gguf_header(tiny_path(model)), config, n_ctx)
    assert finding.status == ("warn" if word else "ok")
    assert word in finding.cause


@pytest.mark.parametrize("name", sorted(tiny_models.REFUSED))
def test_models_that_a_type_cannot_serve(tiny_path: Callable[[str], Path], name: str) -> None:
    (finding,) = doctor.check_model(tiny_path(name), KvConfig("fp4"), 1024)
    assert finding.status == "fail"
    assert tiny_models.REFUSED[name][1] in finding.cause
    assert "f16" in finding.action


def test_a_healthy_model(talking_tiny: Path) -> None:
    findings = doctor.check_model(talking_tiny, KvConfig("fp4_csa2"), 65536)
    status = _status(findings)
    assert status["model"] == status["saving"] == status["attention"] == status["size"] == "ok"
    assert status["context"] == "warn"  # trained with 32768
    assert "CPU" in next(f for f in findings if f.check == "attention").cause


def test_attention_on_the_wrong_side() -> None:
    assert doctor.check_backend("CPU", 0).status == "ok"
    assert doctor.check_backend("CUDA0", 33).status == "ok"
    assert doctor.check_backend("CPU", 33).status == "warn"


def test_look_up_that_is_not_sparse() -> None:
    assert doctor.check_lookup({"lookup_share": 0.12}).status == "ok"
    assert doctor.check_lookup({}).status == "ok"
    assert doctor.check_lookup({"lookup_share": 0.4}).status == "warn"


# -- servers -----------------------------------------------------------------------------------------------------------


class _Stub(http.server.BaseHTTPRequestHandler):
    answers: dict[str, tuple[int, Any]]

    def _answer(self) -> None:
        code, body = self.answers.get(self.path, (404, {}))
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = _answer

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Callable[..., str]]:
    """``server(answers)``: address of a server that gives them."""
    running = []

    def start(answers: dict[str, tuple[int, Any]]) -> str:
        handler = type("Handler", (_Stub,), {"answers": answers})
        httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        running.append(httpd)
        return f"http://127.0.0.1:{httpd.server_address[1]}"

    yield start
    for httpd in running:
        httpd.shutdown()
        httpd.server_close()


GOOD = {
    "/health": (200, {"status": "ok"}),
    "/props": (200, {"total_slots": 4, "default_generation_settings": {"n_ctx": 8192}}),
    "/completion": (200, {"content": " four", "timings": {"predicted_per_second": 31.5}}),
}


@pytest.mark.parametrize(
    ("changes", "status", "word"),
    [
        ({}, "ok", "31.5 tokens"),
        ({"/health": (503, {})}, "warn", "loading"),
        ({"/health": (404, {})}, "fail", "llama-server"),
        ({"/props": (401, {})}, "fail", "--api-key"),
        ({"/completion": (500, {})}, "fail", "log"),
        ({"/completion": (200, {"timings": {"predicted_per_second": 0.4}})}, "warn", "spills"),
    ],
)
def test_servers(server: Callable[..., str], changes: dict[str, Any], status: str, word: str) -> None:
    findings = doctor.check_server(server({**GOOD, **changes}) + "/v1")
    assert doctor.worst(findings) == status
    assert any(word in str(f) for f in findings)


def test_no_server(capsys: Any) -> None:
    assert cli.main(["doctor", "--server", "127.0.0.1:9", "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert report["status"] == "fail"
    assert "does not answer" in report["findings"][0]["cause"]


def test_command(talking_tiny: Path, capsys: Any) -> None:
    assert cli.main(["doctor", str(talking_tiny), "-c", "8k", "--no-load"]) == 0
    text = capsys.readouterr().out
    assert "runtime" in text and "saving" in text
    assert cli.main(["doctor", str(talking_tiny), "--kv-type", "fp9"]) == 1
