"""Images in folders named after their classes, as ImageNet (ILSVRC 2012) is commonly unpacked.

    root/train/<class>/*.JPEG
    root/val/<class>/*.JPEG

Classes are numbered in the order of their sorted names. Deterministic, the way ImageNet is
evaluated (Krizhevsky et al., 2012): shorter side to 256/224 of the image size, centre crop,
channels normalised. No augmentation: each sample is a function of its index alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from testbed.base.errors import Unavailable, UsageError
from testbed.workloads.samples import Batch

_SUFFIXES = {".jpeg", ".jpg", ".png", ".bmp", ".ppm", ".webp"}
_MEAN = (0.485, 0.456, 0.406)  # per channel, of ImageNet's training images in 0 .. 1
_STD = (0.229, 0.224, 0.225)


class ImageFolder:
    """Image files and their classes; each file is opened when its sample is asked for."""

    def __init__(self, files: Sequence[tuple[Path, int]], image_size: int) -> None:
        self.files = tuple(files)
        self.image_size = image_size
        self._pil = _import_pil()
        self._mean = torch.tensor(_MEAN, device="cpu").view(3, 1, 1)
        self._std = torch.tensor(_STD, device="cpu").view(3, 1, 1)

    def __len__(self) -> int:
        return len(self.files)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Normalised images [B, 3, S, S] and classes [B]."""
        chosen = [self.files[int(i)] for i in indices]
        images = torch.stack([self._read(path) for path, _ in chosen])
        return images, torch.tensor([class_ for _, class_ in chosen], device="cpu")

    def _read(self, path: Path) -> torch.Tensor:
        try:
            with self._pil.open(path) as image:
                pixels = centre_crop(image.convert("RGB"), self.image_size)
        except OSError as error:
            raise UsageError(
                f"'{path}' cannot be read as an image ({error}); remove or replace the file"
            ) from error
        tensor = torch.from_numpy(np.array(pixels)).permute(2, 0, 1).float().div_(255)
        return (tensor - self._mean) / self._std


def centre_crop(image: Any, image_size: int) -> Any:
    """A PIL image, its shorter side scaled to 256/224 of the size, cut to the middle square."""
    shorter = round(image_size * 256 / 224)
    scale = shorter / min(image.size)
    width, height = (max(shorter, round(side * scale)) for side in image.size)
    left, top = (width - image_size) // 2, (height - image_size) // 2
    scaled = image.resize((width, height), resample=2)  # 2: bilinear
    return scaled.crop((left, top, left + image_size, top + image_size))


def load_image_folder(
    root: Path, image_size: int = 224, num_classes: int = 1000
) -> tuple[ImageFolder, ImageFolder]:
    """Training and test images below a root folder.

    Raises:
        UsageError: the folder does not have the layout above, or more classes than the model.
        Unavailable: PIL, which decodes the images, is not installed.
    """
    classes = _class_names(root, "train")
    if len(classes) > num_classes:
        raise UsageError(
            f"'{root}/train' has {len(classes)} classes and the model {num_classes}; "
            f"add the option num_classes={len(classes)}"
        )
    unknown = sorted(set(_class_names(root, "val")) - set(classes))
    if unknown:
        raise UsageError(
            f"'{root}/val' has the class {unknown[0]!r}, which '{root}/train' lacks; "
            "expected the same class folders in both"
        )
    train, test = (_list_files(root / part, classes) for part in ("train", "val"))
    return ImageFolder(train, image_size), ImageFolder(test, image_size)


def _class_names(root: Path, part: str) -> list[str]:
    folder = root / part
    names = sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []
    if not names:
        raise UsageError(
            f"--data is '{root}', where {part}/<class>/ is missing; expected "
            "train/<class>/*.JPEG and val/<class>/*.JPEG"
        )
    return names


def _list_files(folder: Path, classes: Sequence[str]) -> list[tuple[Path, int]]:
    files = [
        (path, number)
        for number, name in enumerate(classes)
        if (folder / name).is_dir()
        for path in sorted((folder / name).iterdir())
        if path.suffix.lower() in _SUFFIXES
    ]
    if not files:
        raise UsageError(
            f"'{folder}' holds no images; expected <class>/*.JPEG (also .jpg, .png, .bmp, .webp)"
        )
    return files


def _import_pil() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise Unavailable(
            "data", "image folder", "PIL is not installed", "pip install pillow"
        ) from error
    return Image
