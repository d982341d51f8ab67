"""The wheel: one top-level package, everything in it, and it works without the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

import equimoe

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).parents[1]
SETUPTOOLS_NEEDED = 77  # reads `license = "Apache-2.0"`; pyproject.toml asks for it


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy of what is packaged, so that no stale build folder of the checkout gets in."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("equimoe", "cli", "recipes"):
        shutil.copytree(CHECKOUT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(CHECKOUT / name, source / name)
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(source)]
    if int(version("setuptools").split(".")[0]) >= SETUPTOOLS_NEEDED:
        command.append("--no-isolation")
    built = subprocess.run(command, capture_output=True, text=True, cwd=source)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The script `equimoe` of a fresh environment that holds the wheel and, by path, the dependencies of this one."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)],
        check=True,
        capture_output=True,
    )
    site = Path(
        subprocess.run(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
    )
    # A .pth inside a folder that a .pth names is not read: an editable install of the checkout stays out.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n" + sysconfig.get_path("platlib") + "\n")
    return folder / "bin" / "equimoe"


def test_the_only_top_level_package_is_equimoe(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"equimoe"}
    for name in ("equimoe/cli/app.py", "equimoe/recipes/tiny.py", "equimoe/recipes/hero.py", "equimoe/py.typed"):
        assert name in names
    assert [name for name in names if name.endswith("/licenses/LICENSE")]
    assert not [name for name in names if "tests" in name.split("/")]


def test_every_module_of_the_checkout_is_in_it(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    wanted = {str(path.relative_to(CHECKOUT)) for path in (CHECKOUT / "equimoe").rglob("*.py")}
    wanted |= {
        f"equimoe/{path.relative_to(CHECKOUT)}"
        for part in ("cli", "recipes")
        for path in (CHECKOUT / part).glob("*.py")
    }
    assert wanted - names == set()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--version"], f"equimoe {equimoe.__version__}"),
        (["params", "hero"], "535,477,106,688"),
        (["show", "tiny"], "8 x 256 = 2,048 tokens a step"),
        (["recipes"], "tiny "),
    ],
)
def test_it_runs_from_anywhere(installed, tmp_path, arguments, expected):
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    done = subprocess.run([str(installed), *arguments], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def test_it_is_not_the_checkout_that_runs(installed, tmp_path):
    python = installed.parent / "python"
    code = "import equimoe as a, equimoe.cli as b, equimoe.recipes as c; print(a.__file__, b.__file__, c.__file__)"
    done = subprocess.run([str(python), "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert str(CHECKOUT) not in done.stdout
    assert done.stdout.count(str(installed.parents[1])) == 3
