"""docs/remote-stores.md runs as it stands, but for the port of its server; its claims hold."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

pytest.importorskip("valkey", reason="the package valkey is not installed: pip install 'ml-kvcache[valkey]'")

from benchmarks import remote
from kvcache.stores import ValkeyStore
from kvcache.stores.valkey.manifest import CHUNK, ENTRY_FORMAT
from kvcache.stores.valkey.options import ValkeyOptions
from kvcache.testing.servers import ValkeyServer

TEXT = (Path(__file__).resolve().parents[1] / "docs" / "remote-stores.md").read_text(encoding="utf-8")
VALKEY = TEXT.partition("\n## Valkey and Redis\n")[2].partition("\n## ")[0]
needs_server = pytest.mark.skipif(
    ValkeyServer.program() is None, reason="neither valkey-server nor redis-server is installed"
)


@needs_server
def test_the_code_of_the_page_runs() -> None:
    with ValkeyServer() as server:
        namespace: dict[str, object] = {"__name__": "page"}
        blocks = re.findall(r"^```python\n(.*?)^```$", VALKEY, re.MULTILINE | re.DOTALL)
        assert any("localhost:6379" in block for block in blocks)
        for block in blocks:
            here = block.replace("localhost:6379", f"127.0.0.1:{server.port}")
            exec(compile(here, "docs/remote-stores.md", "exec"), namespace)
        namespace["prefixes"].close()  # type: ignore[attr-defined]


def test_every_option_is_in_the_page_with_its_default() -> None:
    (table,) = re.findall(r"^\| option \|.*?(?=\n\n)", VALKEY, re.MULTILINE | re.DOTALL)
    rows = dict(re.findall(r"^\| (`.*?`) \| (.*?) \|", table, re.MULTILINE))
    options = {
        name: default.strip("`") for names, default in rows.items() for name in re.findall(r"`(\w+)`", names)
    }
    expected = {field.name for field in fields(ValkeyOptions)} - {"host", "port", "db", "tls"} | {
        "password_file"
    }
    assert options.keys() == expected
    made = ValkeyOptions()
    for name in ("prefix", "digest", "connections", "connect_timeout", "timeout"):
        assert options[name] == f"{getattr(made, name):{'g' if 'timeout' in name else ''}}"
    assert ValkeyOptions.of(None, {"ttl": options["ttl"]}).ttl == made.ttl


def test_the_format_is_in_the_page() -> None:
    assert f'"{ENTRY_FORMAT}"' in VALKEY
    assert f'"chunk": {CHUNK}' in VALKEY


@needs_server
def test_the_rights_of_the_page_are_enough() -> None:
    (rule,) = re.findall(r"^ACL SETUSER (.*)$", VALKEY, re.MULTILINE)
    with ValkeyServer("--user", *rule.split()) as server:
        url = f"valkey://cache:password@127.0.0.1:{server.port}"
        with ValkeyStore(url) as store:
            assert store.put("a", [bytes(CHUNK + 1)])
            assert store.get_into("a", bytearray(CHUNK + 1))
            assert store.prefix(["a", "b"]) == 1
            assert store.delete("a")
            assert store.stat(["a"]) == [None]


@needs_server
def test_the_benchmark_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    remote.main(["--mib", "4", "--rounds", "2"])
    printed = capsys.readouterr().out
    for row in ("plain TCP socket", "ValkeyStore.put, a server at its maxmemory", "ValkeyStore.get_into"):
        assert f"| {row} |" in printed
