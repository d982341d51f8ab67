"""From what a user types to the record that is trained: find the recipe, call it, apply the overrides.

    resolved = resolve("tiny", ["schedule.steps=50", "model.num_experts=32"])
    resolved.recipe, resolved.provenance

A recipe is a packaged one, by its bare name, or the path of a .py file that defines `def recipe(**arguments) ->
equimoe.Recipe`. An override `name=value` is an argument of that function if it has one of that name, else the
dotted path of a field; the value is parsed by the declared type. `evals.NAME=PATHS` and `evals.NAME.FIELD=VALUE` add
or change a named set. All problems are raised at once. Reading a
recipe runs its file, so open only files that you would run. Plain Python, no JAX.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

from equimoe.config import ModelConfig
from equimoe.errors import EquimoeError, Problems
from equimoe.files import expanded
from equimoe.presets import PRESETS, derive, preset
from equimoe.recipe import Recipe
from equimoe.recipe.fields import field_types, leaf_types, named_fields, nearest, parse, record_from_dict, words
from equimoe.recipe.recipe_json import new_provenance, refuse_secrets

__all__ = [
    "RecipeLine",
    "Resolved",
    "changed",
    "copy_recipe",
    "list_recipes",
    "packaged_recipes",
    "recipe_arguments",
    "resolve",
    "resolve_model",
]


@dataclass(frozen=True)
class Resolved:
    """A recipe with all overrides applied and checked, and where it came from (kept in recipe.json)."""

    recipe: Recipe
    provenance: dict[str, Any]


@dataclass(frozen=True)
class RecipeLine:
    """A packaged recipe as `equimoe recipes` lists it."""

    name: str
    purpose: str
    cost: str


def resolve(source: str, overrides: Sequence[str] = ()) -> Resolved:
    """The recipe that `source` names, with `overrides` applied. Raises EquimoeError with every problem at once."""
    path = _find(source)
    function = _load(path)
    problems = Problems(f"recipe {source!r} as given on the command line")
    texts = _split(overrides, problems)
    arguments = _arguments(function, texts, problems, subject=f"recipe file {path}")
    recipe = _call(function, arguments, path)
    recipe = _with_fields(
        recipe, {n: t for n, t in texts.items() if n not in _parameters(function)}, problems, also=_parameters(function)
    )
    problems.raise_if_any()
    refuse_secrets([*overrides, recipe.to_dict()])
    return Resolved(recipe, new_provenance(source, overrides, path.read_bytes()))


def recipe_arguments(source: str) -> tuple[str, ...]:
    """Names of the arguments that the function of a recipe takes, such as `racks` of the hero."""
    return tuple(_parameters(_load(_find(source))))


def changed(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """A recipe that exists already (that of a run), with `overrides` applied: dotted field paths only."""
    problems = Problems("changes as given on the command line")
    recipe = _with_fields(recipe, _split(overrides, problems), problems, also=())
    problems.raise_if_any()
    refuse_secrets([*overrides, recipe.to_dict()])
    return recipe


def resolve_model(source: str, overrides: Sequence[str] = ()) -> ModelConfig:
    """The model that `source` names: a recipe's, a preset's, or `width=D` of the ladder with `derive`'s arguments.

    A recipe goes before a preset of the same name: what is counted is what `train` trains.
    """
    problems = Problems(f"model {source!r} as given on the command line")
    if source.startswith("width="):
        texts = _split([source, *overrides], problems)
        unknown = [name for name in texts if name not in _parameters(derive)]
        for name in unknown:
            _refuse_unknown(name, texts[name], _parameters(derive), problems)
        arguments = _arguments(derive, texts, problems, subject="width=D")
        problems.raise_if_any()
        return derive(**arguments)
    if _is_path(source) or source in packaged_recipes():
        return resolve(source, overrides).recipe.model
    if source not in PRESETS:
        known = [*packaged_recipes(), *(name for name in PRESETS if name not in packaged_recipes())]
        raise EquimoeError(
            "model",
            f"must be a recipe or preset ({', '.join(known)}), the path of a recipe file, or width=D",
            _did_you_mean(nearest(source, known)),
            value=source,
        )
    bare = _Bare(preset(source))
    changed = _with_fields(bare, _split(overrides, problems), problems, also=())
    problems.raise_if_any()
    return changed.model


@dataclass(frozen=True)
class _Bare:
    """A model without a run around it, so that overrides of a preset are spelled as those of a recipe."""

    model: ModelConfig


# ---- packaged recipes


def packaged_recipes() -> dict[str, Path]:
    """Name -> file of the recipes that come with the package, sorted by name."""
    spec = find_spec("equimoe.recipes")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return {path.stem: path for folder in folders for path in sorted(Path(folder).glob("[!_]*.py"))}


def list_recipes() -> list[RecipeLine]:
    """Purpose and cost of every packaged recipe, as the recipe itself says them."""
    recipes = [(name, _call(_load(path), {}, path)) for name, path in packaged_recipes().items()]
    return [RecipeLine(name, recipe.purpose, recipe.cost) for name, recipe in recipes]


def copy_recipe(name: str, destination: Path) -> Path:
    """Copy a packaged recipe to a file of yours, to be edited, and return its path. Never overwrites a file."""
    packaged = packaged_recipes()
    if name not in packaged:
        raise EquimoeError(
            "recipe",
            f"must be a packaged one ({', '.join(packaged)})",
            _did_you_mean(nearest(name, packaged)),
            value=name,
        )
    if destination.is_dir():
        destination = destination / f"{name}.py"
    if destination.suffix != ".py":
        raise EquimoeError(
            "destination", "must be a folder or end in .py", f"Use {destination}.py", value=str(destination)
        )
    try:
        with open(destination, "xb") as file:
            file.write(packaged[name].read_bytes())
    except FileExistsError as error:
        raise EquimoeError(
            "destination",
            "already exists, and a copy never overwrites",
            "Choose another name, or remove it",
            value=str(destination),
        ) from error
    except OSError as error:
        raise EquimoeError(
            "destination",
            f"must be writable, but: {error.strerror}",
            "Check the folder and its permissions",
            value=str(destination),
        ) from error
    return destination


# ---- the file


def _is_path(source: str) -> bool:
    return source.endswith(".py") or "/" in source or "\\" in source


def _find(source: str) -> Path:
    packaged = packaged_recipes()
    if not _is_path(source):
        if source in packaged:
            return packaged[source]
        here = Path(f"{source}.py")
        remedy = (
            f"For the file in this folder write {here}" if here.is_file() else _did_you_mean(nearest(source, packaged))
        )
        raise EquimoeError(
            "recipe", f"must be a packaged one ({', '.join(packaged)}) or the path of a .py file", remedy, value=source
        )
    path = expanded(source)
    if not path.is_file() or path.suffix != ".py":
        raise EquimoeError(
            "recipe",
            "must be an existing .py file",
            f"Check the path; the working folder is {Path.cwd()}",
            value=source,
        )
    return path


def _load(path: Path) -> Callable[..., Any]:
    """The function `recipe` of a file, compiled from its text: no stale bytecode, no __pycache__ beside it."""
    module = types.ModuleType(f"equimoe_recipe_{path.stem}")
    module.__file__ = str(path.resolve())
    sys.modules[module.__name__] = module  # dataclasses of the file look themselves up there
    try:
        exec(compile(path.read_bytes(), module.__file__, "exec"), module.__dict__)
    except (Exception, SystemExit, GeneratorExit) as error:  # whatever a user's file raises is named with its place
        raise _inside(path, error) from error
    function = getattr(module, "recipe", None)
    if not inspect.isfunction(function):
        raise EquimoeError(
            f"recipe file {path}",
            "must define a function `recipe`",
            "Write: def recipe() -> equimoe.Recipe, as in `equimoe recipes copy tiny mine.py`",
        )
    return function


def _call(function: Callable[..., Any], arguments: Mapping[str, Any], path: Path) -> Recipe:
    try:
        recipe = function(**arguments)
    except (Exception, SystemExit, GeneratorExit) as error:
        raise _inside(path, error) from error
    if not isinstance(recipe, Recipe):
        raise EquimoeError(
            f"recipe file {path}",
            f"recipe() must return an equimoe.Recipe, it returned {type(recipe).__name__}",
            "End the function with: return Recipe(...)",
            value=recipe,
        )
    # Through plain values and back: the types in a file are not checked by Python, so they are here.
    return record_from_dict(Recipe, recipe.to_dict(), f"recipe file {path}")


def _inside(path: Path, error: BaseException) -> EquimoeError:
    """An error raised inside a recipe file, with the file and line of the user's that led to it."""
    full = str(path.resolve())
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == full]
    line = error.lineno if isinstance(error, SyntaxError) and error.filename == full else lines[-1] if lines else 1
    what = str(error) if isinstance(error, EquimoeError) else f"{type(error).__name__}: {error}"
    # One of ours is most often about what the recipe was given: a run that is not there, a rung of another name.
    remedy = "Give it something else, or repair that line" if isinstance(error, EquimoeError) else "Repair that line"
    return EquimoeError(f"recipe file {path}:{line}", f"must run, but: {what}".rstrip("."), remedy)


