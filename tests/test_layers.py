"""The layer order of the package, read from its imports: a module imports only from layers under its own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# From the bottom up. A line is one layer; a folder stands for all its modules. Inside a folder modules may import each
# other, but not in a circle; modules that share a line may not import each other.
LAYERS = [
    ["axes", "errors"],
    ["files", "tables"],
    ["hardware", "pictures"],
    ["config"],
    ["weights"],
    ["counting", "presets"],
    ["recipe"],
    ["parallel"],
    ["model"],
    ["optim"],
    ["plan"],  # under train, which refuses what the plan says cannot fit
    ["ladder"],  # under train, which shows a run beside its prediction
    ["data"],
    ["baselines"],
    ["objectives"],
    ["evaluate", "sampling"],
    ["train"],
    ["hub"],  # above train: loading reads an export or a run
    ["chat", "tasks", "bench", "launch"],
    ["rehearsal"],  # acts out what the others do, on routing of a loaded model too
    ["cli"],
    ["recipes"],
]
HEIGHT = {name: height for height, layer in enumerate(LAYERS) for name in layer}
NO_JAX = {
    "axes",
    "errors",
    "files",
    "tables",
    "hardware",
    "pictures",
    "config",
    "weights",
    "counting",
    "presets",
    "recipe",
    "plan",
    "ladder",
    "data",
    "launch",
    "cli",
    "recipes",
}
# Carried by exports; checked by its own test.
SHIPPED_AS_DATA = ROOT / "equimoe" / "hub" / "exporting" / "transformers_code"
HEAVY = {"jax", "jaxlib", "equinox", "optax", "orbax"}


def modules() -> dict[str, Path]:
    """Dotted name -> file of every module that is shipped, `equimoe.cli.*` and `equimoe.recipes.*` too."""
    found = {}
    for folder, package in (
        (ROOT / "equimoe", "equimoe"),
        (ROOT / "cli", "equimoe.cli"),
        (ROOT / "recipes", "equimoe.recipes"),
    ):
        for file in sorted(folder.rglob("*.py")):
            if SHIPPED_AS_DATA in file.parents:
                continue
            parts = [package, *file.relative_to(folder).with_suffix("").parts]
            found[".".join(p for p in parts if p != "__init__")] = file
    return found


MODULES = modules()


def layer_of(module: str) -> str | None:
    """`equimoe.model.norm` -> `model`; None for `equimoe` itself, whose names are imported when first used."""
    return module.split(".")[1] if "." in module else None


def imports(file: Path, *, top_level_only: bool = False) -> set[str]:
    """Every module that a file imports, also inside functions; `from a import b` is a.b where that is a module."""
    tree, found = ast.parse(file.read_text(encoding="utf-8")), set()
    guarded = {
        id(n)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for n in ast.walk(node)
    }
    inside = (
        {id(n) for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.Lambda)) for n in ast.walk(node)}
        if top_level_only
        else set()
    )
    for node in ast.walk(tree):
        if id(node) in guarded or id(node) in inside:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            found |= {
                f"{node.module}.{a.name}" if f"{node.module}.{a.name}" in MODULES else node.module for a in node.names
            }
    return found


def ours(names: set[str]) -> set[str]:
    return {n for n in names if n == "equimoe" or n.startswith("equimoe.")}


def test_every_module_has_a_layer():
    unknown = {m for m in MODULES if layer_of(m) not in HEIGHT and m != "equimoe"}
    assert not unknown, f"{sorted(unknown)}: add them to LAYERS, where they belong"


@pytest.mark.parametrize("module", [m for m in MODULES if m != "equimoe"])
def test_a_module_imports_only_from_layers_under_it(module):
    own = layer_of(module)
    for imported in ours(imports(MODULES[module])):
        other = layer_of(imported)
        if other is None or other == own:
            continue  # `import equimoe` gives lazy names only
        assert HEIGHT[other] < HEIGHT[own], f"{module} imports {imported}, which is not under it"


def test_no_module_needs_torch():
    """Nor what an export carries for transformers: neither is a dependency. `through_torch` asks for them inside."""
    assert not imports(MODULES["equimoe.hub.exporting.through_torch"], top_level_only=True) & {"torch", "transformers"}
    for module, file in MODULES.items():
        if module == "equimoe.hub.exporting.through_torch":
            continue
        found = {n.split(".")[0] for n in imports(file)} & {"torch", "transformers", SHIPPED_AS_DATA.name}
        found |= {n for n in imports(file) if SHIPPED_AS_DATA.name in n}
        assert not found, f"{module} imports {sorted(found)}"


def test_lm_eval_is_optional():
    """Two modules import it at their top, and others import those inside functions only."""
    needing = {"equimoe.tasks.adapter", "equimoe.tasks.harness"}
    found = {m for m, f in MODULES.items() if {n.split(".")[0] for n in imports(f, top_level_only=True)} & {"lm_eval"}}
    assert found == needing
    for module, file in MODULES.items():
        if module not in needing:
            assert not imports(file, top_level_only=True) & needing, module


def test_no_import_circle_inside_a_layer():
    graph = {
        m: {i for i in ours(imports(f, top_level_only=True)) if i in MODULES and layer_of(i) == layer_of(m)} - {m}
        for m, f in MODULES.items()
    }
    while free := {m for m, needs in graph.items() if not needs & graph.keys()}:
        graph = {m: needs for m, needs in graph.items() if m not in free}
    assert not graph, f"in a circle, or above one: {sorted(graph)}"


@pytest.mark.parametrize("module", [m for m in MODULES if m == "equimoe" or layer_of(m) in NO_JAX])
def test_light_layers_start_without_jax(module):
    """Imports at the top only; a command may import heavy things when it runs. `data` may nowhere."""
    heavy = {n.split(".")[0] for n in imports(MODULES[module], top_level_only=layer_of(module) != "data")} & HEAVY
    assert not heavy, f"{module} imports {sorted(heavy)}"


BACKEND_WORDS = ("jax.default_backend", "jax.devices(", "jax.local_devices", ".platform")


def asks_for_the_backend(source: str) -> list[str]:
    """Code (not comments or strings) that asks which backend or device this is."""
    code = ast.unparse(_without_strings(ast.parse(source)))
    return [word for word in BACKEND_WORDS if word in code]


def _without_strings(tree: ast.AST) -> ast.AST:
    class Blank(ast.NodeTransformer):
        def visit_Constant(self, node):
            return ast.Constant("") if isinstance(node.value, str) else node

        def visit_JoinedStr(self, node):
            return node

    return Blank().visit(tree)


@pytest.mark.parametrize("module", MODULES)
def test_only_capabilities_looks_at_the_backend(module):
    found = asks_for_the_backend(MODULES[module].read_text(encoding="utf-8"))
    if module == "equimoe.parallel.capabilities":
        assert "jax.default_backend" in found and "jax.devices(" in found
    else:
        assert not found, f"{module} asks for {found}: read equimoe.parallel.capabilities instead"


def test_the_checks_can_fail(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("from equimoe.model import norm\ndef f():\n    import jax\n    return jax.devices()[0].platform\n")
    assert ours(imports(bad)) == {"equimoe.model.norm"} and HEIGHT["model"] > HEIGHT["config"]
    assert imports(bad, top_level_only=True) == {"equimoe.model.norm"}
    assert asks_for_the_backend(bad.read_text()) == ["jax.devices(", ".platform"]
    assert asks_for_the_backend('"""jax.devices() in words"""\n# jax.default_backend\n') == []
