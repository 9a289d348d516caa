"""What a part is, and how one is found by name: `testbed.base.axes` has the table of them all.

A part is loaded only when somebody asks for it, so that a missing library of one part never
hinders another. Third parties add parts by Python entry points, one group for each axis
(`testbed.backends`, `testbed.schedulers`, ...); the value is the same `Part` that the project's own
modules hold.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from typing import Any, Final, Generic, Literal, TypeVar

from testbed.base.config import RunConfig
from testbed.base.errors import Unavailable, UnknownName, UsageError
from testbed.base.knobs import Space
from testbed.base.spec import PartSpec, parse_options, parse_spec, split_chain

Lack = tuple[str, str]
"""Why a part cannot be used here, and what to install."""

F = TypeVar("F")

# Where a method comes from, as tables mark it.
Origin = Literal["published rule", "reconstruction", "ours", ""]
PUBLISHED: Final = "published rule"
RECONSTRUCTION: Final = "reconstruction"  # from an abstract or a description; docstrings say why
OURS: Final = "ours"


def installed(package: str, remedy: str) -> Callable[[], Lack | None]:
    """A probe for parts that need a package, which is looked for without importing it.

    Example:
        >>> installed("json", "")(), installed("no_such_package", "pip install it")()
        (None, ('no_such_package is not installed', 'pip install it'))
    """

    def probe() -> Lack | None:
        missing = importlib.util.find_spec(package) is None
        return (f"{package} is not installed", remedy) if missing else None

    return probe


@dataclass(frozen=True)
class NoOptions:
    """For a part that has nothing to choose."""


@dataclass(frozen=True, eq=False)
class Part:
    """One part of an axis, as the module that holds it declares it.

    Attributes:
        name: what the command line calls it.
        summary: one line for `testbed list`.
        build: makes it; its options come last, after what its axis gives (see `AXES`).
        options: frozen dataclass of the options that `name:key=value` may set.
        facts: what generic code may ask of it under its options, in the form of its axis
            (`BackendFacts`, ...); None: the defaults of that form.
        probe: None where it can be used, else (reason, what to install).
        refuses: why these options cannot stand in this configuration; None: they can.
        wraps: it stands left of another part of its axis, which `build` is given: `ef+topk`.
        origin: of the method: a published rule, a reconstruction of what a paper does not spell
            out, or ours; empty: not stated.
        knobs: under its options those that change its speed alone, and what a search may set them
            to (`--tune`).
    """

    name: str
    summary: str
    build: Callable[..., Any]
    options: type = NoOptions
    facts: Callable[[Any], Any] | None = None
    probe: Callable[[], Lack | None] = lambda: None
    refuses: Callable[[Any, RunConfig], str | None] = lambda options, config: None
    wraps: bool = False
    origin: Origin = ""
    knobs: Callable[[Any], Space] = lambda options: {}


@dataclass(frozen=True)
class Resolved(Generic[F]):
    """A part with checked options.

    Attributes:
        axis: that it belongs to.
        part: as declared.
        options: an instance of `part.options`.
        facts: of the part under these options.
        text: its specification in the usual spelling.
        inner: what a wrapper stands left of.
    """

    axis: Axis[F]
    part: Part
    options: Any
    facts: F = field(compare=False)
    text: str
    inner: Resolved[F] | None = None

    @property
    def name(self) -> str:
        """What the command line calls it."""
        return self.part.name

    @property
    def links(self) -> tuple[Resolved[F], ...]:
        """Itself and what stands to its right in a chain."""
        return (self, *(() if self.inner is None else self.inner.links))

    @property
    def origins(self) -> str:
        """Where the methods of the chain come from, each once; empty: not stated."""
        return ", ".join(dict.fromkeys(link.part.origin for link in self.links if link.part.origin))

    @property
    def tuning(self) -> str:
        """`untuned` where all options stand at their defaults, else `set by hand`; empty: none.

        Example:
            >>> from testbed.base.axes import SCHEDULERS
            >>> [SCHEDULERS.resolve(text).tuning for text in ("wfbp", "dear", "dear:mib=8")]
            ['', 'untuned', 'set by hand']
        """
        knobs = [link for link in self.links if dataclasses.fields(link.part.options)]
        if not knobs:
            return ""
        plain = all(link.options == link.part.options() for link in knobs)
        return "untuned" if plain else "set by hand"

    def build(self, *given: Any, **named: Any) -> Any:
        """The part itself, from what its axis gives."""
        wraps = self.inner is not None and not self.axis.beside
        within = (self.inner.build(),) if self.inner is not None and wraps else ()
        return self.part.build(*within, *given, self.options, **named)

    def usable(self) -> Resolved[F]:
        """Itself, where it can be used.

        Raises:
            Unavailable: says why not, and what to install.
        """
        lack = self.part.probe()
        if lack is not None:
            raise Unavailable(self.axis.what, self.name, *lack)
        return self if self.inner is None else replace(self, inner=self.inner.usable())

    def check(self, config: RunConfig) -> None:
        """Raise UsageError where it refuses this configuration."""
        why = self.part.refuses(self.options, config)
        if why is not None:
            raise UsageError(why)
        if self.inner is not None:
            self.inner.check(config)

    def with_options(self, options: Any) -> Resolved[F]:
        """The same part with other options, which its text names where they differ.

        Example:
            >>> from testbed.base.axes import SCHEDULERS
            >>> wide = SCHEDULERS.resolve("dear:mib=64")
            >>> SCHEDULERS.resolve("dear:mib=8").with_options(wide.options).text
            'dear:mib=64.0'
        """
        before, after = (dataclasses.asdict(each) for each in (self.options, options))
        other = {name: str(value) for name, value in after.items() if value != before[name]}
        own, *rest = split_chain(self.text) if self.axis.chains else (self.text,)
        spec = parse_spec(own)
        text = "+".join([str(PartSpec(spec.name, {**spec.options, **other})), *rest])
        return self.axis.join(self.part, options, text if other else self.text, self.inner)


@functools.cache
def _external(group: str, path: tuple[str, ...]) -> list[tuple[str, str]]:
    """Names and import paths of a group's entry points; looking for them takes milliseconds."""
    return sorted((e.name, e.value) for e in entry_points(group=group))


