"""Plug-ins by name: files of compressors/ and tasks/, installed packages, and users' files.

A package registers a class under the entry-point group `gcbench.compressors`, `gcbench.memories`,
`gcbench.tasks` or `gcbench.sinks`. A user gives a file, such as ./mine.py, instead of the name of a
compressor or memory. A plug-in is imported on first use.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import pkgutil
import random
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
    from pydantic import TypeAdapter

    from gcbench.core.compressor import Compressor
    from gcbench.core.memory import Memory
    from gcbench.core.task import Task

T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """A registered name: its source, and how to load its class."""

    name: str
    source: str
    """"built-in", the distribution that registered it, or "file" and a path."""
    load: Callable[[], type[Any]]
    version: str = ""
    """The distribution's version; otherwise empty."""


def _builtin(package: str, base: type, name: str) -> type[Any]:
    module = importlib.import_module(f"{package}.{name}")
    return _only(module, base, f"{package}/{name}.py")


def _only(module: ModuleType, base: type, file: str) -> type[Any]:
    """Return the only subclass of `base` that a module defines; GcbenchError if it is not one."""
    subclasses: list[type[Any]] = [
        value
        for value in dict.fromkeys(filter(inspect.isclass, vars(module).values()))
        if issubclass(value, base) and value.__module__ == module.__name__
    ]
    classes = [cls for cls in subclasses if not inspect.isabstract(cls)]
    if len(classes) == 1:
        return classes[0]
    kind = f"{base.__name__} class"
    if classes:
        names = ", ".join(cls.__name__ for cls in classes)
        raise GcbenchError(f"{file} defines {names}: expected one {kind}; move the others")
    if subclasses:
        lacks = "; ".join(
            f"{cls.__name__} lacks {', '.join(sorted(cls.__abstractmethods__))}"
            for cls in subclasses
        )
        raise GcbenchError(f"{file} defines no complete {kind}: {lacks}. Add what is missing")
    helper = "; start the name of a helper file with an underscore"
    raise GcbenchError(
        f"{file} defines no {kind}, and imported classes do not count: define one, such as "
        f"class Mine({base.__name__}){helper if executed(module) is None else ''}"
    )


def _third_party(point: EntryPoint, base: type) -> type[Any]:
    source = point.dist.name if point.dist else point.value
    try:
        loaded = point.load()
    except (Exception, SystemExit) as error:
        raise GcbenchError(
            f"{point.name!r} of the package {source} cannot be loaded ({point.value}): {error!r}"
        ) from error
    if not (inspect.isclass(loaded) and issubclass(loaded, base)):
        raise GcbenchError(
            f"{point.name!r} of the package {source}: {point.value} is not a subclass of "
            f"gcbench's {base.__name__}"
        )
    return loaded


def _files(group: str, base: type) -> dict[str, Entry]:
    folder = importlib.import_module(group)
    return {
        name: Entry(name, "built-in", partial(_builtin, group, base, name))
        for _, name, package in pkgutil.iter_modules(folder.__path__)
        if not (package or name.startswith("_"))
    }


def with_third_parties(group: str, base: type, builtin: dict[str, Entry]) -> dict[str, Entry]:
    """Return the built-in entries and those of installed packages, by name.

    `group`: the entry-point group, whose entries are subclasses of `base`. An entry whose name is
    taken, or cannot be part of a folder's name, is skipped with a warning.
    """
    entries = dict(builtin)
    for point in entry_points(group=group):
        source = point.dist.name if point.dist else point.value
        ignored = ""
        if point.name in entries:
            ignored = f"the name is taken by {entries[point.name].source}"
        elif not re.fullmatch(r"\w[\w-]*", point.name):
            ignored = "a name may contain letters, digits, _ and -"
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
    entries = with_third_parties(group, Compressor, _files(group, Compressor))
    return entries | _users_files("compressor", Compressor)


