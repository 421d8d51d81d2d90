"""Keys: a project with its own certificate authority, a kit for the server and one per client.

::

    keys/
      project.json         name, address of the server, clients, withdrawn certificates
      authority/           rootCA.pem and rootCA.key: whoever has the key can make clients
      server/              the server's kit
      clients/NAME/        a client's kit: give it to that client and to nobody else

A kit is rootCA.pem, a certificate, its private key (readable by its owner alone) and kit.json. The
name in a certificate is the identity of its owner on the network. A client that wants to keep its
private key at home makes it there (`request`) and sends only the request, which holds no secret.

Keys and certificates are made by NVIDIA FLARE's provisioning functions, which also know what its
network layer demands of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sartor.core.errors import ConfigError, MissingExtraError, NetworkError
from sartor.network.revocation import SERVER, new_identity, project_of
from sartor.runs.storage import naming, read_json, write_json


@contextmanager
def network_extra() -> Iterator[None]:
    """Name the extra where an import inside finds a package of it missing."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(
            "A federation over a network needs NVIDIA FLARE and cryptography; install them with "
            "pip install 'sartor[network]'."
        ) from error


@dataclass(frozen=True)
class Kit:
    """What one party needs to take part."""

    folder: Path  # where it lies
    name: str  # whose it is
    project: str  # the federation it belongs to
    host: str  # of the server
    port: int
    identity: str  # the name in its certificate; see `revocation.py`

    @property
    def files(self) -> tuple[Path, Path, Path]:
        """The authority's certificate, the own certificate, and the own private key."""
        kind = SERVER if self.name == SERVER else "client"
        return self.folder / "rootCA.pem", self.folder / f"{kind}.crt", self.folder / f"{kind}.key"

    @property
    def expires(self) -> datetime:
        """When the certificate ends."""
        return _expiry(self.files[1])


def init_project(
    folder: str | Path,
    *,
    address: str,
    clients: Sequence[str],
    name: str = "sartor",
    days: int = 365,
) -> Path:
    """Make a project: an authority, the server's kit, and a kit for every client.

    Args:
        folder: a new folder.
        address: HOST:PORT at which clients reach the server.
        clients: their names.
        name: of the project.
        days: how long certificates are valid; the authority's ten times as long.

    Raises:
        ConfigError: the folder is taken, or an address or a name cannot be right.
    """
    folder = Path(folder)
    host, port = parse_address(address)
    _check_names(clients, host)
    if (folder / "project.json").exists() or (folder / "authority").exists():
        raise ConfigError(
            f"{folder} already holds keys; choose another folder, or add a client with "
            f"sartor keys client NAME --keys {folder}."
        )
    lighter = _lighter()
    with naming(folder, "create"):
        (folder / "authority").mkdir(parents=True, mode=0o700)
    key, public = lighter.generate_keys()
    root = lighter.generate_cert(
        lighter.Identity(name), lighter.Identity(name), key, public, valid_days=10 * days, ca=True
    )
    (folder / "authority" / "rootCA.pem").write_bytes(lighter.serialize_cert(root))
    _write_secret(folder / "authority" / "rootCA.key", lighter.serialize_pri_key(key))
    project = {"name": name, "host": host, "port": port, "days": days, "clients": []}
    write_json(folder / "project.json", project)
    _issue(folder, SERVER, folder / SERVER, days=days)
    for client in clients:
        add_client(folder, client)
    return folder


def add_client(
    folder: str | Path, name: str, *, request: str | Path | None = None, days: int | None = None
) -> Path:
    """Make the kit of one more client, or of one whose certificate has ended or was withdrawn.

    Args:
        folder: the project.
        name: of the client.
        request: a file that the client made with `make_request`; the kit then holds no private
            key, because that never left the client.
        days: how long the certificate is valid; as the project says if None.

    Returns:
        the folder of the kit.
    """
    folder = Path(folder)
    project = project_of(folder)
    _check_names([name], project["host"])
    kit = folder / "clients" / name
    identity = new_identity(project, name)
    _issue(folder, name, kit, days=days or project["days"], request=request, identity=identity)
    identities = {**project.get("identities", {}), name: identity}
    project["clients"] = list(dict.fromkeys([*project["clients"], name]))
    project["identities"] = {k: v for k, v in identities.items() if k != v}
    write_json(folder / "project.json", project)
    return kit


def make_request(folder: str | Path, name: str) -> Path:
    """Make a private key that stays in ``folder``, and a request to have it certified.

    Returns:
        the request, NAME.csr, to be sent to whoever keeps the project's keys.
    """
    with network_extra():
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.x509.oid import NameOID

    _check_names([name])
    folder = Path(folder)
    with naming(folder, "create"):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    lighter = _lighter()
    key, _ = lighter.generate_keys()
    _write_secret(folder / "client.key", lighter.serialize_pri_key(key))
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    csr = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    path = folder / f"{name}.csr"
    path.write_bytes(csr.public_bytes(serialization.Encoding.PEM))
    return path


def read_project(folder: str | Path) -> dict[str, Any]:
    """Return the project: name, address, clients, and when each certificate ends.

    That is None for a client whose kit is no longer here.
    """
    folder = Path(folder)
    project = project_of(folder)
    files = {SERVER: folder / SERVER / f"{SERVER}.crt"}
    files |= {n: folder / "clients" / n / "client.crt" for n in project["clients"]}
    expires = {name: _expiry(path) if path.is_file() else None for name, path in files.items()}
    return {"identities": {}, "revoked": [], **project, "expires": expires}


