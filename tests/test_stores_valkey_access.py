"""Who may come in: passwords that are never shown, users with few rights, and TLS."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("valkey", reason="the package valkey is not installed: pip install 'ml-kvcache[valkey]'")

from valkey import Valkey

from kvcache.stores import (
    StoreUnavailable,
    ValkeyStore,
    open_store,
)
from kvcache.testing.servers import ValkeyServer
from kvcache.testing.stores import content, read

from .valkey_rig import BIG, chunk_of, served

pytestmark = served


def chain(error: BaseException) -> str:
    """All that is told of an error, its causes too."""
    found, cause = "", error
    while cause is not None:
        found += f"{cause!r} {cause} "
        cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
    return found


def test_a_password_lets_in_and_is_never_shown() -> None:
    with ValkeyServer("--requirepass", "open sesame") as server:
        host = f"127.0.0.1:{server.port}"
        for store in (
            open_store(f"valkey://:open%20sesame@{host}"),
            open_store(f"valkey://{host}?password=open%20sesame"),
            open_store(f"valkey://{host}", password="open sesame"),
            open_store(f"valkey://default@{host}", password="open sesame"),
        ):
            assert isinstance(store, ValkeyStore)
            store.ping()
            assert "sesame" not in repr(store)
            store.close()
        for url in (
            f"valkey://{host}",
            f"valkey://:open%20barley@{host}",
            f"valkey://ali:open%20sesame@{host}",
        ):
            with ValkeyStore(url) as store, pytest.raises(StoreUnavailable) as caught:
                store.put("a", [b"x"])
            assert "open " not in chain(caught.value)
            assert server.url in str(caught.value)


def test_a_server_that_quotes_the_password_in_its_error_does_not_make_it_known() -> None:
    with ValkeyServer("--rename-command", "AUTH", "") as server:
        url = f"valkey://:sesame@127.0.0.1:{server.port}"
        with ValkeyStore(url) as store, pytest.raises(StoreUnavailable) as caught:
            store.ping()
    assert "sesame" not in chain(caught.value)
    assert "***" in str(caught.value)


def test_a_user_with_few_rights_is_enough() -> None:
    rights = ["get", "mget", "set", "getdel", "getrange", "strlen", "pttl", "pexpire", "unlink", "eval"]
    rights += ["multi", "exec"]
    user = [
        "cache",
        "on",
        ">pass",
        "~kvcache:*",
        "resetchannels",
        "-@all",
        *(f"+{right}" for right in rights),
    ]
    with ValkeyServer("--user", *user) as server:
        with ValkeyStore(f"valkey://cache:pass@127.0.0.1:{server.port}/0") as store:
            assert store.put("a", [content("a", BIG)])
            assert not store.put("a", [b"x"])
            assert read(store, "a") == content("a", BIG)
            assert store.prefix(["a", "b"]) == 1
            client = Valkey(port=server.port)
            client.delete(chunk_of(client, "a"))
            client.close()
            assert store.stat(["a"]) == [None]
            assert store.put("a", [b"x"])
            assert store.delete("a")
            with pytest.raises(StoreUnavailable, match=r"NOPERM|permission"):
                store.usage()
        other = ValkeyStore(f"valkey://cache:pass@127.0.0.1:{server.port}/0", prefix="other")
        with other, pytest.raises(StoreUnavailable, match=r"NOPERM|permission"):
            other.stat(["a"])


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a certificate for 127.0.0.1 by it, one for another name, and another authority."""
    folder = tmp_path_factory.mktemp("certificates")
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")

    def run(*arguments: str) -> None:
        subprocess.run([openssl, *arguments], cwd=folder, check=True, capture_output=True, timeout=60)

    new = (
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    )
    for name in ("ca", "stranger"):
        run(*new, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
    for name, alternative in (("server", "IP:127.0.0.1"), ("elsewhere", "DNS:elsewhere.example")):
        issued = ("-CA", "ca.pem", "-CAkey", "ca.key", "-addext", f"subjectAltName={alternative}")
        run(*new, *issued, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
    return folder


def over_tls(folder: Path, name: str) -> ValkeyServer:
    files = [
        ("--tls-cert-file", f"{name}.pem"),
        ("--tls-key-file", f"{name}.key"),
        ("--tls-ca-cert-file", "ca.pem"),
    ]
    return ValkeyServer(tls=[word for option, file in files for word in (option, str(folder / file))])


def test_tls_is_encrypted_and_both_sides_are_checked(certificates: Path) -> None:
    mine = {"tls_cert": certificates / "server.pem", "tls_key": certificates / "server.key"}
    with over_tls(certificates, "server") as server:
        with ValkeyStore(server.url, tls_ca=certificates / "ca.pem", **mine) as store:
            assert store.put("a", [content("a", BIG)])
            assert read(store, "a") == content("a", BIG)
        with open_store(
            f"{server.url.replace('valkeys', 'rediss')}?tls_verify=no&tls_cert={mine['tls_cert']}"
            f"&tls_key={mine['tls_key']}"
        ) as store:  # type: ignore[attr-defined]
            assert read(store, "a") == content("a", BIG)
        refused: list[dict[str, Any]] = [
            mine,  # the system's authorities do not know this one
            {**mine, "tls_ca": certificates / "stranger.pem"},
            {"tls_ca": certificates / "ca.pem"},  # the server wants to know who comes
            {**mine, "tls_ca": certificates / "nowhere.pem"},
        ]
        for options in refused:
            with ValkeyStore(server.url, **options) as store, pytest.raises(StoreUnavailable):
                store.ping()
        plain = server.url.replace("valkeys", "valkey")
        with ValkeyStore(plain, timeout=1) as store, pytest.raises(StoreUnavailable):
            store.ping()


def test_tls_refuses_a_certificate_of_another_name(certificates: Path) -> None:
    mine = {"tls_cert": certificates / "elsewhere.pem", "tls_key": certificates / "elsewhere.key"}
    with over_tls(certificates, "elsewhere") as server:
        store = ValkeyStore(server.url, tls_ca=certificates / "ca.pem", **mine)
        with store, pytest.raises(StoreUnavailable, match="certificate"):
            store.ping()