@dataclass(frozen=True, eq=False)
class Registry:
    """A named family of objects that are loaded by name.

    Attributes:
        what: the family's word in messages (`backend`).
        builtin: name -> `module:attribute`.
        group: the entry-point group of third parties.
    """

    what: str
    builtin: Mapping[str, str]
    group: str

    def paths(self) -> dict[str, str]:
        """All known names with their import paths; the project's own cannot be taken over."""
        external = _external(self.group, tuple(sys.path))
        return dict(self.builtin) | {n: p for n, p in external if n not in self.builtin}

    def load(self, name: str) -> Any:
        """The object of this name.

        Raises:
            UnknownName: nobody registered the name; the message lists the known ones.
            Unavailable: its module cannot be imported here.
        """
        paths = self.paths()
        if name not in paths:
            raise UnknownName(self.what, name, paths)
        return self._imported(name, paths[name])

    def _imported(self, name: str, path: str) -> Any:
        module, _, attribute = path.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except ImportError as error:
            reason = f"{module} cannot be imported ({error})"
            remedy = f"install what provides {error.name or module!r}"
            raise Unavailable(self.what, name, reason, remedy) from error
        except Exception as error:  # a third party's module may raise anything
            reason = f"{path} cannot be loaded ({type(error).__name__}: {error})"
            raise Unavailable(self.what, name, reason, "report it to its authors") from error

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.paths()))


