"""Models by their name on the Hugging Face Hub, which here is a server on loopback."""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvcache_engine.checkpoints.source import existing_model_path, is_hub_name
from kvcache_engine.errors import ModelError
from kvcache_engine.loading import load_config
from kvcache_engine.tokenizer import Tokenizer

hub = pytest.importorskip("huggingface_hub")
Make = Callable[..., Path]
COMMIT = "0123456789" * 4


class Hub(ThreadingHTTPServer):
    """What huggingface_hub asks of the Hub for one repository, somebody/small, the files of a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.folder = folder
        self.sent: list[str] = []
        """Files whose content was sent."""


class _Request(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, _, _ = self.path.partition("?")
        if path.startswith("/somebody/small/resolve/"):
            self._file(self.server.folder / path.rsplit("/", 1)[1])
        elif path == "/api/models/somebody/small/revision/main":
            self._json({"id": "somebody/small", "sha": COMMIT, "siblings": []})
        elif path == f"/api/models/somebody/small/tree/{COMMIT}":
            files = [file for file in sorted(self.server.folder.iterdir()) if file.is_file()]
            self._json(
                [
                    {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _digest(file)}
                    for file in files
                ]
            )
        else:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})

    def _file(self, file: Path) -> None:
        if self.command == "GET":
            self.server.sent.append(file.name)
        self._send(200, file.read_bytes(), {"ETag": f'"{_digest(file)}"', "X-Repo-Commit": COMMIT})

    def _json(self, content: object) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@pytest.fixture
def served(make_model: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = make_model()
    (folder / "pytorch_model.bin").write_bytes(b"not read")
    with Hub(folder) as found:
        threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True).start()
        constants = importlib.import_module("huggingface_hub.constants")
        address = f"http://127.0.0.1:{found.server_address[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield found
        found.shutdown()


def test_a_name_is_fetched_once_and_then_found_in_the_cache(served: Hub) -> None:
    folder = existing_model_path("somebody/small")
    assert (folder / "model.safetensors").read_bytes() == (served.folder / "model.safetensors").read_bytes()
    assert "pytorch_model.bin" not in served.sent
    sent = list(served.sent)
    served.folder = served.folder / "gone"
    assert existing_model_path("somebody/small") == folder
    assert load_config("somebody/small").hidden_size == 32
    assert Tokenizer.load("somebody/small").encode("abc")
    assert served.sent == sent


def test_a_cache_with_a_tokenizer_alone_is_completed(served: Hub) -> None:
    hub.snapshot_download("somebody/small", allow_patterns=["tokenizer.json"])
    assert (existing_model_path("somebody/small") / "model.safetensors").is_file()


def test_what_the_hub_does_not_have_is_refused_with_its_reason(served: Hub) -> None:
    with pytest.raises(ModelError, match=r"somebody/else: no such model folder .* cannot be fetched: Repo"):
        existing_model_path("somebody/else")


def test_without_a_network_the_message_says_so(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="nor one of that name in the Hugging Face cache"):
        existing_model_path("somebody/small")
    assert served.sent == []


def test_without_the_package_the_message_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match="pip install huggingface_hub"):
        existing_model_path("somebody/small")


def test_what_a_name_on_the_hub_looks_like() -> None:
    names = ["a/b", "Qwen/Qwen3-0.6B", "a/b@v1.0", "a/b/c.gguf", "a/b@main/c-Q8_0.gguf"]
    paths = ["a", "/a/b", "./a/b", "a/b/c", "a b/c", "~/a", "a/b/", "../a"]
    assert [*filter(is_hub_name, [*names, *paths])] == names
