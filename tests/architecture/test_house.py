"""The rules of STYLE_GUIDE.md ("Keep it small") that a machine can hold.

What breaks a rule today is listed and the list can only shrink: a test fails for whatever is new, and for whatever is
listed and keeps the rule by now.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

Sources = Mapping[str, ast.Module]
"""Modules by their dotted name; a package's own ends with `.__init__`."""


def words(text: str) -> set[str]:
    return set(text.split())


MOST_LINES = 15_000
"""Of Python and C in a package. Before kv-eviction and kv-remote left it, kv-tiers had 19,984."""
MOST_METHODS = 12
MOST_ATTRIBUTES = 10
MOST_FILES_OF_AN_OPTION = 4

ONE_IMPORTER_AND_NO_CLASS = words("kv_sglang.calibrated kv_vllm.bind kv_vllm.calibrated")
MANY_METHODS = words(
    """
    Administration CacheService CodecContract DiskChunks ExtentIndex HostPool HostTier Jobs KVStorage
    KVTiersConnector Lane Leases LocalCache LowerTiers Mirror PageStore PeersTier ReadOnlyTierContract
    RemoteCache Residency SchedulerHalf Shares TierContract
    """
)
MANY_ATTRIBUTES = words(
    """
    CacheServer Caches ChunkRecords Codes Contents CpuCopier Directory DiskChunks DiskDirectory Engine
    EngineCosts Estimator EventBus ExtentIndex HostPool HostTier Jobs KVLinker KVTiersConnector Lane Link
    LocalCache Mirror MooncakeTier NodesCache PageStore Peer PeerHosts PeerServer PeersTier
    PinnedMapping PopulatedPages Promotions RedisTier Upgrades RemoteCache Residency SchedulerHalf
    Segment Servers SharedFsTier Source Stores WorkerHalf _DrainJob _Ring _KernelPipeline
    """
)
FILES_OF_AN_OPTION = {"costs": 17, "hold_s": 9, "lasting": 10, "wait_for_promotion": 7}
"""How many name each. The options `shape` and `tiers` have names that mean other things, too, and are not counted."""
COMMON_WORDS = {"shape", "tiers"}


@cache
def sources() -> Sources:
    packages = Path(__file__).parents[2] / "packages"
    found = {}
    for path in sorted(packages.glob("*/src/**/*.py")):
        name = path.as_posix().rpartition("/src/")[2].removesuffix(".py").replace("/", ".")
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    assert len(found) > 100
    return found


def planted(**texts: str) -> Sources:
    """Modules in one package, `a`, for a look at what is found in them."""
    return {f"a.{name}": ast.parse(text) for name, text in texts.items()}


def classes(modules: Iterable[ast.Module]) -> Iterator[ast.ClassDef]:
    return (node for tree in modules for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def defined_twice(modules: Sources) -> dict[str, list[str]]:
    """The names that several classes have, private ones too, and the modules that define them."""
    where: dict[str, list[str]] = {}
    for module, tree in modules.items():
        for made in classes([tree]):
            where.setdefault(made.name, []).append(module)
    return {name: found for name, found in where.items() if len(found) > 1}


def one_importer_and_no_class(modules: Sources) -> set[str]:
    """Modules that one module imports, and that own no type: their functions belong where they are used."""
    importers: dict[str, set[str]] = {name: set() for name in modules}
    for name, tree in modules.items():
        for node in ast.walk(tree):
            targets = []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                targets = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
            elif isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            for target in targets:
                importers.get(target, set()).add(name)
    lone = {name for name, by in importers.items() if len(by - {name}) == 1 and not name.endswith("__init__")}
    return {name for name in lone if not list(classes([modules[name]]))}


def many_methods(modules: Sources) -> set[str]:
    found = set()
    for made in classes(modules.values()):
        functions = [node for node in made.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        if len({node.name for node in functions if not node.name.startswith("_")}) > MOST_METHODS:
            found.add(made.name)
    return found


def many_attributes(modules: Sources) -> set[str]:
    """Those that its methods set. The fields of records are data, and are not counted."""
    found = set()
    for made in classes(modules.values()):
        stored = [
            node for node in ast.walk(made) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        ]
        if len({node.attr for node in stored if ast.unparse(node.value) == "self"}) > MOST_ATTRIBUTES:
            found.add(made.name)
    return found


def options_of_verbs(modules: Sources) -> set[str]:
    """The keyword arguments of `CacheService`'s methods, and the fields of the records that they unpack."""
    by_name = {made.name: made for made in classes(modules.values())}
    functions = [node for node in by_name["CacheService"].body if isinstance(node, ast.FunctionDef)]
    options = {argument.arg for node in functions for argument in node.args.kwonlyargs}
    for node in functions:
        if node.args.kwarg and isinstance(record := node.args.kwarg.annotation, ast.Subscript):
            fields = by_name[ast.unparse(record.slice)].body
            options |= {ast.unparse(field.target) for field in fields if isinstance(field, ast.AnnAssign)}
    return options - COMMON_WORDS


def files_of_options(modules: Sources) -> dict[str, int]:
    """In how many modules each option is named, of those in more than a new one may be."""

    def names(tree: ast.Module) -> set[str]:
        found = set()
        for node in ast.walk(tree):
            for kind, field in ((ast.arg, "arg"), (ast.keyword, "arg"), (ast.Attribute, "attr"), (ast.Name, "id")):
                if isinstance(node, kind):
                    found.add(getattr(node, field))
        return found

    named = [names(tree) for tree in modules.values()]
    counted = {option: sum(option in names for names in named) for option in options_of_verbs(modules)}
    return {option: count for option, count in counted.items() if count > MOST_FILES_OF_AN_OPTION}


def capabilities_without_a_caller(modules: Sources) -> set[str]:
    """Optional protocols that no production code asks an object for."""
    asked = set()
    for name, tree in modules.items():
        if ".testing" not in name:
            calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) > 1]
            kinds = [ast.unparse(node.args[1]) for node in calls if ast.unparse(node.func) == "isinstance"]
            asked |= {word for kind in kinds for word in re.findall(r"\w+", kind)}
    optional = {
        made.name
        for made in classes(modules.values())
        if any(ast.unparse(decorator) == "runtime_checkable" for decorator in made.decorator_list)
    }
    return optional - asked


