"""The README stays true where a machine can tell: its settings are the defaults, its links lead somewhere."""

import re
from pathlib import Path

import yaml
from kv_vllm.config import Settings, load

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_settings_it_shows_are_all_of_them_at_their_defaults() -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", README, flags=re.DOTALL)
    settings, in_force = load(yaml.safe_load(shown), {})
    assert settings == Settings()
    assert {entry.origin for entry in in_force} == {"extra config"}, "a setting is missing from the README"


def test_every_link_in_the_documents_leads_to_a_file() -> None:
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/README.md")]:
        for target in re.findall(r"\]\(([^)#]+)", document.read_text()):
            if not target.startswith(("http:", "https:")):
                assert (document.parent / target).exists(), f"{document.relative_to(ROOT)} links to {target}"


def test_no_path_of_a_machine_and_no_lock_is_committed() -> None:
    assert "uv.lock" in (ROOT / ".gitignore").read_text().split()
    for document in ROOT.glob("**/*.md"):
        if ".venv" not in document.parts and ".venvs" not in document.parts:
            assert "/root/" not in document.read_text(), document
