"""What no single package can promise: each builds, installs and imports alone, and their version ranges agree."""

import email
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
NAMES = "core eviction tiers remote observe codecs server cluster connect cuda vllm sglang blend"
SIBLINGS = {f"kv-{name}" for name in NAMES.split()}


def described(package: Path) -> dict[str, object]:
    project: dict[str, object] = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    return project


def requirements(package: Path) -> list[Requirement]:
    listed = described(package).get("dependencies", [])
    assert isinstance(listed, list)
    return [Requirement(text) for text in listed]


def test_the_packages_are_there_with_the_same_skin() -> None:
    assert {package.name for package in PACKAGES} == SIBLINGS
    for package in PACKAGES:
        module = package / "src" / package.name.replace("-", "_")
        for part in (package / "README.md", package / "tests", module / "__init__.py", module / "py.typed"):
            assert part.exists(), part


def test_each_names_a_range_of_its_siblings_that_holds_their_version() -> None:
    versions = {package.name: Version(str(described(package)["version"])) for package in PACKAGES}
    for package in PACKAGES:
        for requirement in requirements(package):
            if requirement.name in versions:
                assert requirement.specifier.contains(versions[requirement.name]), (package.name, str(requirement))
                assert any(bound.operator == "<" for bound in requirement.specifier), (
                    f"{requirement} has no upper bound"
                )


def test_every_third_party_requirement_has_an_upper_bound() -> None:
    for package in PACKAGES:
        for requirement in requirements(package):
            assert any(bound.operator in ("<", "==", "~=") for bound in requirement.specifier), (
                package.name,
                requirement,
            )


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("wheels")
    build = [sys.executable, "scripts/wheels.py", "--url", "https://example.org/kv/", "--directory", made]
    subprocess.run(build, check=True, capture_output=True, cwd=ROOT)
    return made


def wanted_alone(package: Path) -> set[str]:
    """The sibling packages that this one may bring along."""
    found = {requirement.name for requirement in requirements(package)} & SIBLINGS
    return found | {deeper for name in found for deeper in wanted_alone(ROOT / "packages" / name)}


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_each_wheel_installs_and_imports_alone(package: Path, wheels: Path, tmp_path: Path) -> None:
    """In a clean environment: the wheel, its siblings' wheels, and of third parties only what its metadata asks for.

    Third-party packages are borrowed from this environment one by one (a link each), so that nothing is fetched and
    nothing that is not declared is there.
    """
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    (site,) = environment.glob("lib/python*/site-packages")
    module = package.name.replace("-", "_")
    wanted = {package.name} | wanted_alone(package)
    for name in wanted:
        (wheel,) = wheels.glob(f"{name.replace('-', '_')}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    third_party = {
        requirement.name
        for name in wanted
        for requirement in requirements(ROOT / "packages" / name)
        if requirement.name not in SIBLINGS
    }
    _borrow(site, third_party)
    python = environment / "bin" / "python"
    code = f"import {module}, sys; print({module}.__file__)"
    if package.name in ("kv-vllm", "kv-sglang"):  # their settings may have any tier of ours
        code += "; from kv_tiers.build import tier_factory; tier_factory('redis'), tier_factory('s3')"
    checked = subprocess.run(
        [python, "-I", "-W", "error", "-c", code],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stderr
    assert str(site) in checked.stdout
    for stranger in SIBLINGS - wanted:
        absent = subprocess.run([python, "-I", "-c", f"import {stranger.replace('-', '_')}"], capture_output=True)
        assert absent.returncode != 0, f"{stranger} is there, so the check proves nothing"


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["there", "missing"])
def test_kv_codecs_builds_with_a_compiler_and_without(compiler: str, wheels: Path, tmp_path: Path) -> None:
    """Without one the wheel is pure, and its codecs use numpy."""
    if compiler == "missing":
        subprocess.run(
            [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, "packages/kv-codecs"],
            check=True,
            capture_output=True,
            cwd=ROOT,
            env=os.environ | {"CC": "/bin/false"},
        )
    elif not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("there is no C compiler")
    (wheel,) = (wheels if compiler == "there" else tmp_path).glob("kv_codecs-*.whl")
    assert wheel.name.endswith("-py3-none-any.whl") == (compiler == "missing")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            "from kv_codecs import kernels as k; print(k.__file__, (k.installed_kernels() or k.NumpyFloats()).name)",
        ],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
    )
    where, kernels = ran.stdout.split()
    assert Path(where).is_relative_to(tmp_path)
    assert kernels == ("compiled" if compiler == "there" else "numpy")


def _borrow(site: Path, names: set[str]) -> None:
    """Link these distributions, and what they need themselves, from this environment into `site`."""
    from importlib.metadata import PackageNotFoundError, distribution

    todo, done = set(names), set()
    while todo:
        name = todo.pop()
        done.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue  # for another platform, or an extra that nobody asked for
        tops = {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            target, link = Path(str(found.locate_file(top))), site / top
            if not link.exists():
                link.symlink_to(target)
        for text in found.requires or ():
            requirement = Requirement(text)
            if (
                requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            ) and requirement.name not in done:
                todo.add(requirement.name)


@pytest.mark.parametrize("url", ["http://example.org/kv", "https://", "https://example.org/kv#a", 'https://e.org/"'])
def test_wheels_name_no_address_that_is_none(url: str, tmp_path: Path) -> None:
    build = [sys.executable, "scripts/wheels.py", "--url", url, "--directory", tmp_path]
    refused = subprocess.run(build, capture_output=True, text=True, cwd=ROOT)
    assert refused.returncode == 2
    assert f"{url!r} is not the address of a project" in refused.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_wheels_carry_their_types_licence_and_addresses_and_no_tests(wheels: Path) -> None:
    for package in PACKAGES:
        module = package.name.replace("-", "_")
        (wheel,) = wheels.glob(f"{module}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            (described_in,) = (name for name in names if name.endswith(".dist-info/METADATA"))
            metadata = email.message_from_bytes(archive.read(described_in))
            (licence,) = (name for name in names if name.endswith(".dist-info/licenses/LICENSE"))
            assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
        assert metadata["License-Expression"] == "Apache-2.0"
        assert "Typing :: Typed" in metadata.get_all("Classifier", [])
        assert metadata.get_all("Project-URL") == [
            "Homepage, https://example.org/kv",
            "Source, https://example.org/kv",
            "Issues, https://example.org/kv/issues",
        ]
        assert f"{module}/py.typed" in names
        assert ("kv_server/http/page.html" in names) == (module == "kv_server")
        assert not [name for name in names if name.startswith("tests/")]


@pytest.mark.slow
def test_a_packages_readme_links_to_nothing_that_its_wheel_has_not(wheels: Path) -> None:
    """On an index it stands alone: a link to a file beside it leads nowhere."""
    for package in PACKAGES:
        links = re.findall(r"\]\(([^)]+)\)", (package / "README.md").read_text())
        assert [link for link in links if not link.startswith(("https://", "#"))] == [], package.name