def without_one_idea(modules: Sources) -> set[str]:
    """Modules without a docstring, and folders whose first sentence joins two ideas by "and"."""
    found = set()
    for name, tree in modules.items():
        paragraph = " ".join((ast.get_docstring(tree) or "").partition("\n\n")[0].split())
        sentence = re.split(r"(?<=[.!?])\s", paragraph)[0]
        joined = re.search(r"\band\b", re.sub(r"\bbetween .*?\band\b", "", sentence))
        if not sentence or (name.endswith(".__init__") and joined):
            found.add(name)
    return found


def test_no_package_is_too_large_to_read() -> None:
    packages = sorted((Path(__file__).parents[2] / "packages").iterdir())
    lines = {
        package.name: sum(
            path.read_text(encoding="utf-8").count("\n")
            for path in (package / "src").rglob("*")
            if path.suffix in (".py", ".c", ".h")
        )
        for package in packages
    }
    assert len(lines) > 10
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def test_a_word_has_one_meaning() -> None:
    found = [
        f"{name} is defined in {' and '.join(places)}" for name, places in sorted(defined_twice(sources()).items())
    ]
    assert not found, "\n".join(["Rename one class of each pair to say what it is, or make them one:", *found])


def test_a_module_with_one_importer_owns_a_type() -> None:
    """Else it is folded into the one that imports it."""
    assert one_importer_and_no_class(sources()) == ONE_IMPORTER_AND_NO_CLASS


def test_a_class_has_one_noun() -> None:
    """Beyond so many methods or attributes there is a second one inside."""
    assert many_methods(sources()) == MANY_METHODS
    assert many_attributes(sources()) == MANY_ATTRIBUTES


def test_an_option_of_a_verb_touches_few_files() -> None:
    """A record of arguments carries it from the engine to the cache. Of a listed option, lower the number."""
    assert files_of_options(sources()) == FILES_OF_AN_OPTION


def test_every_capability_has_a_caller() -> None:
    assert capabilities_without_a_caller(sources()) == set()


def test_every_file_says_what_it_is_and_every_folder_its_one_idea() -> None:
    assert without_one_idea(sources()) == set()


METHODS = "\n".join(f"    def m{number}(self): self.a{number} = 0" for number in range(13))


@pytest.mark.parametrize(
    ("rule", "modules", "found"),
    [
        (defined_twice, planted(b="class Taken: ...", c="class Taken: ..."), {"Taken": ["a.b", "a.c"]}),
        (defined_twice, planted(b="class Taken: ...", c="class Returned: ..."), {}),
        (one_importer_and_no_class, planted(b="def f(): ...", c="from a.b import f"), {"a.b"}),
        (one_importer_and_no_class, planted(b="def f(): ...", c="from a import b", d="import a.b"), set()),
        (one_importer_and_no_class, planted(b="class State: ...", c="from a.b import State"), set()),
        (many_methods, planted(b=f"class Manager:\n{METHODS}"), {"Manager"}),
        (many_methods, planted(b="class Small:\n    def m(self): ..."), set()),
        (many_attributes, planted(b=f"class Manager:\n{METHODS}"), {"Manager"}),
        (many_attributes, planted(b="class Record:\n" + "\n".join(f"    a{n}: int" for n in range(13))), set()),
        (capabilities_without_a_caller, planted(b="@runtime_checkable\nclass Flies(Protocol): ..."), {"Flies"}),
        (
            capabilities_without_a_caller,
            planted(b="@runtime_checkable\nclass Flies(Protocol): ...", c="isinstance(tier, Flies)"),
            set(),
        ),
        (without_one_idea, planted(b="x = 1"), {"a.b"}),
        (without_one_idea, planted(__init__='"""Stores chunks and serves pages. More."""'), {"a.__init__"}),
        (without_one_idea, planted(__init__='"""Copies between host and device. And more."""'), set()),
    ],
)  # fmt: skip
def test_each_rule_finds_what_breaks_it(rule, modules: Sources, found: object) -> None:  # type: ignore[no-untyped-def]
    assert rule(modules) == found


def test_an_option_that_is_in_many_files_is_found() -> None:
    written = "class CacheService(Protocol):\n    def load(self, keys, *, lasting=False, tiers=None): ..."
    record = "class Options(TypedDict):\n    lasting: bool\n"
    unpacked = record + "class CacheService(Protocol):\n    def load(self, keys, **options: Unpack[Options]): ..."
    users = {f"user{number}": "cache.load(keys, lasting=True, tiers=[])" for number in range(MOST_FILES_OF_AN_OPTION)}
    for service in (written, unpacked):
        assert files_of_options(planted(service=service, **users)) == {"lasting": 5}
    users.popitem()
    assert files_of_options(planted(service=written, **users)) == {}
