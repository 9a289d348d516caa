"""The command line without a verb."""

from importlib.metadata import version

import pytest
from typer.main import get_command

from testbed.base.axes import AXES
from testbed.base.config import RunConfig, settings
from testbed.cli import main, make_app
from tests.harness.runs import answer


def test_the_version_is_that_of_the_installed_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"testbed {version('testbed')}\n"


def test_run_offers_each_field_of_the_configuration_with_its_default() -> None:
    options = {p.name: p.default for p in get_command(make_app()).commands["run"].params}
    known = {name: getattr(RunConfig(), name) for name in RunConfig.__struct_fields__}
    assert set(known) <= set(options)
    # by the launcher; lists in one text
    others = {"workers": None, "target_accuracy": None, "target_loss": None}
    differing = {
        name: (options[name], default)
        for name, default in known.items()
        if options[name] != others.get(name, default)
        and options[name] != str(default).split(".")[0]
    }
    assert not differing


def test_sweep_offers_a_list_of_each_setting_that_says_so_with_the_same_help() -> None:
    commands = get_command(make_app()).commands
    of_run, of_sweep = ({p.name: p for p in commands[verb].params} for verb in ("run", "sweep"))
    listed = [name for name, (_, setting) in settings().items() if setting.listed]
    assert {axis.what for axis in AXES} <= set(listed)
    assert [name for name in listed if of_sweep[name].help != of_run[name].help] == []
    assert {of_sweep[name].metavar for name in listed} == {"LIST"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--precision", "float31"), "--precision is 'float31'; expected float32 or float64"),
        (("--deadline", "soon"), "--deadline: duration is 'soon'; expected seconds"),
        (("--target-accuracy", "high"), "--target-accuracy: targets are 'high'"),
        (("--target-loss", "0"), "expected losses above 0, as 2.5"),
        (("--accumulate", "0"), "--accumulate is 0; expected a number above 0"),
        (("--momentum", "-1"), "--momentum is -1.0; expected 0 or more"),
        (("--memory", "nosuch"), "no memory 'nosuch'; known: auto"),
    ],
)
def test_a_wrong_value_is_told_with_its_option(words: tuple[str, str], told: str) -> None:
    done = answer("run", *words)
    assert done.status == 2
    assert told in done.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("run", "--backend", "gloo", "--steps", "3", "--backend=no-such"),
            "testbed: --backend is given 2 times; the last one counts\n",
        ),
        (
            ("sweep", "--scheduler", "wfbp", "--scheduler", "no-such"),
            "--scheduler is given 2 times; the last one counts; a list is written --scheduler A,B",
        ),
        (("report", "no", "-o", "a.md", "--output", "b.md"), "--output is given 2 times"),
    ],
)
def test_an_option_of_one_value_given_twice_is_told(words: tuple[str, ...], told: str) -> None:
    done = answer(*words)
    assert told in done.err
    assert done.status == 2
    assert "no-such" not in words[-1] or "no-such" in done.err  # what was given last


def test_an_option_of_several_values_may_be_given_again() -> None:
    done = answer("forecast", "quick", "-o", "no/new.json", "--link", "a.json", "--link", "b.json")
    assert "times" not in done.err
