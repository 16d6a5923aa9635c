"""The reference pages name every field, option and argument with its default, and nothing else.

A page is read as tables under headings: the first cell of a row names one or more things in backquotes, and
the cell under "default" says the default.
"""

import argparse
import inspect
import re
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import get_args, get_type_hints

import pytest

import hybridpipe
from hybridpipe.cli import main
from hybridpipe.config.file import Config, Factory
from hybridpipe.planning import cluster, plan, profile
from hybridpipe.planning.schedules.registry import SCHEDULES, ScheduleTraits
from hybridpipe.run_folder.data import RunStart

PAGES = Path(__file__).parent.parent / "docs/reference"
ABSENT = "–"


def tables(page: str) -> dict[str, dict[str, str]]:
    """The tables of a page: by heading, the default of each name; "" where a table has no such column."""
    found: dict[str, dict[str, str]] = {}
    heading, columns = "", []
    for line in (PAGES / page).read_text().splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if not line.startswith("|"):
            columns = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not columns:
            columns = cells
        elif names := re.findall(r"`([^`]+)`", cells[0]):
            default = cells[columns.index("default")] if "default" in columns else ""
            found.setdefault(heading, {}).update(dict.fromkeys(names, default.strip("`")))
    return found


def toml(value: object) -> str:
    """A default as TOML and JSON have it."""
    if value is MISSING:
        return "required"
    if value is None:
        return ABSENT
    match value:
        case bool():
            return str(value).lower()
        case str():
            return f'"{value}"'
        case tuple():
            return str(list(value))
    return str(value)


def defaults(kind: type) -> dict[str, str]:
    """The fields of a dataclass that a file may give, with their defaults."""
    return {
        each.name: toml(each.default if each.default_factory is MISSING else each.default_factory())
        for each in fields(kind)
        if each.init
    }


def config_fields() -> dict[str, dict[str, str]]:
    """By table, the fields of a config."""
    hints, found = get_type_hints(Config), {}
    for table in (each for each in fields(Config) if each.init):
        kind = next(each for each in (hints[table.name], *get_args(hints[table.name])) if is_dataclass(each))
        known = defaults(kind)
        if table.default_factory is not MISSING and issubclass(kind, Factory):
            known["factory"] = toml(table.default_factory().factory)
        found[table.name] = {f"{table.name}.{name}": default for name, default in known.items()}
    return found


def test_the_config_page_names_every_field():
    assert tables("config.md") == config_fields()


def options(parser: argparse.ArgumentParser) -> dict[str, str]:
    """A command's options and arguments, with their defaults."""
    found = {}
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        is_rest = action.nargs == argparse.REMAINDER  # which Python calls required up to 3.12
        positional = action.dest if is_rest else action.metavar
        name = action.option_strings[-1] if action.option_strings else positional
        default = action.default
        if isinstance(default, list | tuple):
            default = ",".join(default)
        given = ABSENT if default in (None, "", {}) else str(default)
        found[name] = "required" if action.required or is_rest else given
    return found


def commands() -> dict[str, dict[str, str]]:
    """Every command's options."""
    parser = main._parser()
    added = next(each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return {f"hybridpipe {name}": options(command) for name, command in added.choices.items()}


def test_the_page_of_commands_names_every_option():
    page, known = tables("cli.md"), commands()
    headings = re.findall(r"^## (hybridpipe .*)", (PAGES / "cli.md").read_text(), re.MULTILINE)
    assert headings == list(known)
    assert {name: page.get(name, {}) for name in known} == known


@pytest.mark.parametrize(
    "kind",
    [
        plan.Plan,
        plan.StageSpec,
        plan.Prediction,
        profile.ModelProfile,
        profile.LayerProfile,
        profile.JoinedProducts,
        profile.ExpertsProfile,
        profile.Measurement,
        cluster.Cluster,
        cluster.Level,
        cluster.Collective,
        RunStart,
    ],
)
def test_the_page_of_files_names_every_field(kind):
    assert tables("files.md")[kind.__name__] == defaults(kind)


def signature(function) -> inspect.Signature:
    """The parameters of a function or a method, without types."""
    found = inspect.signature(function)
    given = [each.replace(annotation=inspect.Parameter.empty) for each in found.parameters.values()]
    bare = [each for each in given if each.name != "self"]
    return found.replace(parameters=bare, return_annotation=inspect.Signature.empty)


def arguments(function) -> dict[str, str]:
    """The arguments of a function, with their defaults."""

    def default(value):
        if value is inspect.Parameter.empty:
            return "required"
        if is_dataclass(value):
            return f"{type(value).__name__}()"
        return repr(dict(value) if isinstance(value, MappingProxyType) else value)

    given = signature(function).parameters
    rest = [name for name, each in given.items() if each.kind is each.VAR_KEYWORD]
    return {name: default(each.default) for name, each in given.items()} | dict.fromkeys(rest, "")


def test_the_page_of_python_names_every_argument_and_method():
    from hybridpipe.checkpoint.policy import Checkpointing
    from hybridpipe.data import Parquet

    page, kind = tables("python.md"), hybridpipe.Trainer
    for options in ("PlanOptions", "UpdateOptions", "DataOptions", "RankOptions"):
        assert page[options] == arguments(getattr(hybridpipe, options))
    assert page["hybridpipe"].keys() == set(hybridpipe.__all__)
    assert page["Trainer"] == arguments(kind)
    assert page["Checkpointing"] == arguments(Checkpointing)
    assert page["Parquet"] == arguments(Parquet)
    assert page["Spark"] == arguments(hybridpipe.spark.run)
    every = {name: getattr(kind, name) for name in dir(kind)}
    public = {name: value for name, value in every.items() if not name.startswith("_")}
    methods = {name for name, value in public.items() if inspect.isfunction(value)}
    assert page["Methods"].keys() == {f"{name}{signature(public[name])}" for name in methods}
    assert page["Attributes"].keys() == public.keys() - methods


def test_the_page_of_schedules_names_every_schedule():
    assert tables("../internals/schedules.md")["The schedules"].keys() == set(SCHEDULES)


def test_the_page_about_a_new_schedule_names_every_trait():
    page = (PAGES.parent / "internals/adding-a-schedule.md").read_text()
    assert tuple(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == ScheduleTraits._fields
