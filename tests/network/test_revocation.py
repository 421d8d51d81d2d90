"""Withdrawn certificates: identities are never given twice, and a server sees the list change."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from sartor.cli import main
from sartor.core.errors import ConfigError
from sartor.network.keys import read_kit
from sartor.network.revocation import Register, identity_of, new_identity, revoke_client
from sartor.runs.storage import read_json, write_json


@pytest.fixture
def project(tmp_path: Path) -> Path:
    content: dict[str, Any] = {"name": "p", "host": "fl.example.org", "port": 1, "days": 365}
    content["clients"] = ["north", "south"]
    write_json(tmp_path / "project.json", content)
    return tmp_path


def read(project: Path) -> dict[str, Any]:
    return dict(read_json(project / "project.json"))


def enter(project: Path, name: str) -> str:
    """Do what a new kit does to the list."""
    content = read(project)
    identity = new_identity(content, name)
    content["clients"] = [*content["clients"], name]
    content["identities"] = {**content.get("identities", {}), name: identity}
    write_json(project / "project.json", content)
    return identity


def test_an_identity_is_never_given_again(project: Path) -> None:
    """Not to its client, and not to another one of that very name."""
    assert new_identity(read(project), "north") == "north"  # a certificate that ended is renewed
    assert revoke_client(project, "north") == "north"
    assert read(project)["clients"] == ["south"]
    assert enter(project, "north") == "north-2"
    assert new_identity(read(project), "north") == "north-2"
    assert enter(project, "north-2") == "north-2-2"
    assert revoke_client(project, "north") == "north-2"
    assert read(project)["revoked"] == ["north", "north-2"]
    assert enter(project, "north") == "north-3"
    assert identity_of(read(project), "south") == "south"


def test_a_register_follows_the_list_while_a_server_runs(project: Path) -> None:
    register = Register(["north", "south"], project)
    assert register.look_up("north") == ("north", "")
    assert main(["keys", "revoke", "north", "--keys", str(project)]) == 0
    assert register.look_up("north") == (None, "the certificate of north was withdrawn")
    assert register.look_up("south") == ("south", "")
    enter(project, "north")
    assert register.look_up("north-2") == ("north", "")
    assert register.look_up("north")[0] is None
    enter(project, "east")  # the federation was begun without it
    assert register.look_up("east") == (None, "east is not a client of this federation")
    (project / "project.json").write_text("{")  # damaged: what was known before still holds
    assert register.look_up("north")[0] is None
    assert register.look_up("south")[0] == "south"


def test_a_register_without_a_project_knows_names_alone() -> None:
    register = Register(["north"])
    assert register.look_up("north") == ("north", "")
    assert register.look_up("south")[0] is None


def test_only_clients_can_be_revoked(project: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a client of this project"):
        revoke_client(project, "west")
    with pytest.raises(ConfigError, match="holds no keys"):
        revoke_client(tmp_path / "nowhere", "north")


def test_without_the_packages_of_the_network_the_extra_is_named(
    project: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each command that makes keys says what to install, and is no bug; revoking needs nothing."""
    for name in ("cryptography", "nvflare"):
        monkeypatch.setitem(sys.modules, name, None)
    for words in (
        ["init", "localhost:1", "north", "--keys", str(tmp_path / "new")],
        ["request", "north", "--folder", str(tmp_path / "home")],
        ["client", "west", "--keys", str(project)],
    ):
        assert main(["keys", *words]) == 2
        assert "pip install 'sartor[network]'" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert read(project)["clients"] == ["north", "south"]
    assert main(["keys", "revoke", "north", "--keys", str(project)]) == 0


def test_a_kit_that_is_not_whole_is_told(tmp_path: Path) -> None:
    """No kit.json, half of one, and one without its certificate."""
    with pytest.raises(ConfigError, match=r"has no kit\.json"):
        read_kit(tmp_path)
    write_json(tmp_path / "kit.json", {"name": "north", "host": "fl.example.org"})
    with pytest.raises(ConfigError, match=r"kit\.json is not whole .*for the kit again"):
        read_kit(tmp_path)
    whole = {"name": "north", "project": "p", "host": "fl.example.org", "port": 8002}
    write_json(tmp_path / "kit.json", whole)
    with pytest.raises(ConfigError, match=r"lacks rootCA\.pem, client\.crt, client\.key"):
        read_kit(tmp_path)
