"""How alike a set of directions is: the generalised coherence estimate.

Gish and Cochran, "Generalized coherence", ICASSP 1988; Cochran, Gish and Sinno, "A geometric
approach to multiple-channel signal detection", IEEE Trans. Signal Processing 43(9), 1995.

==============  =====================================================================
symbol          meaning
==============  =====================================================================
v_1 … v_K       vectors of R^d, none of them zero (``vectors``)
Ĝ_ij            ⟨v_i, v_j⟩ / (‖v_i‖ ‖v_j‖), the matrix of cosines
GCE             1 − det Ĝ, in [0, 1] (``value``)
==============  =====================================================================

GCE is 0 for pairwise orthogonal vectors alone, 1 for linearly dependent ones (so always when
K > d), and cos² for two. Adding a vector never lowers it: compare values at equal K only. Applied
to the envelope gradients of personalised training, a smaller value means more diverse updates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sartor.core.errors import ConfigError

MOST_ELEMENTS = 100_000_000
"""Numbers up to which nearly dependent vectors are factorised themselves; beyond, their cosines."""

_CLEAR = 1e-4  # the least eigenvalue of the cosines from which their own digits suffice


class Coherence(NamedTuple):
    """The generalised coherence of some vectors."""

    value: float  # GCE; it saturates at 1 for many vectors, where the logarithm still distinguishes
    log_determinant: float  # log det Ĝ, at most 0, −∞ for dependent vectors
    number: int  # K, how many vectors were taken
    dropped: int  # zero vectors that were left out (a client that did not move)

    @property
    def log_determinant_per_vector(self) -> float:
        """The logarithm divided by K, which stays comparable in size when K is large."""
        return self.log_determinant / self.number if self.number else math.nan


def generalized_coherence(vectors: npt.ArrayLike | Tensor | Sequence[Tensor]) -> float:
    """Return GCE = 1 − det Ĝ of vectors (K, ...), as ``coherence`` does; NaN if all are zero.

    >>> round(generalized_coherence([[1.0, 0.0], [1.0, 1.0]]), 12)
    0.5
    """
    return coherence(vectors).value


def coherence(vectors: npt.ArrayLike | Tensor | Sequence[Tensor]) -> Coherence:
    """Return GCE with its log-determinant, and how many zero vectors were left out.

    With the Cholesky factor C of the cosines log det Ĝ = 2 Σ_k log C_kk, and GCE =
    −expm1(log det Ĝ), in float64, on the device that holds the vectors. Where vectors are nearly
    dependent, R of the QR decomposition takes the place of C: it never sees their squares.

    Args:
        vectors: (K, ...) one vector per row; further axes are flattened.

    Raises:
        ConfigError: there is no vector, or an entry is NaN or infinite.
    """
    rows = _rows(vectors)
    norms = torch.linalg.vector_norm(rows, dim=1)
    kept = norms > 0
    unit = rows[kept] / norms[kept, None]
    number, dropped = len(unit), len(rows) - len(unit)
    if not number:
        return Coherence(math.nan, math.nan, 0, dropped)
    log_determinant = _log_determinant(unit)
    return Coherence(-math.expm1(log_determinant), log_determinant, number, dropped)


def chance_coherence(number: int, dimension: int) -> float:
    """Return the mean GCE of ``number`` independent isotropic directions of R^dimension.

    The mean of det Ĝ is Π_{k=0}^{K−1} (1 − k/d); draw this line beside a curve of GCE.

    >>> round(chance_coherence(100, 7850), 3), chance_coherence(3, 2)
    (0.469, 1.0)
    """
    if number < 1 or dimension < 1:
        raise ConfigError(
            f"number and dimension must be at least 1, got {number} and {dimension}; give the "
            "number of vectors and of their entries."
        )
    if number > dimension:
        return 1.0
    return -math.expm1(float(np.log1p(-np.arange(number) / dimension).sum()))


def _rows(vectors: npt.ArrayLike | Tensor | Sequence[Tensor]) -> Tensor:
    if isinstance(vectors, list | tuple) and vectors and isinstance(vectors[0], Tensor):
        vectors = torch.stack(list(vectors))
    if not isinstance(vectors, Tensor):
        vectors = torch.from_numpy(np.array(vectors, dtype=np.float64))
    found = vectors.detach().double()
    if found.dim() < 2 or not found.numel():
        raise ConfigError(
            f"coherence needs one vector per row, got shape {tuple(found.shape)}; stack K vectors "
            "of d entries to (K, d)."
        )
    found = found.flatten(1)
    bad = torch.nonzero(~found.isfinite().all(1))[:, 0].tolist()
    if bad:
        raise ConfigError(
            f"vector {bad[0]} has an entry that is NaN or infinite ({len(bad)} of {len(found)} "
            "vectors have); leave diverged clients out."
        )
    return found


def _log_determinant(unit: Tensor) -> float:
    """Return log det of the Gram matrix of unit rows, at most 0."""
    number, dimension = unit.shape
    if number > dimension:
        return -math.inf
    cosines = unit @ unit.T
    if float(torch.linalg.eigvalsh(cosines)[0]) > _CLEAR:
        return min(0.0, 2 * float(torch.linalg.cholesky(cosines).diagonal().log().sum()))
    if unit.numel() <= MOST_ELEMENTS:
        diagonal = torch.linalg.qr(unit.T, mode="r")[1].diagonal().abs()
        # A pivot at rounding level is a dependent vector.
        if float(diagonal.min()) <= dimension * torch.finfo(torch.float64).eps:
            return -math.inf
        return min(0.0, 2 * float(diagonal.log().sum()))
    sign, value = torch.linalg.slogdet(cosines)
    return min(0.0, float(value)) if sign > 0 else -math.inf
