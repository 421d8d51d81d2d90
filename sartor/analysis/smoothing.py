"""Smoothing for pictures: the filter of Savitzky and Golay.

Savitzky and Golay, "Smoothing and differentiation of data by simplified least squares procedures",
Analytical Chemistry 36(8), 1964.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sartor.core.errors import ConfigError
from sartor.results.metrics import Array


def savitzky_golay(series: npt.ArrayLike, window: int = 11, degree: int = 3) -> Array:
    """Return the series smoothed by a polynomial fitted in a window around every point.

    With the window's places x = −h … h (h = (window − 1)/2) and V their Vandermonde matrix
    V_kj = x_k^j, j ≤ degree, the smoothed value is the fit at 0, row 0 of V⁺ = (VᵀV)⁻¹Vᵀ applied
    to the window. The first and last h points take the fit of the first and last window. A
    polynomial of at most ``degree`` comes back as it was. Smooth for the eye; keep raw values.

    Args:
        series: (..., n) values; the last axis is smoothed.
        window: odd number of points; at most n.
        degree: of the polynomial, below ``window``.

    Raises:
        ConfigError: a window or degree that cannot be.

    >>> savitzky_golay([1, 2, 5, 10, 17], window=3, degree=2).round(9).tolist()
    [1.0, 2.0, 5.0, 10.0, 17.0]
    """
    values = np.asarray(series, dtype=np.float64)
    length = values.shape[-1] if values.ndim else 0
    faults = []
    if window < 1 or window % 2 == 0:
        faults.append(f"window must be odd and positive, got {window}")
    if window > length:
        faults.append(f"window {window} is longer than the series of {length}")
    if not 0 <= degree < max(window, 1):
        faults.append(f"degree must be in 0 .. {window - 1}, below the window, got {degree}")
    if faults:
        raise ConfigError(f"Cannot smooth: {'; '.join(faults)}. window=5, degree=2 is a mild one.")
    half = window // 2
    places = np.arange(-half, half + 1, dtype=np.float64) / max(half, 1)
    powers = places[:, None] ** np.arange(degree + 1)
    fit = powers @ np.linalg.pinv(powers)  # (window, window): the fitted values of a window
    smooth = np.empty_like(values)
    windows = np.lib.stride_tricks.sliding_window_view(values, window, axis=-1)
    smooth[..., half : length - half] = windows @ fit[half]
    smooth[..., :half] = values[..., :window] @ fit[:half].T
    smooth[..., length - half :] = values[..., length - window :] @ fit[half + 1 :].T
    return smooth