def read_kit(folder: str | Path) -> Kit:
    """Read a kit; a ConfigError says that it is not one, or what is missing."""
    folder = Path(folder).expanduser()
    if not (folder / "kit.json").is_file():
        raise ConfigError(
            f"{folder} is not a kit: it has no kit.json. Give the folder that sartor keys made "
            "for this client, such as keys/clients/NAME."
        )
    content = read_json(folder / "kit.json")
    try:
        name, port = content["name"], int(content["port"])
        identity = content.get("identity", name)
        kit = Kit(folder, name, content["project"], content["host"], port, identity)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{folder / 'kit.json'} is not whole ({error!r}); ask whoever keeps the project's keys "
            "for the kit again (sartor keys client NAME)."
        ) from error
    missing = [path.name for path in kit.files if not path.is_file()]
    if missing:
        raise ConfigError(
            f"The kit {folder} lacks {', '.join(missing)}; a private key that was made here "
            "(sartor keys request) belongs into it."
        )
    return kit


def check_valid(kit: Kit, now: datetime | None = None) -> None:
    """Refuse a kit whose certificate has ended, with the date and how to renew it."""
    if kit.expires <= (now or datetime.now(UTC)):
        raise NetworkError(
            f"The certificate of {kit.name} ended on {kit.expires:%Y-%m-%d %H:%M} UTC; whoever "
            f"keeps the project's keys makes a new one with sartor keys client {kit.name}."
        )


def parse_address(address: str) -> tuple[str, int]:
    """Read HOST:PORT.

    >>> parse_address("fl.example.org:8002")
    ('fl.example.org', 8002)
    """
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f"An address is HOST:PORT, such as fl.example.org:8002, got {address!r}.")
    return host, int(port)


def _check_names(names: Sequence[str], host: str | None = None) -> None:
    faults = [n for n in names if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", n)]
    if faults or SERVER in names or len(set(names)) != len(names):
        raise ConfigError(
            f"Client names must differ and hold letters, digits, - and _ (not {SERVER!r}), got "
            f"{', '.join(map(repr, names))}; choose others, such as north or site-1."
        )
    if host in names:
        raise ConfigError(
            f"A client must not have the name of the server's host, {host!r}; give it another name."
        )


def _expiry(certificate: Path) -> datetime:
    with network_extra():
        from cryptography import x509

    with naming(certificate, "read"), _readable(certificate, "a certificate", "sartor keys client"):
        return x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc


@contextmanager
def _readable(path: Path, what: str, fix: str) -> Iterator[None]:
    """Turn the error of a file that is not what it should be into one that says how to fix it."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(
            f"{path} is not {what} ({error}); it was damaged, or is another file. Make it anew "
            f"with {fix}."
        ) from error


def _issue(
    folder: Path,
    name: str,
    kit: Path,
    *,
    days: int,
    request: str | Path | None = None,
    identity: str | None = None,
) -> None:
    """Certify a key, and write the kit."""
    with network_extra():
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
        from cryptography.x509.oid import NameOID

    lighter = _lighter()
    project = project_of(folder)
    authority = folder / "authority"
    root = authority / "rootCA.key"
    with naming(root, "read"), _readable(root, "the authority's private key", "sartor keys init"):
        signer = load_pem_private_key(root.read_bytes(), None)
    with naming(kit, "create"):
        kit.mkdir(parents=True, exist_ok=True, mode=0o700)
    kind = SERVER if name == SERVER else "client"
    if request is None:
        key, public = lighter.generate_keys()
        _write_secret(kit / f"{kind}.key", lighter.serialize_pri_key(key))
    else:
        sent = Path(request)
        with naming(sent, "read"), _readable(sent, "a request", f"sartor keys request {name}"):
            csr = x509.load_pem_x509_csr(sent.read_bytes())
        claimed = [a.value for a in csr.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        if not csr.is_signature_valid or claimed != [name]:
            raise ConfigError(
                f"{request} is a request of {', '.join(map(str, claimed)) or 'nobody'}, not of "
                f"{name}; give the name that it was made with, or have it made anew by "
                f"sartor keys request {name}."
            )
        public = csr.public_key()
        (kit / f"{kind}.key").unlink(missing_ok=True)
    begin = datetime.now(UTC) - timedelta(minutes=10)  # clocks differ
    cert = lighter.generate_cert(
        lighter.Identity(identity or name),
        lighter.Identity(project["name"]),
        signer,
        public,
        not_valid_before=begin,
        not_valid_after=datetime.now(UTC) + timedelta(days=days),
        server_default_host=project["host"] if name == SERVER else None,
    )
    (kit / f"{kind}.crt").write_bytes(lighter.serialize_cert(cert))
    (kit / "rootCA.pem").write_bytes((authority / "rootCA.pem").read_bytes())
    facts = {"name": name, "identity": identity or name, "project": project["name"]}
    write_json(kit / "kit.json", {**facts, "host": project["host"], "port": project["port"]})


def _write_secret(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read."""
    with naming(path, "write"):
        path.unlink(missing_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(data)


def _lighter() -> Any:
    with network_extra():
        from nvflare.lighter import utils
    return utils
