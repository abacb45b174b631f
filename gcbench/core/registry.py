"""Plug-ins by name: the files of compressors/ and tasks/ first, then those of installed packages.

A package registers a class under the entry-point group `gcbench.compressors`, `gcbench.memories`,
`gcbench.tasks` or `gcbench.sinks`; a user names a file, such as ./mine.py, in the place of a
compressor or a memory. A plug-in is imported when its name is asked for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.machinery import SourceFileLoader
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from gcbench.core.errors import GcbenchError, UsageError, unknown

if TYPE_CHECKING:
    from gcbench.core.compressor import Compressor
    from gcbench.core.memory import Memory
    from gcbench.core.task import Task

T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """One registered name: where it comes from, and how to load its class."""

    name: str
    source: str
    """"built-in", or the distribution that registered it."""
    load: Callable[[], type[Any]]
    version: str = ""
    """The distribution's version; empty for what is built in."""


def _builtin(package: str, base: type, name: str) -> type[Any]:
    module = importlib.import_module(f"{package}.{name}")
    return _only(module, base, f"{package}/{name}.py")


def _only(module: ModuleType, base: type, file: str) -> type[Any]:
    """Return the one subclass of `base` that a module defines; GcbenchError if there is not one."""
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, base)
        and value.__module__ == module.__name__
        and not inspect.isabstract(value)
    ]
    if len(found) != 1:
        raise GcbenchError(
            f"{file} defines {len(found)} {base.__name__} classes: exactly one is "
            "allowed (files that define none start with an underscore)"
        )
    return found[0]


def _third_party(point: EntryPoint, base: type) -> type[Any]:
    source = point.dist.name if point.dist else point.value
    try:
        loaded = point.load()
    except (Exception, SystemExit) as error:
        raise GcbenchError(
            f"{point.name!r} of the package {source} does not load ({point.value}): {error!r}"
        ) from error
    if not (inspect.isclass(loaded) and issubclass(loaded, base)):
        raise GcbenchError(
            f"{point.name!r} of the package {source}: {point.value} is no subclass of "
            f"gcbench's {base.__name__}"
        )
    return loaded


def _same(cls: type[Any]) -> type[Any]:
    return cls


def _files(group: str, base: type) -> dict[str, Entry]:
    folder = importlib.import_module(group)
    return {
        name: Entry(name, "built-in", partial(_builtin, group, base, name))
        for _, name, package in pkgutil.iter_modules(folder.__path__)
        if not (package or name.startswith("_"))
    }


def with_third_parties(group: str, base: type, builtin: dict[str, Entry]) -> dict[str, Entry]:
    """Return the built-in entries and those of installed packages, by name.

    `group`: the entry-point group, each entry of which names a subclass of `base`. An entry whose
    name is taken, or cannot be part of a folder's name, is left out with a warning.
    """
    entries = dict(builtin)
    for point in entry_points(group=group):
        source = point.dist.name if point.dist else point.value
        ignored = ""
        if point.name in entries:
            ignored = f"the name is taken by {entries[point.name].source}"
        elif not re.fullmatch(r"\w[\w-]*", point.name):  # it becomes part of a folder's name
            ignored = "letters, digits, _ and - are allowed in a name"
        if ignored:
            warnings.warn(
                f"{point.name!r} of the package {source} is ignored: {ignored}", stacklevel=2
            )
            continue
        version = point.dist.version if point.dist else ""
        load = partial(_third_party, point, base)
        entries[point.name] = Entry(point.name, source, load, version)
    return dict(sorted(entries.items()))


@cache
def compressors() -> dict[str, Entry]:
    """Return all registered compressors by name."""
    from gcbench.core.compressor import Compressor

    group = "gcbench.compressors"
    found = with_third_parties(group, Compressor, _files(group, Compressor))
    return found | _users_files("compressor", Compressor)


FILES = "GCBENCH_FILES"
MEMORY_FILES = "GCBENCH_MEMORY_FILES"
"""Environment variables with the files that `add_file` registered as compressors and as memories:
processes of a run inherit them."""
VARIABLES = {"compressor": FILES, "memory": MEMORY_FILES}


def _named_files(kind: str = "compressor") -> dict[str, str]:
    paths = filter(None, os.environ.get(VARIABLES[kind], "").split(os.pathsep))
    return {Path(path).stem: path for path in paths}


def _users_files(kind: str, base: type) -> dict[str, Entry]:
    return {
        name: Entry(name, f"file {path}", partial(_from_file, name, path, base))
        for name, path in _named_files(kind).items()
    }


class _UsersFile(SourceFileLoader):
    """Executes a user's file, and keeps the bytes that it executed.

    Cached byte code is left aside: it is told from other code by the file's size and the second of
    its last change, which an edit may leave as they are.
    """

    def __init__(self, name: str, path: str) -> None:
        super().__init__(name, path)
        self.source = Path(path).read_bytes()

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.source, self.path)
        return code


