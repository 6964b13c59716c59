"""The README stays true where a machine can tell: its settings are the defaults, its links lead somewhere."""

import re
import subprocess
import textwrap
from pathlib import Path

import msgspec
import yaml
from kv_remote.objects import ObjectsConfig
from kv_remote.redis import RedisConfig
from kv_server.peers.tier import PeersTierConfig
from kv_tiers.build import tier_factory
from kv_tiers.config import LaneConfig
from kv_tiers.options import read_options
from kv_tiers.settings import Settings, load
from kv_tiers.tiers.disk import DiskConfig

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
YAML = re.findall(r"```yaml\n(.*?)```", README, flags=re.DOTALL)
OPTIONS: dict[str, type[msgspec.Struct]] = {
    "disk": DiskConfig,
    "redis": RedisConfig,
    "s3": ObjectsConfig,
    "peers": PeersTierConfig,
}


def test_the_settings_it_shows_are_at_their_defaults() -> None:
    assert load(yaml.safe_load(YAML[0]), {})[0] == Settings()


def test_the_tiers_it_shows_can_be_written_so() -> None:
    settings, _ = load(yaml.safe_load(YAML[1]), {})
    assert [tier["type"] for tier in settings.tiers] == list(OPTIONS)
    common = {"type", *LaneConfig.__struct_fields__}
    for tier in settings.tiers:
        tier_factory(tier["type"])
        own = {name: value for name, value in tier.items() if name not in common}
        read_options(OPTIONS[tier["type"]], own, tier["type"])


def test_the_settings_that_any_document_shows_are_settings() -> None:
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/README.md")]:
        for block in re.findall(r"^ *```yaml\n(.*?)^ *```", document.read_text(), re.MULTILINE | re.DOTALL):
            shown = block.replace("salt_file: /run/secrets/team-a", "salt: made-up")  # a file that is nobody's here
            load(yaml.safe_load(textwrap.dedent(shown)), {})


def headings(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_every_link_in_the_documents_leads_to_a_file_and_a_heading() -> None:
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/README.md")]:
        for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", document.read_text()):
            if target.startswith(("http:", "https:")):
                continue
            link = f"{document.relative_to(ROOT)} links to {target}#{anchor}"
            found = document.parent / target if target else document
            assert found.exists(), link
            assert not anchor or found.suffix != ".md" or anchor in headings(found), link


def test_no_path_of_a_machine_and_no_lock_is_committed() -> None:
    assert "uv.lock" in (ROOT / ".gitignore").read_text().split()
    committed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    for document in committed.stdout.splitlines():
        assert "/root/" not in (ROOT / document).read_text(), document


def test_the_tests_that_the_page_of_faults_names_exist() -> None:
    page = (ROOT / "docs" / "faults.md").read_text()
    sources = [path.read_text() for pattern in ("packages/**/*.py", "tests/**/*.py") for path in ROOT.glob(pattern)]
    named = re.findall(r"`(test_\w+)`", page)
    assert len(named) >= 13
    for name in named:
        assert any(f"def {name}(" in source for source in sources), name
