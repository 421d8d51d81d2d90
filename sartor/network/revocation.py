"""Withdrawn certificates: who may come in, by the name that stands in a certificate.

| word | meaning |
|---|---|
| name | of a client, in a roster, in reports and on the command line |
| identity | the common name in its certificate; the name itself until a certificate is withdrawn |

A connection proves an identity (TLS), so a server that knows which identities are withdrawn needs
nothing else to refuse them. A withdrawn identity is never given again: a new kit for the same
client carries the next one (``north``, ``north-2``, ...). The list is a part of ``project.json``;
a server that runs sees a change of that file at the next call of a client, and needs no restart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from sartor.core.errors import ConfigError, RunFolderError
from sartor.runs.storage import read_json, write_json

SERVER = "server"
"""The name of every server."""


def project_of(folder: str | Path) -> dict[str, Any]:
    """Return what ``project.json`` of a project holds.

    Raises:
        ConfigError: the folder is not that of a project.
    """
    path = Path(folder) / "project.json"
    if not path.is_file():
        raise ConfigError(
            f"{folder} holds no keys; make some with sartor keys init, or give their folder with "
            "--keys."
        )
    return dict(read_json(path))


def identity_of(project: Mapping[str, Any], name: str) -> str:
    """Return the identity that a client of the project has now.

    >>> identity_of({"identities": {"north": "north-2"}}, "north")
    'north-2'
    """
    return str(project.get("identities", {}).get(name, name))


def new_identity(project: Mapping[str, Any], name: str) -> str:
    """Return the identity for a new kit: the present one, or the first that is free.

    >>> project = {"clients": [], "revoked": ["north"], "host": "fl.example.org"}
    >>> new_identity(project, "north")
    'north-2'
    """
    if name in project["clients"]:
        return identity_of(project, name)
    taken = {identity_of(project, other) for other in project["clients"]}
    taken |= {*project["clients"], *project.get("revoked", []), project["host"], SERVER}
    tries = (name if k == 1 else f"{name}-{k}" for k in count(1))
    return next(found for found in tries if found not in taken)


def revoke_client(folder: str | Path, name: str) -> str:
    """Withdraw the certificate of a client, and take it off the list of clients.

    Args:
        folder: the project; only its ``project.json`` is read and written, no key is needed.
        name: of the client.

    Returns:
        the identity that is refused from now on.

    Raises:
        ConfigError: there is no such client.
    """
    project = project_of(folder)
    if name not in project["clients"]:
        raise ConfigError(
            f"{name!r} is not a client of this project; its clients are "
            f"{', '.join(project['clients']) or 'none'}."
        )
    identity = identity_of(project, name)
    project["clients"] = [other for other in project["clients"] if other != name]
    project["identities"] = {
        other: own for other, own in project.get("identities", {}).items() if other != name
    }
    project["revoked"] = [*project.get("revoked", []), identity]
    write_json(Path(folder) / "project.json", project)
    return identity


class Register:
    """Who may come in; follows the project's file while a server runs.

    Args:
        names: the clients that take part.
        folder: the project; None for clients whose identities are their names, for good.
    """

    def __init__(self, names: Iterable[str], folder: str | Path | None = None) -> None:
        self.names = tuple(names)
        self.path = None if folder is None else Path(folder) / "project.json"
        self.known = {name: name for name in self.names}
        self.revoked: frozenset[str] = frozenset()
        self._read_at: tuple[int, int] | None = None
        self._refresh()

    def look_up(self, identity: str) -> tuple[str | None, str]:
        """Return the client that has this identity now; or None, and why it is refused."""
        self._refresh()
        if identity in self.revoked:
            return None, f"the certificate of {identity} was withdrawn"
        name = self.known.get(identity)
        if name is None:
            return None, f"{identity} is not a client of this federation"
        return name, ""

    def _refresh(self) -> None:
        if self.path is None:
            return
        try:
            now = self.path.stat()
            mark = (now.st_mtime_ns, now.st_size)
            if mark == self._read_at:
                return
            project = read_json(self.path)
        except (OSError, RunFolderError):  # what was read before still holds
            return
        self._read_at = mark
        listed = set(project["clients"])
        self.known = {identity_of(project, n): n for n in self.names if n in listed}
        self.revoked = frozenset(project.get("revoked", []))
