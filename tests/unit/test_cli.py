"""The command line without a verb."""

from importlib.metadata import version

import pytest

from testbed.cli import main


def test_the_version_is_that_of_the_installed_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"testbed {version('testbed')}\n"