FILES = "GCBENCH_FILES"
MEMORY_FILES = "GCBENCH_MEMORY_FILES"
"""Environment variables with the files that `add_file` registered as compressors and memories, a
JSON list of paths. A run's worker processes inherit them."""
VARIABLES = {"compressor": FILES, "memory": MEMORY_FILES}


def _named_files(kind: str = "compressor") -> dict[str, str]:
    paths = json.loads(os.environ.get(VARIABLES[kind]) or "[]")
    return {Path(path).stem: path for path in paths}


def _users_files(kind: str, base: type) -> dict[str, Entry]:
    return {
        name: Entry(name, f"file {path}", partial(_from_file, name, path, base))
        for name, path in _named_files(kind).items()
    }


class _UsersFile(SourceFileLoader):
    """Executes a user's file, not its .pyc, and stores the executed source.

    A .pyc is keyed by size and mtime in seconds, and a quick edit can change neither.
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
    """Return the executed source of a user's file; None for other modules."""
    loader = getattr(module, "__loader__", None)
    return loader.source if isinstance(loader, _UsersFile) else None


def _from_file(name: str, path: str, base: type) -> type[Any]:
    """Return the subclass of `base` in a user's file, which is imported if it is new or edited."""
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
        before = _generators()
        try:
            loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[module_name]
            raise GcbenchError(f"{path} cannot be loaded: {error!r}") from error
        if _generators() != before:
            del sys.modules[module_name]
            raise GcbenchError(
                f"{path} changes the state of Python's or torch's random generator when it is "
                "loaded; draw from a torch.Generator of your own"
            )
    return _only(module, base, path)


def _generators() -> tuple[object, ...]:
    """Return the states of Python's and torch's global generators."""
    import torch

    return random.getstate(), bytes(torch.random.get_rng_state())


def _forget_changed(name: str, path: str) -> None:
    """Unload the module of a user's file that was edited since it was executed."""
    module = sys.modules.get(_module_name(name))
    if module is not None and Path(path).is_file() and executed(module) != Path(path).read_bytes():
        del sys.modules[_module_name(name)]


def add_file(spec: str, kind: str = "compressor") -> str:
    """Register the plug-in of a Python file under the file's name, and return that name.

    `kind`: "compressor" or "memory", the class to register. A `spec` that does not end in .py is a
    name and is returned unchanged. In both cases a file that was edited since it was imported is
    imported again; existing objects keep their code.

    Raises:
        UsageError: the file does not exist, or its name is taken or contains characters other than
            letters, digits, _ and -, or a memory's name is "auto".
    """
    registered, listed = _named_files(kind), compressors if kind == "compressor" else memories
    if not spec.endswith(".py"):
        if spec in registered:
            _forget_changed(spec, registered[spec])
        return spec
    path = Path(spec).absolute()
    if not path.is_file():
        raise UsageError(f"{spec}: no such file; give the file of a {kind}, e.g. ./mine.py")
    name = path.stem
    if (other := registered.get(name)) and Path(other).exists() and path.samefile(other):
        path = Path(other)  # the same file by another path
    taken = listed().get(name)
    if registered.get(name, "") != str(path) and taken is not None:
        raise UsageError(f"{spec}: the name {name!r} is taken by {taken.source}; rename the file")
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise UsageError(
            f"{spec}: the name of a file may contain letters, digits, _ and -; rename the file"
        )
    if kind == "memory" and name == "auto":
        raise UsageError(f"{spec}: memory auto is the method's own memory; rename the file")
    if name not in registered:
        os.environ[VARIABLES[kind]] = json.dumps([*registered.values(), str(path)])
        listed.cache_clear()
    _forget_changed(name, str(path))
    return name


def spec(name: str, kind: str = "compressor") -> str:
    """Return a compressor or memory as on the command line: the path of its file, or its name.

    A file below the working directory has a relative path, which is also valid in a copy of the
    folder.
    """
    path = Path(_named_files(kind).get(name, name))
    return f"./{path.relative_to(Path.cwd())}" if path.is_relative_to(Path.cwd()) else str(path)