def _module_name(name: str) -> str:
    return f"gcbench_file_{name}"


def executed(module: ModuleType) -> bytes | None:
    """Return the source that was executed to make the module of a user's file; None for others."""
    loader = getattr(module, "__loader__", None)
    return loader.source if isinstance(loader, _UsersFile) else None


def _from_file(name: str, path: str, base: type) -> type[Any]:
    """Return the subclass of `base` that the user's file defines.

    The file is imported once, and again after `add_file` found it changed.
    """
    module_name = _module_name(name)
    module = sys.modules.get(module_name)
    if module is None or module.__file__ != path:
        try:
            loader = _UsersFile(module_name, path)
        except OSError as error:
            raise GcbenchError(f"{path} cannot be read: {error}") from error
        spec = importlib.util.spec_from_file_location(module_name, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[module_name]
            raise GcbenchError(f"{path} does not load: {error!r}") from error
    return _only(module, base, path)


def _forget_changed(name: str, path: str) -> None:
    """Have a user's file imported anew if it has other bytes than those that were executed."""
    module = sys.modules.get(_module_name(name))
    if module is not None and Path(path).is_file() and executed(module) != Path(path).read_bytes():
        del sys.modules[_module_name(name)]


def add_file(word: str, kind: str = "compressor") -> str:
    """Register the plug-in of a Python file under the file's name, and return that name.

    `kind`: "compressor" or "memory", the part of the file that is registered. A word that does not
    end in .py is a name already, and is returned unchanged. In both cases a file that was edited
    since it was imported is imported again. Objects that were made before keep their code.

    Raises:
        UsageError: no such file, or the name is taken or has other characters than letters, digits,
            _ and -.
    """
    known, listed = _named_files(kind), compressors if kind == "compressor" else memories
    if not word.endswith(".py"):
        if word in known:
            _forget_changed(word, known[word])
        return word
    path = Path(word).absolute()
    if not path.is_file():
        raise UsageError(f"{word}: no such file; name the file of a {kind}, e.g. ./mine.py")
    name = path.stem
    taken = listed().get(name)
    if known.get(name, "") != str(path) and taken is not None:
        raise UsageError(f"{word}: the name {name!r} is taken by {taken.source}; rename the file")
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise UsageError(f"{word}: letters, digits, _ and - are allowed in the file's name")
    if name not in known:
        os.environ[VARIABLES[kind]] = os.pathsep.join([*known.values(), str(path)])
        listed.cache_clear()
    _forget_changed(name, str(path))
    return name


def word(name: str, kind: str = "compressor") -> str:
    """Return what a user types for a compressor or memory: the path of its file, or its name.

    A file below the working directory is named from there, so that a row with this word can be
    published, and serves in another copy of the folder.
    """
    path = Path(_named_files(kind).get(name, name))
    return f"./{path.relative_to(Path.cwd())}" if path.is_relative_to(Path.cwd()) else str(path)


@cache
def memories() -> dict[str, Entry]:
    """Return all registered memories by name; those beside a method have the method's name."""
    from gcbench.core.memory import FORCED, Memory

    builtin = _files("gcbench.compressors.memories", Memory)
    builtin[FORCED] = replace(builtin["residual"], name=FORCED)
    found = with_third_parties("gcbench.memories", Memory, builtin)
    return found | _users_files("memory", Memory)


def memory_entry(name: str) -> Entry:
    """Return the entry of a memory: registered itself, or beside the method of this name.

    Raises:
        UsageError: neither a memory nor a method with a memory of its own has this name.
    """
    if name in memories():
        return memories()[name]
    if name in compressors():
        own = compressor_class(name).own_memory
        if own is not None:
            return replace(compressors()[name], load=partial(_same, own))
    raise unknown("memory", name, memories())


@cache
def tasks() -> dict[str, Entry]:
    """Return all registered tasks by name."""
    from gcbench.core.task import Task

    group = "gcbench.tasks"
    return with_third_parties(group, Task, _files(group, Task))


def origin(entry: Entry) -> dict[str, str] | None:
    """Return where a third party's class comes from; None for what is built in.

    The keys are "distribution", "version", and "sha256", the hash of the names and bytes of the
    package's Python files, or of a single module's; "" if there is no source file. For a file that
    the user named, "distribution" is `file` and its name, without the folder: it may be moved; and
    the bytes are those that were executed, whatever the file has become since.
    """
    if entry.source == "built-in":
        return None
    module = sys.modules[entry.load().__module__.partition(".")[0]]
    folders = [Path(folder) for folder in getattr(module, "__path__", ())]
    files = [(path, path.relative_to(top)) for top in folders for path in top.rglob("*.py")]
    if not folders and getattr(module, "__file__", None):
        files = [(Path(str(module.__file__)), Path(Path(str(module.__file__)).name))]
    found = hashlib.sha256()
    for path, name in sorted(files, key=lambda each: each[1]):
        source = executed(module)
        if source is None:
            source = path.read_bytes()
        found.update(f"{name}\0".encode() + hashlib.sha256(source).digest())
    named = (_named_files() | _named_files("memory")).get(entry.name)
    return {
        "distribution": entry.source if named is None else f"file {Path(named).name}",
        "version": entry.version,
        "sha256": found.hexdigest() if files else "",
    }


def source_digest(name: str) -> str:
    """Return the first hex digits of the SHA-256 of a compressor's source, "" if it has no file.

    That is the file of a built-in compressor, and what `origin` says of a third party's. Other code
    that the class calls, or inherits from another package, is not in it.
    """
    entry = compressors()[name]
    own = origin(entry)
    if own is not None:
        return own["sha256"][:10]
    file = sys.modules[entry.load().__module__].__file__
    return hashlib.sha256(Path(str(file)).read_bytes()).hexdigest()[:10]


def named(kind: str, entries: dict[str, Entry], name: str) -> type[Any]:
    """Return the class registered as `name` among `entries`; UsageError for an unknown name.

    `kind`: what the message calls it, such as "compressor".

    Raises:
        GcbenchError: the class calls itself by another name, under which results would be stored.
    """
    if name not in entries:
        raise unknown(kind, name, entries)
    cls = entries[name].load()
    own = vars(cls).get("name")  # a subclass does not inherit its parent's
    if own and own != name:
        raise GcbenchError(
            f"{kind} {name!r} ({entries[name].source}): its class {cls.__qualname__} calls itself "
            f"{own!r}. Leave `name` out of the class, or register it as {own!r} alone"
        )
    if not own:
        cls.name = name
    return cls


def compressor_class(name: str) -> type[Compressor]:
    """Return the class registered as `name`; UsageError for an unknown name."""
    cls = named("compressor", compressors(), name)
    if vars(cls).get("own_memory") is not None:
        cls.memory = name
    return cls


def memory_class(name: str) -> type[Memory]:
    """Return the class registered as `name`; UsageError for an unknown name."""
    return memory_entry(name).load()


def task_class(name: str) -> type[Task]:
    """Return the class registered as `name`; UsageError for an unknown name."""
    return named("task", tasks(), name)


def fields(cls: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields that a user may set, by name; empty for a class without a dataclass."""
    if not dataclasses.is_dataclass(cls):
        return {}
    return {field.name: field for field in dataclasses.fields(cls) if field.init}


def _typed(what: str, cls: type[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the values converted to their fields' types, strictly: 2 becomes 2.0, "no" is refused.

    `what`: what the message calls the object.

    Raises:
        UsageError: a value does not fit its field's type.
    """
    from pydantic import TypeAdapter, ValidationError
    from pydantic.errors import PydanticUserError

    typed = dict(options)
    for name, value in options.items():
        try:
            hint = get_type_hints(cls)[name]
            if hint is str and type(value) is int:
                value = str(value)  # a word that YAML took for a number: norm=2
            typed[name] = TypeAdapter(hint).validate_python(value, strict=True)
        except ValidationError as error:
            problems = dict.fromkeys(problem["msg"].lower() for problem in error.errors())
            raise UsageError(f"{what}: {name}={value!r}: {', or '.join(problems)}") from None
        except (NameError, PydanticUserError):
            continue  # pydantic does not know this third-party type: its constructor checks it
    return typed


def call(made: object) -> str:
    """Return the expression that makes a plug-in's object, with all its fields."""
    told = [f"{name}={getattr(made, name)!r}" for name in fields(type(made))]
    return f"{type(made).__qualname__}({', '.join(told)})"


def make(what: str, cls: type[T], options: dict[str, Any]) -> T:
    """Return `cls(**options)` with the values in its fields' types; UsageError otherwise."""
    known = fields(cls)
    for option in options:
        if option not in known:
            if not known:
                raise UsageError(f"{what} has no fields to set; {option!r} was given")
            raise unknown(f"field of {what}:", option, known)
    typed = _typed(what, cls, options)
    try:
        return cls(**typed)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{what}: {error}") from error


def compressor(name: str, **options: Any) -> Compressor:
    """Return a compressor with its fields set; UsageError for an unknown name, field or value."""
    return make(f"compressor {name!r}", compressor_class(name), options)


def task(name: str, **options: Any) -> Task:
    """Return a task with its fields set; UsageError for an unknown name, field or value."""
    return make(f"task {name!r}", task_class(name), options)
