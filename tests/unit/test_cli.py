"""The command line without a verb."""

from importlib.metadata import version

import pytest
from typer.main import get_command

from testbed.base.config import RunConfig
from testbed.cli import main, make_app


def test_the_version_is_that_of_the_installed_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"testbed {version('testbed')}\n"


def test_run_offers_each_field_of_the_configuration_with_its_default() -> None:
    options = {p.name: p.default for p in get_command(make_app()).commands["run"].params}
    known = {name: getattr(RunConfig(), name) for name in RunConfig.__struct_fields__}
    assert set(known) <= set(options)
    others = {"workers": None, "target_accuracy": None}  # by the launcher; a list in one text
    differing = {
        name: (options[name], default)
        for name, default in known.items()
        if options[name] != others.get(name, default)
        and options[name] != str(default).split(".")[0]
    }
    assert not differing