@cache
def memories() -> dict[str, Entry]:
    """Return all registered memories by name, without those defined in a method's file."""
    from gcbench.core.memory import FORCED, Memory

    builtin = _files("gcbench.compressors.memories", Memory)
    builtin[FORCED] = replace(builtin["residual"], name=FORCED)
    entries = with_third_parties("gcbench.memories", Memory, builtin)
    return entries | _users_files("memory", Memory)


def memory_entry(name: str) -> Entry:
    """Return the entry of a memory: a registered one, or that in the file of the method `name`.

    Raises:
        UsageError: neither exists.
    """
    if name in memories():
        return memories()[name]
    if name in compressors():
        memory = compressor_class(name).own_memory
        if memory is not None:
            return replace(compressors()[name], load=lambda: memory)
    raise unknown("memory", name, memories())


@cache
def tasks() -> dict[str, Entry]:
    """Return all registered tasks by name."""
    from gcbench.core.task import Task

    group = "gcbench.tasks"
    return with_third_parties(group, Task, _files(group, Task))


def origin(entry: Entry) -> dict[str, str] | None:
    """Return the origin of a third party's class; None for a built-in class.

    The keys are "distribution", "version", and "sha256", the hash of the names and bytes of the
    package's Python files, or of a single module; "" without a source file. For a user's file,
    "distribution" is `file` and its name without the folder, and the hashed bytes are those that
    were executed.
    """
    if entry.source == "built-in":
        return None
    module = sys.modules[entry.load().__module__.partition(".")[0]]
    folders = [Path(folder) for folder in getattr(module, "__path__", ())]
    paths = ((path, top) for top in folders for path in top.rglob("*.py"))
    files = [(path, path.relative_to(top)) for path, top in paths if path.is_file()]
    if not folders and getattr(module, "__file__", None):
        file = Path(str(module.__file__))
        files = [(file, Path(file.name))]
    digest = hashlib.sha256()
    for path, name in sorted(files, key=lambda each: each[1]):
        source = executed(module) or path.read_bytes()
        digest.update(f"{name}\0".encode() + hashlib.sha256(source).digest())
    named = (_named_files() | _named_files("memory")).get(entry.name)
    return {
        "distribution": entry.source if named is None else f"file {Path(named).name}",
        "version": entry.version,
        "sha256": digest.hexdigest() if files else "",
    }


def source_digest(name: str) -> str:
    """Return the first 10 hex digits of the SHA-256 of a compressor's source, "" without a file.

    It covers the file of a built-in compressor, and the sources of `origin` for a third party's,
    but not code of other packages that the class calls or inherits.
    """
    entry = compressors()[name]
    third_party = origin(entry)
    if third_party is not None:
        return third_party["sha256"][:10]
    file = sys.modules[entry.load().__module__].__file__
    return hashlib.sha256(Path(str(file)).read_bytes()).hexdigest()[:10]


def named(kind: str, entries: dict[str, Entry], name: str) -> type[Any]:
    """Return the class registered as `name` among `entries`; UsageError for an unknown name.

    `kind`: the kind of plug-in, such as "compressor", for errors.

    Raises:
        GcbenchError: the class sets another `name`.
    """
    if name not in entries:
        raise unknown(kind, name, entries)
    cls = entries[name].load()
    declared = vars(cls).get("name")  # a subclass does not inherit its parent's
    if declared and declared != name and cls in _NAMED:
        raise GcbenchError(
            f"{kind} {name!r} ({entries[name].source}): its class {cls.__qualname__} is registered "
            f"as {declared!r}, too; give it one name, or register a subclass"
        )
    if declared and declared != name:
        raise GcbenchError(
            f"{kind} {name!r} ({entries[name].source}): its class {cls.__qualname__} sets name = "
            f"{declared!r}. Remove `name` from the class, or register it as {declared!r}"
        )
    if not declared:
        cls.name = name
        _NAMED.add(cls)
    return cls


