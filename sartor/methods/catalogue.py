"""The list of methods: an explicit dict, name -> entry. One file per method; no import tricks."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from sartor.core.errors import ConfigError, did_you_mean
from sartor.core.hyper import Hyper
from sartor.core.local import Local
from sartor.core.method import Method
from sartor.core.task import Task
from sartor.methods.apfl import apfl
from sartor.methods.apple import apple
from sartor.methods.auto import auto
from sartor.methods.dbe import dbe
from sartor.methods.dichotomous import dichotomous
from sartor.methods.ditto import ditto
from sartor.methods.evidence import evidence
from sartor.methods.fedala import fedala
from sartor.methods.fedamp import fedamp, heur_fedamp
from sartor.methods.fedapa import fedapa
from sartor.methods.fedavg import fedavg, fedavg_ft
from sartor.methods.fedbabu import fedbabu
from sartor.methods.fedbn import fedbn
from sartor.methods.fedem import fedem
from sartor.methods.fedfomo import fedfomo
from sartor.methods.fedgh import fedgh
from sartor.methods.fedpac import fedpac
from sartor.methods.fedper import fedper
from sartor.methods.fedphp import fedphp
from sartor.methods.fedproto import fedproto
from sartor.methods.fedprox import fedprox
from sartor.methods.fedprox_two_stage import fedprox_two_stage
from sartor.methods.fedrep import fedrep
from sartor.methods.fedrod import fedrod
from sartor.methods.l2gd import l2gd
from sartor.methods.lg_fedavg import lg_fedavg
from sartor.methods.local import local
from sartor.methods.moon import moon
from sartor.methods.options import static_options
from sartor.methods.per_fedavg import per_fedavg
from sartor.methods.pfedbayes import pfedbayes
from sartor.methods.pfedbred import pfedbred
from sartor.methods.pfedhn import pfedhn
from sartor.methods.pfedla import pfedla
from sartor.methods.pfedme import pfedme
from sartor.methods.scaffold import scaffold

PAPERS = {
    "Yu": "Yu, He, Sun, Xue, Li, The Effect of Personalization in FedProx, 2024 (two versions)",
    "Chen": "Chen, Zheng, Long, Su, Minimax Estimation for Personalized FL, JMLR 2023",
    "FedAPA": "Sun, Sun, Pan, Fu, Guo, FedAPA, IJCAI 2025",
    "PRIOR": "Shi et al., PRIOR: Personalized Prior, NeurIPS 2023",
}
"""The papers that Sartor reproduces, by the short name of its lists."""

STUDIED = {
    "Yu": "local fedavg fedprox dichotomous ditto pfedme l2gd",
    "Chen": "local fedavg fedavg-ft fedprox-two-stage dichotomous l2gd",
    "FedAPA": "fedavg fedapa fedamp fedala fedphp apple dbe fedproto fedgh pfedhn pfedla fedpac",
    "PRIOR": "fedavg fedavg-ft ditto per-fedavg pfedme pfedbred fedamp fedfomo fedem pfedbayes "
    "pfedhn fedpac",
}
"""The methods that each of the papers in :data:`PAPERS` compares."""

Factory = Callable[..., Method]


@dataclass(frozen=True)
class MethodEntry:
    """A method as it is listed.

    Attributes:
        factory: ``(task, local, *, options) -> Method``.
        summary: one line.
        citation: where it comes from.
        travels: what goes over the wire, per round and participant.
        family: "baseline", "regularised" or "collaborative"; ``compare`` takes ``all-FAMILY``.
        papers: in which of the papers that Sartor reproduces it appears; see :data:`PAPERS`.
        small: whether it takes models of few parameters only, such as linear ones.
    """

    factory: Factory
    summary: str
    citation: str
    travels: str
    family: str = "own"
    papers: tuple[str, ...] = ()
    small: bool = False

    @property
    def options(self) -> dict[str, tuple[Any, Any]]:
        """The static options: name -> (default, allowed values or type)."""
        return static_options(self.factory)

    @property
    def hyper(self) -> dict[str, Hyper]:
        """The sweepable hyper-parameters with default options and plain SGD."""
        return self.factory(Task(nn.Linear(1, 1)), Local()).hyper


_BASELINE = {
    "local": MethodEntry(
        local,
        "every client alone; the floor",
        "folklore; LocalTrain of Yu et al. 2024, PureLocalTraining of Chen et al. 2021",
        "nothing",
    ),
    "fedavg": MethodEntry(
        fedavg,
        "one model for all, averaged",
        "McMahan et al., AISTATS 2017",
        "model down, model up",
    ),
    "fedavg-ft": MethodEntry(
        fedavg_ft,
        "FedAvg, then each client fine-tunes its copy",
        "folklore; Chen et al. 2021, section 3.3",
        "model down, model up",
    ),
}
_REGULARISED = {
    "evidence": MethodEntry(
        evidence,
        "FedProx with a pull for each coordinate, learned from all; exact solves, no rates",
        "ours; evidence as of MacKay, Neural Computation 1992",
        "priors down, sums up: for each prior a number for each parameter and each pair of them",
        small=True,
    ),
    "fedprox": MethodEntry(
        fedprox,
        "own models, pulled towards a global one with strength λ",
        "Yu et al., The Effect of Personalization in FedProx, 2024",
        "model down, gradient of the pull up",
    ),
    "fedprox-two-stage": MethodEntry(
        fedprox_two_stage,
        "FedProx, and a last local stage around the final global model",
        "Chen et al., Minimax Estimation for Personalized FL, JMLR 2023",
        "model down, model up",
    ),
    "dichotomous": MethodEntry(
        dichotomous,
        "FedAvg or local, whichever does better on held-out samples",
        "Chen et al., Minimax Estimation for Personalized FL, JMLR 2023, section 3.3",
        "model down, model up; two scores up once",
    ),
    "ditto": MethodEntry(
        ditto,
        "FedAvg, and beside it own models pulled towards its model",
        "Li et al., Ditto, ICML 2021",
        "model down, model up",
    ),
    "per-fedavg": MethodEntry(
        per_fedavg,
        "a start from which one local step gives a good model",
        "Fallah et al., NeurIPS 2020",
        "model down, model up",
    ),
    "pfedme": MethodEntry(
        pfedme,
        "own proximal points; the global model follows them",
        "T. Dinh et al., NeurIPS 2020",
        "model down, model up",
    ),
    "pfedbred": MethodEntry(
        pfedbred,
        "pFedMe around a centre of one's own, in Bregman distance",
        "Shi et al., PRIOR, NeurIPS 2023",
        "model down, model up",
    ),
    "l2gd": MethodEntry(
        l2gd,
        "a coin: local gradient steps, or a step towards the average",
        "Hanzely, Richtárik, Federated Learning of a Mixture of Global and Local Models, 2020",
        "average down, model up",
    ),
}
_COLLABORATIVE = {
    "fedapa": MethodEntry(
        fedapa,
        "own mixture of all extractors, learnt by the server",
        "Sun et al., FedAPA, IJCAI 2025",
        "extractor down, extractor up",
    ),
    "fedamp": MethodEntry(
        fedamp,
        "own models, pulled to a mixture of the nearest ones",
        "Huang et al., FedAMP, AAAI 2021",
        "mixture down, model up",
    ),
    "heur-fedamp": MethodEntry(
        heur_fedamp,
        "FedAMP by the angle between models, for deep networks",
        "Huang et al., FedAMP, AAAI 2021",
        "mixture down, model up",
    ),
    "fedala": MethodEntry(
        fedala,
        "FedAvg; each client learns how much of its top to take",
        "Zhang et al., FedALA, AAAI 2023",
        "model down, model up",
    ),
    "fedphp": MethodEntry(
        fedphp,
        "FedAvg, taught by an average of one's own past models",
        "Li et al., FedPHP, ECML-PKDD 2021",
        "model down, model up",
    ),
    "apple": MethodEntry(
        apple,
        "own mixture of all published cores, learnt by the client",
        "Luo, Wu, APPLE, IJCAI 2022",
        "all cores down, own core up",
    ),
    "fedfomo": MethodEntry(
        fedfomo,
        "a few others' models, weighted by how much they would help",
        "Zhang et al., FedFomo, ICLR 2021",
        "a few models down, model and a few scores up",
    ),
    "dbe": MethodEntry(
        dbe,
        "FedAvg with a private shift of the features",
        "Zhang et al., Eliminating Domain Bias for FL, NeurIPS 2023",
        "model and mean feature down, model up; mean feature up once",
    ),
    "fedproto": MethodEntry(
        fedproto,
        "own models that share the mean feature of every class",
        "Tan et al., FedProto, AAAI 2022",
        "prototypes down, prototypes up",
    ),
    "fedgh": MethodEntry(
        fedgh,
        "own extractors, one head trained by the server",
        "Yi et al., FedGH, ACM MM 2023",
        "head down, mean feature of every class up",
    ),
    "fedper": MethodEntry(
        fedper,
        "averaged body under private heads, trained together",
        "Arivazhagan et al., Federated Learning with Personalization Layers, 2019",
        "body down, body up",
    ),
    "fedrep": MethodEntry(
        fedrep,
        "private heads fitted first, then one step of the common body",
        "Collins et al., Exploiting Shared Representations for Personalized FL, ICML 2021",
        "body down, body up",
    ),
    "fedbabu": MethodEntry(
        fedbabu,
        "common body under a fixed random head, then fine-tuning",
        "Oh et al., FedBABU, ICLR 2022",
        "body down, body up",
    ),
    "lg-fedavg": MethodEntry(
        lg_fedavg,
        "own lower layers under an averaged head",
        "Liang et al., Think Locally, Act Globally, 2020",
        "head down, head up",
    ),
    "fedrod": MethodEntry(
        fedrod,
        "a class-balanced generic head, and a personal one on top",
        "Chen et al., On Bridging Generic and Personalized FL, ICLR 2022",
        "model down, model up",
    ),
    "moon": MethodEntry(
        moon,
        "FedAvg with features pulled to the global model's",
        "Li et al., Model-Contrastive Federated Learning, CVPR 2021",
        "model down, model up",
    ),
    "fedbn": MethodEntry(
        fedbn,
        "FedAvg with normalisation layers that stay at home",
        "Li et al., FedBN, ICLR 2021",
        "all but normalisation layers, down and up",
    ),
    "fedem": MethodEntry(
        fedem,
        "own mixture of a few shared models' predictions",
        "Marfoq et al., FedEM, NeurIPS 2021",
        "all components down, all components up",
    ),
    "pfedbayes": MethodEntry(
        pfedbayes,
        "own Gaussian weights, kept near a global distribution",
        "Zhang et al., pFedBayes, ICML 2022",
        "means and spreads down, means and spreads up",
    ),
    "apfl": MethodEntry(
        apfl,
        "own model mixed with the global one, in a learnt share",
        "Deng et al., Adaptive Personalized Federated Learning, 2020",
        "model down, model up",
    ),
    "scaffold": MethodEntry(
        scaffold,
        "FedAvg with local steps corrected for client drift",
        "Karimireddy et al., SCAFFOLD, ICML 2020",
        "model and control down, model and change of control up",
    ),
    "pfedhn": MethodEntry(
        pfedhn,
        "own models, generated by a hypernetwork on the server",
        "Shamsian et al., Personalized FL using Hypernetworks, ICML 2021",
        "model down, model up",
    ),
    "pfedla": MethodEntry(
        pfedla,
        "own mixture of all models, layer by layer",
        "Ma et al., Layer-wised Model Aggregation (pFedLA), CVPR 2022",
        "model down, model up",
    ),
    "fedpac": MethodEntry(
        fedpac,
        "shared extractor aligned by class; heads help each other",
        "Xu et al., FedPAC, ICLR 2023",
        "model and centroids down, model and class statistics up",
    ),
}

METHODS: dict[str, MethodEntry] = {
    name: replace(
        entry, family=family, papers=tuple(p for p in PAPERS if name in STUDIED[p].split())
    )
    for family, entries in (
        ("baseline", _BASELINE),
        ("regularised", _REGULARISED),
        ("collaborative", _COLLABORATIVE),
    )
    for name, entry in entries.items()
}
"""Every method by its name, in the order of the lists."""


AUTO = MethodEntry(
    auto,
    "a few methods, stacked with weights of each client; chooses all its numbers itself",
    "ours; stacking as of Wolpert, Neural Networks 1992",
    "what its parts send, and what they send in the trials before",
    family="chosen",
)
"""Not a method but a stack of some, which ``fit`` chooses; so it stands in no list of methods."""

KNOWN: Mapping[str, MethodEntry] = ChainMap({"auto": AUTO}, METHODS)
"""Everything that ``fit`` takes by name."""


def find(method: str | Factory) -> Factory:
    """Return the factory of a name, or the factory itself."""
    if not isinstance(method, str):
        return method
    if method not in KNOWN:
        raise ConfigError(f"Unknown method {method!r}{did_you_mean(method, KNOWN)}")
    return KNOWN[method].factory


def expand(names: Sequence[str]) -> list[str]:
    """Replace ``all`` and ``all-FAMILY`` by the methods they stand for; each once.

    Methods for small models alone are in no group; they are called by their names.

    >>> expand(["local", "all-baseline"])
    ['local', 'fedavg', 'fedavg-ft']
    """
    listed = {name: entry for name, entry in METHODS.items() if not entry.small}
    families = dict.fromkeys(entry.family for entry in listed.values())
    groups = {f"all-{f}": [k for k, e in listed.items() if e.family == f] for f in families}
    groups["all"] = list(listed)
    for name in names:
        if name.startswith("all") and name not in groups and name not in METHODS:
            raise ConfigError(f"Unknown group of methods {name!r}{did_you_mean(name, groups)}")
    return list(dict.fromkeys(one for name in names for one in groups.get(name, [name])))