# ---- overrides

_SHORT = {"init_from": "init_from.source"}  # what is said so often that it has a short name


def _split(overrides: Sequence[str], problems: Problems) -> dict[str, str]:
    """name=value texts by name. A second value for a name is a problem, never the one that wins."""
    texts: dict[str, str] = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        well_formed = bool(equals) and name.strip() == name != ""
        problems.require(
            well_formed,
            "override",
            override,
            "must be name=value",
            "write for example schedule.steps=50, without spaces around =, and quote a glob",
        )
        if well_formed:
            problems.require(
                name not in texts, name, text, f"is given twice, before it was {texts.get(name)!r}", "keep one"
            )
            texts.setdefault(name, text)
    return texts


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: p for name, p in inspect.signature(function).parameters.items() if p.kind in named}


def _arguments(
    function: Callable[..., Any], texts: Mapping[str, str], problems: Problems, *, subject: str
) -> dict[str, Any]:
    """The texts that name arguments of `function`, parsed by their annotation, else by the type of their default."""
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:
        raise EquimoeError(
            subject, f"the annotations of recipe() must resolve, but: {error}", "Import the names they use"
        ) from error
    arguments: dict[str, Any] = {}
    for name, parameter in _parameters(function).items():
        kind = hints.get(name, str if parameter.default in (None, parameter.empty) else type(parameter.default))
        if name in texts:
            try:
                arguments[name] = parse(texts[name], kind)
            except ValueError as error:
                problems.require(False, name, texts[name], str(error), "write it in that type")
        elif parameter.default is parameter.empty:
            problems.require(False, name, None, f"must be given, {words(kind)}", f"add {name}=VALUE")
    if any(p.default is p.empty and name not in arguments for name, p in _parameters(function).items()):
        problems.raise_if_any()  # without these there is no recipe to check the rest against
    return arguments


