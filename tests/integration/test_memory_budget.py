"""What a strategy says of a budget, against a limit that the system enforces."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

# Workloads with the largest batch that is asked for, and MiB from little to more than enough.
ASKED = [
    ("resnet20", 64, (20, 120)),
    ("resnet56", 32, (20, 160)),
    ("vgg16:image_size=32,num_classes=10,hidden=512", 16, (180, 400)),
    ("densenet201:image_size=64,num_classes=10", 8, (250, 700)),
    ("resnet50:image_size=96,num_classes=10", 8, (250, 600)),
    ("bert-base:num_layers=2,sequence_length=64", 4, (350, 900)),
]
LIMITED = sys.platform == "linux"


def requests(count: int) -> list[tuple[str, int, int]]:
    """Workload, samples and MiB, drawn once for all."""
    draw = random.Random(25)
    found = []
    for _ in range(count):
        workload, most, (low, high) = draw.choice(ASKED)
        found.append((workload, draw.randint(1, most), draw.randint(low, high)))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not LIMITED, reason="RLIMIT_DATA counts mappings on Linux alone")
@pytest.mark.parametrize(("workload", "batch_size", "budget_mib"), requests(20))
def test_what_is_said_to_fit_fits(workload: str, batch_size: int, budget_mib: int) -> None:
    """And what is refused exceeds the limit with the plan that takes least as well."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.harness.budget_run"),
            *(workload, str(batch_size), str(budget_mib << 20), "laysa"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in {"allowed fits", "refused exceeds"}, done.stdout