_NAMED: set[type[Any]] = set()
"""Classes whose `name` comes from their entry."""


def compressor_class(name: str) -> type[Compressor]:
    """Return the class registered as `name`; UsageError for an unknown name.

    Raises:
        GcbenchError: its memory would have the name of another one.
    """
    cls = named("compressor", compressors(), name)
    if cls.own_memory is not None:
        # A subclass of a built-in method keeps that method's memory, any other class has its own.
        owner = next(each for each in cls.__mro__ if "own_memory" in vars(each))
        package, _, module = owner.__module__.rpartition(".")
        inherited = owner is not cls and package == "gcbench.compressors"
        memory = module if inherited else name
        other = None if inherited else memories().get(name)
        if other is not None and other.load() is not cls.own_memory:
            raise GcbenchError(
                f"compressor {name!r} ({compressors()[name].source}) has a memory, which takes "
                f"the compressor's name, but there is a memory {name!r} ({other.source}). Rename "
                "the file, or register the class by another name"
            )
        cls.memory = memory
    return cls


def memory_class(name: str) -> type[Memory]:
    """Return the class registered as `name`; UsageError for an unknown name."""
    return memory_entry(name).load()


def task_class(name: str) -> type[Task]:
    """Return the class registered as `name`; UsageError for an unknown name."""
    return named("task", tasks(), name)


LATER = {"later": True}
"""Metadata of a field that was added after runs of the method had been published: their rows stay
rows of the method with the field's default."""


def fields(cls: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields that a user may set, by name; empty if the class is not a dataclass."""
    if not dataclasses.is_dataclass(cls):
        return {}
    return {field.name: field for field in dataclasses.fields(cls) if field.init}


def changed(plugin: object) -> list[str]:
    """Return the names of the fields that are not at their defaults, or have none."""
    names = []
    for name, field in fields(type(plugin)).items():
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if getattr(plugin, name) != default:
            names.append(name)
    return names


def _typed(what: str, cls: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Convert values to their fields' types, strictly: 2 becomes 2.0; "no" is refused as a bool."""
    from pydantic import ValidationError
    from pydantic.errors import PydanticUserError

    typed = dict(options)
    for name, value in options.items():
        try:
            hint, adapter = _field_type(cls, name)
            if hint is str and type(value) is int:
                value = str(value)  # YAML parsed a string as a number: norm=2
            typed[name] = adapter.validate_python(value, strict=True)
        except ValidationError as error:
            problems = dict.fromkeys(problem["msg"].lower() for problem in error.errors())
            raise UsageError(f"{what}: {name}={value!r}: {', or '.join(problems)}") from None
        except (NameError, PydanticUserError):
            continue  # pydantic cannot convert this third-party type; the constructor checks it
    return typed


@cache
def _field_type(cls: type[Any], name: str) -> tuple[Any, TypeAdapter[Any]]:
    """Return the type hint of a field, and pydantic's adapter for it."""
    from pydantic import TypeAdapter

    hint = get_type_hints(cls)[name]
    return hint, TypeAdapter(hint)


def call(plugin: object) -> str:
    """Return the constructor call of a plug-in's object, with its fields.

    Fields with the metadata `LATER` are left out at their default.
    """
    values = [
        f"{name}={value!r}"
        for name, field in fields(type(plugin)).items()
        if (value := getattr(plugin, name)) != field.default or not field.metadata.get("later")
    ]
    return f"{type(plugin).__qualname__}({', '.join(values)})"


def make(what: str, cls: type[T], options: dict[str, Any]) -> T:
    """Return `cls(**options)` with values converted to the fields' types; UsageError if invalid."""
    choices = fields(cls)
    for option in options:
        if option not in choices:
            if not choices:
                raise UsageError(f"{what} has no fields; remove {option!r}")
            raise unknown(f"field of {what}:", option, choices)
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
