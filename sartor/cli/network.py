"""Federations over a network: ``sartor keys``, ``serve``, ``join`` and ``status``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from sartor import methods
from sartor.cli import show
from sartor.cli.config import Experiment, build, parse_names
from sartor.cli.flags import argument, option, read_experiment
from sartor.cli.interruption import Interrupted, stoppable
from sartor.cli.settings import check_names, local_of, model_of, settings_of
from sartor.core.cohort import Participation
from sartor.core.errors import ConfigError
from sartor.data.federation import Federation
from sartor.results.scores import Run
from sartor.runs.storage import read_json
from sartor.training.open_ended import FIXED
from sartor.training.progress import reporter
from sartor.training.schema import parse_device, settings_on
from sartor.training.settings import list_runs, make_task, with_static_parts

keys_app = typer.Typer(
    help="Make, renew and withdraw the keys of a federation.", no_args_is_help=True
)

Keys = Annotated[Path, option("The project's keys.", "FOLDER", "--keys")]


@keys_app.command("init")
def keys_init(
    address: Annotated[str, argument("Address of the server.", "HOST:PORT")],
    clients: Annotated[str, argument("Clients, with commas.", "NAMES")],
    keys: Keys = Path("keys"),
    days: Annotated[int, option("How long they are valid.", "D", min=1)] = 365,
) -> None:
    """Make the keys of a project: an authority, a server, and a kit for every client."""
    from sartor.network.keys import init_project

    names = parse_names(clients)
    init_project(keys, address=address, clients=names, days=days)
    show.say(f"The keys are in {keys}. Give each client its kit, and nothing else:")
    for name in names:
        show.say(f"  {keys / 'clients' / name}")
    show.say(f"Then: sartor serve experiment.toml --keys {keys}")


@keys_app.command("client")
def keys_client(
    name: Annotated[str, argument("The client.", "NAME")],
    request: Annotated[
        Path | None, option("Its request, if it keeps its private key.", "FILE")
    ] = None,
    keys: Keys = Path("keys"),
    days: Annotated[int | None, option("How long it is valid.", "D", min=1)] = None,
) -> None:
    """Make the kit of one more client, or renew one."""
    from sartor.network.keys import add_client

    show.say(f"The kit of {name} is in {add_client(keys, name, request=request, days=days)}.")


@keys_app.command("request")
def keys_request(
    name: Annotated[str, argument("The client: you.", "NAME")],
    folder: Annotated[Path, option("Where the key stays.", "FOLDER")],
) -> None:
    """Make a private key that stays here, and a request to have it certified."""
    from sartor.network.keys import make_request

    path = make_request(folder, name)
    show.say(f"Send {path} to whoever keeps the project's keys; client.key stays in {folder}.")
    show.say(f"Put what comes back (kit.json, client.crt, rootCA.pem) into {folder}.")


@keys_app.command("revoke")
def keys_revoke(
    name: Annotated[str, argument("The client.", "NAME")], keys: Keys = Path("keys")
) -> None:
    """Withdraw the certificate of a client; a running server refuses it at its next call."""
    from sartor.network.revocation import revoke_client

    revoke_client(keys, name)
    show.say(f"The certificate of {name} is withdrawn; servers with {keys} refuse it from now on.")
    show.say(f"A new kit, if it is to come back: sartor keys client {name} --keys {keys}")


@keys_app.command("show")
def keys_show(keys: Keys = Path("keys")) -> None:
    """List the server and the clients of a project, and when their certificates end."""
    from sartor.network.keys import read_project

    project = read_project(keys)
    show.say(f"{project['name']} at {project['host']}:{project['port']}")
    for name, end in project["expires"].items():
        until = "kit not here" if end is None else f"until {end:%Y-%m-%d}"
        identity = project["identities"].get(name)
        show.say(f"  {name:<20} {until}" + (f", as {identity}" if identity else ""))
    if project["revoked"]:
        show.say(f"withdrawn: {', '.join(project['revoked'])}")


def serve(
    target: Annotated[str, argument("An experiment file, or a method.", "FILE|METHOD")],
    keys: Keys = Path("keys"),
    out: Annotated[Path | None, option("Run folder.", "FOLDER")] = None,
    quorum: Annotated[int | None, option("Clients for the first round; all.", "N", min=1)] = None,
    deadline: Annotated[float, option("Seconds a client has for a round.", "S", min=0.1)] = 60.0,
    patience: Annotated[float, option("Seconds to wait for clients.", "S", min=1.0)] = 3600.0,
    max_norm: Annotated[float | None, option("Largest norm of an upload.", "X")] = None,
    newcomers: Annotated[
        str | None, option("After training: give these clients models.", "NAMES")
    ] = None,
    newcomer_rounds: Annotated[int, option("Rounds of the newcomers' local work.", "T", min=0)] = 5,
    host: Annotated[str, option("Address to listen on.", "HOST")] = "0.0.0.0",
    json: Annotated[bool, option("Machine-readable last line.", None, "--json")] = False,
) -> None:
    """Run the server of a federation over a network."""
    from sartor.network.admission import Admission
    from sartor.network.flare_server import FlareServer
    from sartor.network.keys import read_kit, read_project
    from sartor.network.newcomers import serve_newcomers
    from sartor.network.serve import clients_of
    from sartor.network.serve import serve as run_server

    experiment = read_experiment(target, {}, many=False)
    check_names(experiment)
    job = job_of(experiment)
    folder = out or experiment.out or Path("runs") / f"{experiment.method}-network"
    listed = read_project(keys)["clients"]
    late = parse_names(newcomers or "")
    if unlisted := sorted(set(late) - set(listed)):
        raise ConfigError(
            f"No kit was made for {', '.join(unlisted)}; make one with sartor keys client NAME."
        )
    names = late or clients_of(folder, listed, show.note)
    transport = FlareServer(read_kit(keys / "server"), names, host, project=keys)
    word = "stopped"
    again = f"sartor serve {target} --keys {keys} --out {folder}"
    try:
        with stoppable(f"Stopped; resume with: {again}"):
            work = partial(serve_newcomers, rounds=newcomer_rounds)
            if not late:
                work = partial(run_server, quorum=quorum, admission=Admission(max_norm=max_norm))
            result = work(
                job,
                transport,
                names,
                folder,
                deadline=deadline,
                patience=patience,
                progress=reporter(plain=json),
                say=show.note,
            )
            word = "done"
    finally:
        transport.close(word)
    events = result.config["network"]["events"]
    for event in events[-10:]:
        show.note(f"round {event['round'] + 1}, {event['client']}: {event['why']}")
    if json:
        summary = result.summary()
        reported = {key: summary[key] for key in ("accuracy", "measure", "pooled_measure")}
        show.json_line({"out": folder, **reported, "events": len(events)})
    else:
        value = result.headline_metric.text(result.pooled_measure())
        show.say(f"{result.headline_metric.title} of all test samples: {value}")
        show.say(f"Everything is in {folder}.")


def join(
    kit: Annotated[Path, argument("The kit that you were given.", "KIT")],
    data: Annotated[Path, option("Folder with your file.", "FOLDER")],
    state: Annotated[Path | None, option("Where private states and models go.", "FOLDER")] = None,
    label: Annotated[str | None, option("The column that holds the label.", "NAME")] = None,
    device: Annotated[str, option("auto, cpu, cuda.", "NAME")] = "auto",
    patience: Annotated[float, option("Seconds to wait for the server.", "S", min=1.0)] = 3600.0,
) -> None:
    """Join such a federation as a client; your data stays with you."""
    from sartor.network.client import Client
    from sartor.network.flare_client import FlareClient
    from sartor.network.keys import read_kit

    own = read_kit(kit)

    def load(split: Mapping[str, Any]) -> Any:
        return own_data(data, own.name, label, split)

    def say(text: str) -> None:
        show.note(f"{time.strftime('%H:%M:%S')} {own.name}: {text}")

    load({})  # what cannot be read is reported at once
    folder = state or Path(f"sartor-{own.name}")
    client = Client(load, built, folder, parse_device(device), say)
    end = FlareClient(own, client.answer, say, patience)
    say(f"connecting to {own.host}:{own.port}")
    try:
        with stoppable(f"Stopped; come back with: sartor join {kit} --data {data}"):
            word = end.run()
    except Interrupted:
        end.stopped.set()
        raise
    if word == "done":
        show.say(f"Training is over. Your model and your states are in {folder}.")
    else:
        show.say("The server has stopped; start this again when it comes back.")


def status(
    folder: Annotated[Path, argument("The server's run folder.", "FOLDER")],
    json: Annotated[bool, option("Machine-readable.", None, "--json")] = False,
) -> None:
    """Show the progress of a server, its clients, and what went wrong."""
    if not (folder / "status.json").is_file():
        raise ConfigError(
            f"{folder} has no status.json, which a server writes as soon as it runs; give the "
            "--out of sartor serve (else it is runs/METHOD-network)."
        )
    found = read_json(folder / "status.json")
    if json:
        show.json_line(found)
        return
    show.say(f"{found['method']}: {_doing(found)}")
    show.say(f"last sign of life {time.time() - found['time']:.0f} s ago")
    show.say(f"there: {', '.join(found['there']) or 'nobody'}")
    if missing := sorted(set(found["clients"]) - set(found["there"])):
        show.say(f"missing: {', '.join(missing)}")
    for event in found["events"]:
        show.say(f"  round {event['round'] + 1}, {event['client']}: {event['why']}")


def _doing(found: Mapping[str, Any]) -> str:
    """Say what a server does, from its status."""
    how_far = f"round {found['round']} of {found['rounds']}"
    count = f"{len(found['there'])} of {found.get('wanted')} are there"
    if found.get("newcomers"):
        words = {
            "waiting": "waiting for newcomers",
            "training": "serving newcomers",
            "done": "newcomers served",
            "stopped": "stopped while it served newcomers",
        }
        rest = count if found["state"] == "waiting" else how_far
        return f"training is done; {words[found['state']]}, {rest}"
    if found["state"] == "waiting":
        whom = f"clients, to resume after {how_far}" if found["round"] else "its first clients"
        return f"waiting for {whom}; {count}"
    return f"{found['state']}, {how_far}"


def job_of(experiment: Experiment) -> Any:
    """Return what a server trains, from a checked experiment."""
    from sartor.network.serve import Job

    if not experiment.is_single:
        raise ConfigError(
            "sartor serve trains one method with one seed and no sweep; choose them with sartor "
            "compare on data of your own first."
        )
    chosen = settings_of(experiment, experiment.method)
    if experiment.do_no_harm and chosen["options"].get("harm_on", "auto") == "auto":
        raise ConfigError(
            "do_no_harm over a network needs harm_on: the server cannot see whether every client "
            "has validation data. Add harm_on = 'holdout' or 'validation' under [set]."
        )

    if chosen["options"].get("class_weights") == "balanced":
        raise ConfigError(
            "Balanced class weights follow from each client's samples, which the server does not "
            "see; give a number for every class: --class-weights 1,3."
        )

    def run_of(method: Any) -> Run:
        return list_runs(method, chosen["options"], chosen["hyper"], {}, (experiment.seed,))[0]

    known, kept = settings_on("fit"), settings_on("file", "server")
    rounds = experiment.rounds or FIXED
    stored = {k: v for k, v in experiment.stored().items() if k not in kept}
    # Clients do not know the rounds, which a schedule may have left open.
    stored["lr_schedule"] = local_of(experiment).over(rounds).lr_schedule
    return Job(
        settings=stored,
        build=built,
        run_of=run_of,
        split={"seed": experiment.seed, "test": experiment.test, "val": experiment.val},
        rounds=rounds,
        participation=Participation.parse(experiment.participation),
        points=known["points"].read(experiment.points),
        eval_every=experiment.eval_every,
        checkpoint_every=experiment.checkpoint_every,
        dtype=known["dtype"].read(experiment.dtype),
        device=parse_device(experiment.device),
    )


def built(settings: Mapping[str, Any], data: Any) -> Any:
    """Build method and task from the settings of an experiment; the same on both sides."""
    experiment = build(dict(settings))
    chosen = settings_of(experiment, experiment.method)
    local = with_static_parts(local_of(experiment), chosen["hyper"], {})
    compute = settings_on("fit")["compute"].read(experiment.compute)
    task = make_task(model_of(experiment, data), data, compute, experiment.measure)
    return methods.build(experiment.method, task, local, cast(Any, chosen["options"])), task


def own_data(folder: Path, name: str, label: str | None, split: Mapping[str, Any]) -> Any:
    """Read the file of one client: the one of its name, or the only one in the folder."""
    words = {k: v for k, v in split.items() if k in ("seed", "test", "val")}
    found = Federation.from_folder(folder, label=label, **words)
    if name in found.names:
        others = [other for other in found.names if other != name]
        return found.without(*others) if others else found
    if len(found.names) > 1:
        raise ConfigError(
            f"{folder} holds the files of {', '.join(found.names[:5])}; name one of them after "
            f"this client, {name}, or give a folder with one file."
        )
    return found