def _with_fields(record: Any, texts: Mapping[str, str], problems: Problems, *, also: Iterable[str]) -> Any:
    """`record` (a Recipe, or a `_Bare` model) with the fields at dotted paths changed; problems are collected."""
    kinds = leaf_types(type(record))
    named = {field: {} for field in named_fields(type(record))}
    values: dict[str, Any] = {}
    for name, text in texts.items():
        name = _SHORT.get(name, name)
        group, _, rest = name.partition(".")
        field = next((field for field in named if f"{name}.".startswith(f"{field}.")), None)
        if field is not None and name != field:
            named[field][name[len(field) + 1 :]] = text
        elif field is not None:
            first = next(iter(field_types(named_fields(type(record))[field])))
            example = f"{field}.NAME=PATHS" if first == "path" else f"{field}.NAME.{first}=VALUE"
            problems.require(False, name, text, "holds records by name", f"write {example}")
        elif name not in kinds:
            meant = nearest(group, named) if rest and not any(k.startswith(f"{group}.") for k in kinds) else None
            _refuse_unknown(name, text, [f"{meant}.{rest}"] if meant else [*also, *kinds], problems)
        else:
            _parse_into(values, name, text, kinds[name], problems)
    for field, given in named.items():
        if given:
            values[field] = _with_named(attrgetter(field)(record), field, given, problems)
    return _rebuilt(record, values, "", problems)


