"""A ``llama-server`` process, and ways to talk to it below the level of a client library."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

KEY = "a-secret-key"


def program() -> Path:
    """The installed ``llama-server``."""
    from kvfold._launch import package_dir

    return package_dir() / "bin" / "llama-server"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One llama-server process. ``environment`` adds variables; output goes to a file."""

    def __init__(self, folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.port = free_port()
        self.log_path = folder / f"server-{self.port}.log"
        command = [str(program()), "--host", "127.0.0.1", "--port", str(self.port), *arguments]
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_ready(self) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the server ended:\n{self.log}"
            try:
                if self.request("GET", "/health")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"the server did not get ready:\n{self.log}")

    def request(
        self, method: str, path: str, body: Any = None, *, key: str | None = KEY, timeout: float = 300
    ) -> tuple[int, Any]:
        """Status and decoded body. ``body`` may be bytes (sent as they are) or anything that JSON can hold."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            headers = {"Content-Type": "application/json"}
            if key is not None:
                headers["Authorization"] = f"Bearer {key}"
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            raw = response.read()
        finally:
            connection.close()
        try:
            return response.status, json.loads(raw)
        except ValueError:
            return response.status, raw

    def complete(self, prompt: Any, count: int, **options: Any) -> dict[str, Any]:
        """A greedy completion; fails the test if the server refuses it."""
        body = {"prompt": prompt, "n_predict": count, "temperature": 0.0, **options}
        status, reply = self.request("POST", "/completion", body)
        assert status == 200, reply
        return dict(reply)

    def busy_slots(self) -> int:
        status, slots = self.request("GET", "/slots")
        assert status == 200, slots
        return sum(bool(slot["is_processing"]) for slot in slots)

    def wait_idle(self, seconds: float) -> bool:
        """Wait until no slot works.

        Asks seldom: each answer restarts the second after which the server looks for closed connections.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(1.3)
            if self.busy_slots() == 0:
                return True
        return False

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return int(self.process.returncode)
