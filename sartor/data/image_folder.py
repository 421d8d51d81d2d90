"""A folder of images: ``CLIENT/CLASS/IMAGE``, PNG or JPEG.

The names of the folders are those of the clients and of the classes; a client need not have all
classes. Pixels become numbers between 0 and 1, of shape ``(channels, height, width)``: one channel
if all images are grey, else three.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sartor.core.errors import FederationError, MissingExtraError
from sartor.data.checks import raise_faults, some

ENDINGS = (".png", ".jpg", ".jpeg")
GREY = ("1", "L")
"""Pillow's modes of images without colour."""

Size = int | tuple[int, int]


class Images(NamedTuple):
    """Images of all clients."""

    x: npt.NDArray[np.float32]  # (samples, channels, height, width), between 0 and 1
    y: npt.NDArray[np.str_]  # the names of the classes
    client: npt.NDArray[np.str_]  # the names of the clients


def has_images(folder: Path) -> bool:
    """Say whether a folder holds images of clients, well laid out or not."""
    return next(_images(folder), None) is not None


def read_images(folder: Path, size: Size | None = None) -> Images:
    """Read all images below a folder, or list every one that cannot be used.

    ``size`` is what they are brought to; without it they must have one size.
    """
    shape = _shape(size)
    files = list(_images(folder))
    raise_faults(_misplaced(folder, files))
    pictures, grey = _opened(folder, [file for _, file in files], shape)
    sizes = sorted({image.shape[:2] for image in pictures})
    if len(sizes) > 1:
        shown = some([f"{height} × {width}" for height, width in sizes], 3)
        raise FederationError(
            f"The images of {folder} have {len(sizes)} different sizes ({shown}); bring them to "
            f"one with image_size=, such as image_size={min(min(size) for size in sizes)}."
        )
    pixels = np.stack(pictures)
    pixels = pixels[..., :1] if grey else pixels
    return Images(
        np.ascontiguousarray(np.moveaxis(pixels, -1, 1), dtype=np.float32) / np.float32(255),
        np.array([file.parent.name for _, file in files]),
        np.array([client.name for client, _ in files]),
    )


def _shape(size: Size | None) -> tuple[int, int] | None:
    if size is None:
        return None
    pair = (size, size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2 or any(not isinstance(side, int) or side < 1 for side in pair):
        raise FederationError(
            f"image_size must be a number of pixels or (height, width), got {size!r}."
        )
    return pair


def _folders(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _images(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the folder of the client and the file of every image."""
    for client in _folders(folder):
        for file in sorted(client.rglob("[!.]*")):
            if file.suffix.lower() in ENDINGS and file.is_file():
                yield client, file


def _misplaced(folder: Path, files: Sequence[tuple[Path, Path]]) -> list[str]:
    """List images that are not in a class of a client, and clients without images."""
    faults = []
    wrong = [file for client, file in files if file.parent.parent != client]
    if wrong:
        faults.append(
            f"{len(wrong)} images do not lie in CLIENT/CLASS/, such as "
            f"{wrong[0].relative_to(folder)}; the folder around an image is its class, the one "
            "around that its client."
        )
    filled = {client for client, _ in files}
    faults += [
        f"Client {client.name} has no images; put some into {client.name}/CLASS/, or take its "
        "folder away."
        for client in _folders(folder)
        if client not in filled
    ]
    return faults


def _opened(
    folder: Path, files: Sequence[Path], shape: tuple[int, int] | None
) -> tuple[list[Any], bool]:
    """Return the images as ``(height, width, 3)`` bytes, and whether all of them are grey."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError(
            'Folders of images need Pillow; install it with: pip install "sartor[data]"'
        ) from error
    found, faults, grey = [], [], True
    for file in files:
        try:
            with Image.open(file) as picture:
                if picture.mode.startswith(("I", "F")):
                    raise ValueError(f"mode {picture.mode} has more than 8 bits; save it with 8")
                grey = grey and picture.mode in GREY
                image = picture.convert("RGB")
                if shape is not None:
                    image = image.resize(shape[::-1], Image.Resampling.BILINEAR)
                found.append(np.asarray(image))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            faults.append(f"Image {file.relative_to(folder)} cannot be read: {error}.")
    raise_faults(faults)
    return found, grey