def _parse_into(values: dict[str, Any], name: str, text: str, kind: Any, problems: Problems, path: str = "") -> None:
    """values[name] = what `text` writes; if it writes nothing of that type, a problem of `path` (default: `name`)."""
    try:
        values[name] = parse(text, kind)
    except ValueError as error:
        problems.require(False, path or name, text, str(error), "write it in that type")


def _with_named(records: Mapping[str, Any], field: str, texts: Mapping[str, str], problems: Problems) -> dict[str, Any]:
    """The records of a field such as `evals`, with `NAME` (its path) and `NAME.FIELD` changed, or added."""
    kind = named_fields(Recipe)[field]
    kinds, by_name = field_types(kind), {}
    needed = [f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING]
    for rest, text in texts.items():
        name, _, inner = rest.partition(".")
        inner = inner or ("path" if "path" in kinds else "")
        if inner not in kinds:
            _refuse_unknown(f"{field}.{rest}", text, [f"{field}.{name}.{known}" for known in kinds], problems)
            continue
        values = by_name.setdefault(name, {})
        if inner in values:
            problems.require(False, f"{field}.{rest}", text, "is given twice", f"keep {field}.{name} or {field}.{rest}")
        _parse_into(values, inner, text, kinds[inner], problems, f"{field}.{rest}")
    changed = dict(records)
    for name, values in by_name.items():
        if name in records:
            changed[name] = dataclasses.replace(records[name], **values)
        elif all(inner in values for inner in needed):
            changed[name] = kind(**values)
        else:
            close, missing = nearest(name, records), [inner for inner in needed if inner not in values]
            adding = " ".join(f"{field}.{name}{'=PATHS' if i == 'path' else f'.{i}=VALUE'}" for i in missing)
            remedy = f"did you mean {field}.{close}?" if close else f"add {adding}"
            lacks = f"is none of this recipe's, and no {' and no '.join(missing)} is given"
            problems.require(False, f"{field}.{name}", None, lacks, remedy)
    return changed


def _refuse_unknown(name: str, text: str, known: Iterable[str], problems: Problems) -> None:
    known = list(known)
    inside = [path for path in known if path.startswith(f"{name}.")]
    if inside:
        problems.require(
            False, name, text, "is a group of fields, not a value", f"set one of them, such as {inside[0]}"
        )
    else:
        problems.require(
            False,
            name,
            text,
            "is no argument or field of this recipe",
            _did_you_mean(nearest(name, known)).lower().rstrip("."),
        )


def _rebuilt(record: Any, values: Mapping[str, Any], prefix: str, problems: Problems) -> Any:
    """Replace inner records first, so that a wrong model and a wrong schedule are reported together."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        path, current = f"{prefix}{field.name}", getattr(record, field.name)
        if dataclasses.is_dataclass(current):
            changes[field.name] = _rebuilt(current, values, f"{path}.", problems)
        elif path in values:
            changes[field.name] = values[path]
    if isinstance(record, ModelConfig):
        changes = _derived_again(record, changes)
    try:
        return dataclasses.replace(record, **changes)
    except EquimoeError as error:
        problems.include(error)
        return record


def _derived_again(model: ModelConfig, changes: dict[str, Any]) -> dict[str, Any]:
    """Numbers that `ModelConfig` derived from others follow those others, unless they are set by themselves.

    Otherwise model.hidden_size=256 would keep the initialiser's sigma of the old width, and nobody would see it.
    """
    if model.initializer_range == 0.5 / model.hidden_size**0.5 and "hidden_size" in changes:
        changes = {"initializer_range": 0.0, **changes}
    if model.num_key_value_heads == max(model.local_kv_heads, model.global_kv_heads) and (
        "local_kv_heads" in changes or "global_kv_heads" in changes
    ):
        changes = {"num_key_value_heads": 0, **changes}
    return changes


def _did_you_mean(name: str | None) -> str:
    return f"Did you mean {name}?" if name else "`equimoe recipes` lists the recipes, `equimoe show RECIPE` the fields"