@dataclass(frozen=True, eq=False)
class Axis(Registry, Generic[F]):
    """What a run chooses one part of, by the field of `RunConfig` that is called like `what`.

    Attributes:
        facts: the form of what its parts declare.
        aliases: old specifications (`name`, or `name:value` with an option without key) -> names.
        own: `module:function` that finds parts which the user's own files hold, by text; it
            returns the part and its options, or None for a text that names no file.
        chains: parts may stand before others, `ef+topk`.
        beside: parts of a chain stand beside each other, `checkpoint+release`: each is built alone.
        is_light: its parts' modules load within milliseconds, so that a sweep can check options.
        noted: notes of a report name the part of a cell where it is not the default.
        shown: labels and tables always tell the part; else only one that is not the default.
        same_work: runs that differ in it alone are expected to do the same work.
        same_step: and their steps without communication to take the same time.
        resumes: a run may go on from a checkpoint that another part of this axis has written.
    """

    facts: Callable[[], F]
    aliases: Mapping[str, str] = field(default_factory=dict)
    own: str = ""
    chains: bool = False
    beside: bool = False
    is_light: bool = True
    noted: bool = True
    shown: bool = False
    same_work: bool = True
    same_step: bool = True
    resumes: bool = True

    @property
    def title(self) -> str:
        """Its parts' common name, as `backends`."""
        return self.group.rpartition(".")[2]

    @property
    def default(self) -> str:
        """The part of a run that does not choose."""
        return str(getattr(RunConfig(), self.what))

    def of(self, config: RunConfig) -> str:
        """The specification that a configuration holds."""
        return str(getattr(config, self.what))

    def is_default(self, config: RunConfig) -> bool:
        """Whether a configuration leaves the choice as it is."""
        return self.of(config) == self.default

    def links(self, text: str) -> tuple[PartSpec, ...]:
        """The specification, with today's names; of a chain each link, the innermost last.

        Raises:
            UsageError: a link has no name, or an option is not `key=value`.
        """
        pieces = split_chain(text) if self.chains else (text,)
        return tuple(parse_spec(self.today(piece)) for piece in pieces)

    def today(self, text: str) -> str:
        """The text of one part's specification with today's name, whether it can be read or not."""
        for old, name in self.aliases.items():
            if re.match(rf"{old}(?![\w-])", text):
                rest = text[len(old) + 1 :]
                return f"{name}:{rest}" if rest else name
        return text

    def is_own(self, text: str) -> bool:
        """Whether the specification names a file of the user's own.

        Raises:
            UsageError: it does, and no function in it.
        """
        return self._own(text) is not None

    def check_names(self, text: str) -> None:
        """Refuse what names no part, without loading any.

        Raises:
            UnknownName: the message lists the known names.
            UsageError: it is no specification.
        """
        if self._own(text) is None:
            known = self.paths()
            for link in self.links(text):
                if link.name not in known:
                    raise UnknownName(self.what, link.name, known)

    def resolve(self, text: str) -> Resolved[F]:
        """The part that a specification names, with its options; not yet asked whether it can run.

        Raises:
            UnknownName: no part of this name; the message lists the known ones.
            UsageError: an option that it does not have, a value that it cannot use, a wrapper
                without a part to its right, or another part with one.
            Unavailable: its module cannot be imported here.
        """
        own = self._own(text)
        if own is not None:
            return self.join(*own, text.strip())
        *outer, last = self.links(text)
        found = self._resolve(last, None)
        for link in reversed(outer):
            found = self._resolve(link, found)
        return found

    def find(self, text: str) -> Resolved[F] | None:
        """As `resolve`; None for what cannot be resolved here, as in another machine's record."""
        try:
            return self.resolve(text)
        except (UsageError, Unavailable):
            return None

    def which(self, holds: Callable[[F], bool]) -> tuple[str, ...]:
        """The parts of which something holds at their default options, in the table's order.

        Those that cannot be loaded here are left out.
        """
        found = {name: self.find(name) for name in self.paths()}
        return tuple(n for n, part in found.items() if part is not None and holds(part.facts))

    def _resolve(self, spec: PartSpec, inner: Resolved[F] | None) -> Resolved[F]:
        part = self.load(spec.name)
        if not isinstance(part, Part):
            told = (
                f"{self.paths()[spec.name]} is a {type(part).__name__}, no testbed.base.parts.Part"
            )
            raise Unavailable(self.what, spec.name, told, "report it to its authors")
        if part.wraps and inner is None:
            raise UsageError(
                f"{spec.name!r} needs a {self.what} to its right; write {spec.name}+NAME"
            )
        if inner is not None and not part.wraps and not self.beside:
            raise UsageError(
                f"{spec.name!r} cannot stand left of another {self.what}; only wrappers can"
            )
        text = str(spec) if inner is None else f"{spec}+{inner.text}"
        return self.join(part, parse_options(spec.name, spec.options, part.options), text, inner)

    def join(
        self, part: Part, options: Any, text: str, inner: Resolved[F] | None = None
    ) -> Resolved[F]:
        """A part with options, which are taken to be checked."""
        facts = self.facts() if part.facts is None else part.facts(options)
        return Resolved(self, part, options, facts, text, inner)

    def _own(self, text: str) -> tuple[Part, Any] | None:
        found: tuple[Part, Any] | None = self._imported("", self.own)(text) if self.own else None
        return found
