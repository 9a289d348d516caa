"""What all image classifiers share: options, data (real or synthetic) and defaults of training.

Learning rates follow the linear rule of Goyal et al. (2017): the published rate, scaled from the
published batch to 64 images, that is two workers of 32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from testbed.base.axes import WorkloadFacts
from testbed.base.parts import Part
from testbed.base.spec import options_class
from testbed.workloads.samples import spread_subset, synthetic_images
from testbed.workloads.workload import Samples, Workload

from .checks import check_at_least
from .cifar10 import load_cifar10
from .image_folder import load_image_folder

SYNTHETIC_NUM_SAMPLES = 50_000  # an epoch of made-up images; as long as one of CIFAR-10


@dataclass(frozen=True)
class ImageSet:
    """A data set of images: its shape, and how to read it from a folder.

    Attributes:
        name: as it stands in tables.
        num_classes: classes of the real data.
        load: `load(folder, image_size, num_classes) -> (train, test)`.
    """

    name: str
    num_classes: int
    load: Callable[[Path, int, int], tuple[Samples, Samples]]


CIFAR10 = ImageSet("CIFAR-10", 10, load_cifar10)
IMAGENET = ImageSet("ImageNet", 1000, load_image_folder)


@dataclass(frozen=True)
class Recipe:
    """How a classifier is trained unless the user says otherwise; see `Workload`."""

    learning_rate: float
    weight_decay: float = 1e-4
    batch_size: int = 32


def image_classifier(
    name: str,
    summary: str,
    make_model: Callable[..., nn.Module],
    *,
    images: ImageSet,
    recipe: Recipe,
    num_parameters: int,
    image_size: int = 224,
    min_image_size: int = 32,
    **model_options: Any,
) -> Part:
    """A registry entry for a classifier of images.

    Args:
        name: what the command line calls it.
        summary: one line for `testbed list`.
        make_model: `make_model(num_classes=..., **model_options)`.
        images: the data set that `--data` names; without it, noise of the same shape.
        recipe: how it is trained.
        num_parameters: the published count.
        image_size: height and width of an image in pixels.
        min_image_size: smaller ones vanish in the network's poolings.
        **model_options: names and defaults of further options, handed to `make_model`.
    """

    def build(
        image_size: int,
        num_classes: int,
        batch_size: int,
        num_samples: int,
        data_dir: str | None,
        seed: int,
        **options: Any,
    ) -> Workload:
        check_at_least(name, min_image_size, image_size=image_size)
        check_at_least(name, 1, num_classes=num_classes, batch_size=batch_size)
        check_at_least(name, 0, num_samples=num_samples)
        train, test, data = _load(images, data_dir, image_size, num_classes, num_samples, seed)
        return Workload(
            model=make_model(num_classes=num_classes, **options),
            train=train,
            test=test,
            batch_size=batch_size,
            learning_rate=recipe.learning_rate,
            weight_decay=recipe.weight_decay,
            data=data,
        )

    return Part(
        name=name,
        summary=summary,
        build=lambda options, **given: build(**vars(options), **given),
        options=options_class(
            image_size=image_size,
            num_classes=images.num_classes,
            batch_size=recipe.batch_size,
            num_samples=0,
            **model_options,
        ),
        facts=lambda options: WorkloadFacts(num_parameters),
    )


def _load(
    images: ImageSet,
    data_dir: str | None,
    image_size: int,
    num_classes: int,
    num_samples: int,
    seed: int,
) -> tuple[Samples, Samples | None, str]:
    if data_dir is None:
        shape = (3, image_size, image_size)
        noise = synthetic_images(num_samples or SYNTHETIC_NUM_SAMPLES, shape, num_classes, seed)
        return noise, None, f"synthetic (noise, 3x{image_size}x{image_size}, {images.name} shape)"
    train, test = images.load(Path(data_dir), image_size, num_classes)
    return spread_subset(train, num_samples), test, f"{images.name} from {data_dir}"
