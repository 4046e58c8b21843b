"""Things that users choose by name: built in, added by a decorator, or, last, announced by an installed package.

A name takes options, the same wherever a name is accepted: "diloco:interval=50:compressor=uint4". An option that is
itself a name with options stands in parentheses: "diloco:compressor=topk(ratio=0.05)".
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, NamedTuple, TypeVar

from murmura.errors import ConfigError, MurmuraError

log = logging.getLogger("murmura")

T = TypeVar("T")
Maker = TypeVar("Maker", bound=Callable[..., Any])

_WORDS = {"true": True, "false": False, "none": None}


class _Entry(NamedTuple):
    make: Callable[..., Any]
    defaults: Mapping[str, Any]


class Registry(Generic[T]):
    """Makes objects of `kind` by name. Packages announce theirs as entry points of `group`."""

    def __init__(
        self,
        kind: type[T],
        word: str,
        group: str,
        adapt: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> None:
        """`adapt` turns what a package announces into what a name stands for; by default it stays as it is."""
        self._kind = kind
        self._word = word
        self._group = group
        self._adapt = adapt
        self._entries: dict[str, _Entry] = {}
        self._compared: set[str] = set()  # the names of which it is known whether a package announces them, too

    def register(self, name: str, **defaults: Any) -> Callable[[Maker], Maker]:
        """A decorator: `name` stands for what the class or function makes with `defaults`, unless options say else."""
        if not isinstance(name, str):
            raise ConfigError(
                f'{name!r} is no {self._word} name: give a string, in parentheses: @register_{self._word}("mine").'
            )
        if not name or set(name) & set(":=(), \t\n"):
            raise ConfigError(f"{name!r} is no {self._word} name: leave out ':', '=', ',', parentheses and spaces.")

        def add(make: Maker) -> Maker:
            if not callable(make):
                raise ConfigError(f"{self._word} {name!r} cannot stand for {make!r}: give a class or a function.")
            known = self._entries.get(name)
            if known is not None and _place(known.make) != _place(make):  # a module that is reloaded is no other
                raise ConfigError(
                    f"{self._word} {name!r} is registered already, by {_place(known.make)}. Rename yours."
                )
            self._entries[name] = _Entry(make, defaults)
            return make

        return add

    def __contains__(self, name: str) -> bool:
        return name in self._entries or name in self._announced()

    def names(self) -> list[str]:
        """All names, in alphabetical order."""
        return sorted({*self._entries, *self._announced()})

    def make(self, text: str) -> T:
        """What `text` stands for: a name, with or without options."""
        name, options = parse(text)
        entry = self._entry(name)
        accepted = inspect.signature(entry.make).parameters.values()
        known = {each.name for each in accepted if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
        takes_any = any(each.kind is each.VAR_KEYWORD for each in accepted)
        unknown = [] if takes_any else [each for each in options if each not in known]
        if unknown:
            listed = ", ".join(sorted(known)) or "none"
            raise ConfigError(f"{self._word}={text!r}: {name!r} has no option {unknown[0]!r}. It has: {listed}.")
        chosen = {**entry.defaults, **options}
        needed = [each.name for each in accepted if each.name in known and each.default is each.empty]
        missing = [each for each in needed if each not in chosen]
        if missing:
            raise ConfigError(
                f"{self._word}={text!r}: {name!r} needs the option {missing[0]!r}: write '{name}:{missing[0]}=...'. "
                f"(The name stands for {_place(entry.make)}, which is called with options and makes the {self._word}.)"
            )
        try:
            made = entry.make(**chosen)
        except MurmuraError:
            raise
        except Exception as error:  # whatever a class of another package raises
            raise ConfigError(
                f"{self._word}={text!r}: {_place(entry.make)} raised {type(error).__name__}: {error}"
            ) from error
        if not isinstance(made, self._kind):
            raise ConfigError(f"{self._word}={text!r}: {_place(entry.make)} made {made!r}, which is no {self._word}.")
        return made

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            announced = self._announced()
            if name not in announced:
                known = ", ".join(map(repr, self.names()))
                raise ConfigError(f"{self._word}={name!r} is unknown. Known: {known}.")
            points = announced[name]
            if len({point.value for point in points}) > 1:
                claims = " and ".join(sorted(f"{point.value!r} ({_package(point)})" for point in points))
                raise ConfigError(
                    f"{self._word}={name!r} is announced by several packages: {claims}. Remove all but one of them."
                )
            try:
                make = points[0].load()
                inspect.signature(make)
                entry = _Entry(self._adapt(make) if self._adapt else make, {})
            except (Exception, SystemExit) as error:  # whatever a module of another package does when it is imported
                raise ConfigError(
                    f"{self._word}={name!r} is announced as {points[0].value!r}, which cannot be loaded: "
                    f"{type(error).__name__}: {error}. Repair or remove the package {_package(points[0])}, or choose "
                    f"another {self._word}."
                ) from error
            self._entries.setdefault(name, entry)  # its module may have registered it by the decorator
        elif name not in self._compared:
            self._warn_of_others(name)
        self._compared.add(name)
        return self._entries[name]

    def _warn_of_others(self, name: str) -> None:
        """Say that packages announce a name which stands for something else."""
        meant = self._entries[name].make
        for point in self._announced().get(name, []):
            if point.module.partition(".")[0] != meant.__module__.partition(".")[0]:
                log.warning(
                    "%s=%r stands for %s. What the package %s announces by that name, %r, cannot be chosen: rename it.",
                    *(self._word, name, _place(meant), _package(point), point.value),
                )

    def _announced(self) -> dict[str, list[EntryPoint]]:
        found: dict[str, list[EntryPoint]] = {}
        for each in entry_points(group=self._group):
            found.setdefault(each.name, []).append(each)
        return found


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """The name in `text`, and its options as Python values; what is no number, true, false or none is a string."""
    if not isinstance(text, str):
        raise ConfigError(f"{text!r} is no name. Give a string, such as 'name' or 'name:option=value'.")
    text = text.strip()
    if text.endswith(")") and ":" not in text.partition("(")[0]:  # "name(a=1:b=2)" is "name:a=1:b=2"
        name, _, inside = text[:-1].partition("(")
        text = f"{name}:{inside}" if inside else name
    name, *parts = _split(text)
    options: dict[str, Any] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or not key.isidentifier() or key in options:
            raise ConfigError(f"{text!r}: {part!r} is no option. Write name:option=value:option=value, each once.")
        options[key] = _value(value)
    return name, options


def _split(text: str) -> list[str]:
    """`text` cut at colons outside parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == ":" and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
        if depth < 0:
            break
    if depth:
        raise ConfigError(f"{text!r}: the parentheses do not match.")
    return parts


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:  # not ast.literal_eval, which is not safe in several threads before Python 3.12: ranks may be threads
        return int(text, 0)
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        return text
    return value if math.isfinite(value) else text


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist else "unknown"


def _place(make: Callable[..., Any]) -> str:
    return f"{make.__module__}.{make.__qualname__}" if hasattr(make, "__qualname__") else repr(make)
