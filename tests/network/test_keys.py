"""Keys: who can make what, and which certificates open a connection."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import ssl
import stat
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

if importlib.util.find_spec("nvflare") is None:
    pytest.skip("needs nvflare: pip install 'sartor[network]'", allow_module_level=True)

from sartor.cli import main
from sartor.core.errors import ConfigError, NetworkError
from sartor.network import keys
from sartor.network.flare_client import FlareClient
from sartor.network.flare_server import FlareServer
from sartor.network.revocation import revoke_client
from tests.network.federation import ended_kit, free_port

pytestmark = pytest.mark.network


def test_a_project_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["keys", "init", "fl.example.org:8002", "north,south"]) == 0
    assert main(["keys", "client", "east"]) == 0
    assert main(["keys", "show"]) == 0
    reported = capsys.readouterr().out
    assert all(name in reported for name in ("fl.example.org:8002", "north", "south", "east"))
    for secret in (tmp_path / "keys").rglob("*.key"):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert main(["keys", "init", "fl.example.org:8002", "north"]) == 2
    assert main(["keys", "init", "fl.example.org", "north", "--keys", "other"]) == 2
    assert not (tmp_path / "other").exists()
    kit = keys.read_kit("keys/clients/north")
    assert (kit.name, kit.host, kit.port) == ("north", "fl.example.org", 8002)


def test_a_client_can_keep_its_private_key(tmp_path: Path) -> None:
    """Only the request travels; the kit that comes back has no key, and fits the one at home."""
    project = keys.init_project(tmp_path / "keys", address="127.0.0.1:1", clients=["other"])
    home = tmp_path / "home"
    request = keys.make_request(home, "north")
    assert b"PRIVATE" not in request.read_bytes()
    with pytest.raises(ConfigError, match="not of south"):
        keys.add_client(project, "south", request=request)
    damaged = tmp_path / "north.csr"
    damaged.write_bytes(request.read_bytes()[:40])
    with pytest.raises(ConfigError, match=r"is not a request .*sartor keys request north"):
        keys.add_client(project, "north", request=damaged)
    kit = keys.add_client(project, "north", request=request)
    assert sorted(path.name for path in kit.iterdir()) == ["client.crt", "kit.json", "rootCA.pem"]
    with pytest.raises(ConfigError, match=r"lacks client\.key"):
        keys.read_kit(kit)
    assert keys.read_project(project)["expires"]["north"] > datetime.now(UTC)
    for path in kit.iterdir():
        shutil.copy(path, home)
    context = ssl.create_default_context()
    context.load_cert_chain(*map(str, keys.read_kit(home).files[1:]))  # raises unless they fit


def test_a_new_kit_after_a_withdrawal_has_another_name_in_its_certificate(tmp_path: Path) -> None:
    from cryptography import x509

    project = keys.init_project(tmp_path / "keys", address="127.0.0.1:1", clients=["north"])
    revoke_client(project, "north")
    assert "north" not in keys.read_project(project)["expires"]
    kit = keys.read_kit(keys.add_client(project, "north"))
    cert = x509.load_pem_x509_certificate(kit.files[1].read_bytes())
    assert cert.subject.rfc4514_string() == "CN=north-2"
    assert (kit.name, kit.identity) == ("north", "north-2")
    renewed = keys.read_kit(keys.add_client(project, "north"))  # it ended: the same identity
    assert renewed.identity == "north-2"
    shutil.rmtree(project / "clients" / "north")  # handed over, and not kept here
    assert keys.read_project(project)["expires"]["north"] is None
    assert main(["keys", "show", "--keys", str(project)]) == 0


@pytest.mark.parametrize("name", ["server", "a.b", "../x", "", "host"])
def test_names_that_cannot_be(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"names must differ and hold|give it another name"):
        keys.init_project(tmp_path / "keys", address="host:1", clients=[name])
    assert not (tmp_path / "keys").exists()


def test_only_valid_certificates_open_a_connection(tmp_path: Path) -> None:
    """Without a certificate, or with one that has ended, the handshake itself fails."""
    port = free_port()
    ours = keys.init_project(tmp_path / "ours", address=f"127.0.0.1:{port}", clients=["site-1"])
    kit = keys.read_kit(ours / "clients" / "site-1")
    ended = ended_kit(ours, tmp_path / "ended")
    with pytest.raises(NetworkError, match="ended on"):
        keys.check_valid(ended)
    with pytest.raises(NetworkError, match="ended on"):
        FlareClient(ended, bytes)
    server = FlareServer(keys.read_kit(ours / "server"), ["site-1"], "127.0.0.1")
    try:
        time.sleep(1.0)
        assert _speaks(port, kit.files[0], kit)
        assert not _speaks(port, kit.files[0], ended)
        assert not _speaks(port, kit.files[0], None)
    finally:
        server.close()


def _speaks(port: int, root: Path, kit: keys.Kit | None) -> bool:
    """Say whether the server continues after a TLS handshake with this certificate."""
    context = ssl.create_default_context(cafile=str(root))
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    if kit is not None:
        context.load_cert_chain(str(kit.files[1]), str(kit.files[2]))
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=5) as plain,
            context.wrap_socket(plain) as secure,
        ):
            secure.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
            return len(secure.recv(9)) > 0
    except OSError:
        return False
