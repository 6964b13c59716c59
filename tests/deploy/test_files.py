"""What an operator installs: files that parse, settings that our own parser takes, versions that agree."""

import json
import math
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from kv_server.config import ServerConfig, server_config
from kv_tiers.build import check_settings
from kv_tiers.settings import Layer, read_file, resolve
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "kv-server"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
DOCKERFILE = (DEPLOY / "image" / "Dockerfile").read_text()


def project(package: str) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
    return found


def parsed(settings: dict[str, Any], directory: Path) -> ServerConfig:
    """By the server's own parser; then what a start would check, with a pool for this machine and this directory."""
    config = server_config(resolve([Layer("the test", settings)], {})[0])
    directory.chmod(0o700)
    (tier,) = config.tiers
    assert str(tier["directory"]).startswith("/var/cache/kv")
    small = msgspec.structs.replace(config.host, capacity_bytes=1 << 20)
    check_settings(small, [tier | {"directory": str(directory / "chunks"), "capacity_bytes": "1GiB"}])
    return config


def test_every_file_of_yaml_is_yaml() -> None:
    files = [path for path in DEPLOY.rglob("*.y*ml") if "templates" not in path.parts]
    assert len(files) > 8
    assert all(yaml.safe_load(path.read_text()) for path in files)


RECIPE_KEYS = [
    *("meta", "model", "dependencies", "features", "opt_in_features", "variants"),
    *("compatible_strategies", "hardware_overrides", "strategy_overrides", "guide"),
]
"""In the order that vllm-project/recipes asks for in its CONTRIBUTING.md."""


@pytest.mark.parametrize("path", sorted((DEPLOY / "recipes").rglob("*.yaml")), ids=lambda path: path.stem)
def test_vllms_recipe_has_its_form_and_settings_that_are_taken(path: Path, tmp_path: Path) -> None:
    recipe = yaml.safe_load(path.read_text())
    assert list(recipe) == [key for key in RECIPE_KEYS if key in recipe]
    model, bf16 = recipe["model"], recipe["variants"]["default"]
    assert model["model_id"] == f"{path.parent.name}/{path.stem}"
    assert f" {model['min_vllm_version']}," in (ROOT / "docs" / "deploy.md").read_text()
    assert bf16["vram_minimum_gb"] == math.ceil(float(model["parameter_count"].rstrip("B")) * 2 * 1.2)
    assert recipe["opt_in_features"] == list(recipe["features"])
    flag, transfer = recipe["features"]["kv_tiers"]["args"]
    assert f"vllm serve {model['model_id']} {flag} '{transfer}'" in recipe["guide"]
    parsed(json.loads(transfer)["kv_connector_extra_config"], tmp_path)


def test_inferencexs_form_names_this_release_and_an_engine_and_settings_that_are_taken() -> None:
    """Its own validator (utils/matrix_logic/validation.py there) took the entry when it was written."""
    directory = DEPLOY / "inferencex"
    ((name, entry),) = yaml.safe_load((directory / "nvidia-master.yaml").read_text()).items()
    (coding,) = entry["scenarios"]["agentic-coding"]
    (points,) = coding["search-space"]
    backend, package = points["kv-offload-backend"], project("kv-vllm")
    assert f"-{backend['name']}-" in name and backend["version"] == package["version"]
    (vllm,) = map(Requirement, package["optional-dependencies"]["vllm"])
    assert vllm.specifier.contains(entry["image"].rpartition(":v")[2])
    helpers = """require_agentic_kv_offload_backend() { [ "$1" = "$KV_OFFLOAD_BACKEND" ]; }
    agentic_pip_install() { echo "${@: -1}"; }
    """
    given = {"KV_OFFLOADING": points["kv-offloading"], "KV_OFFLOAD_BACKEND": backend["name"]}
    given |= {"TOTAL_CPU_DRAM_GB": "1177", "MODEL_CHECKPOINT_PAGE_CACHE_GIB": "414"}
    script = f"{helpers}{(directory / 'kv-tiers.sh').read_text()}printf '%s\\n' \"${{OFFLOAD_ARGS[@]}}\""
    ran = subprocess.run(["bash", "-euc", script], env=given, capture_output=True, text=True, check=True)
    installed, flag, transfer = ran.stdout.splitlines()
    assert (installed, flag) == (f"kv-vllm=={package['version']}", "--kv-transfer-config")
    settings = json.loads(transfer)["kv_connector_extra_config"]
    assert server_config(resolve([Layer("the test", settings)], {})[0]).host.capacity_bytes == 682 << 30


@pytest.mark.parametrize("where", ["compose", "image", "systemd"])
def test_a_server_takes_the_settings(where: str, tmp_path: Path) -> None:
    config = parsed(read_file(str(DEPLOY / where / "kv.yaml")), tmp_path)
    assert config.http.listen.endswith(":9400")
    roots = ("/run/kv-server/", "/var/lib/kv-server/") if where == "systemd" else ("/run/kv/",)
    assert config.socket.startswith(roots) and config.http.token_file.startswith(roots)


def test_a_server_takes_the_settings_of_the_chart_alone(tmp_path: Path) -> None:
    parsed(yaml.safe_load((CHART / "values.yaml").read_text())["config"], tmp_path)


def test_server_and_engine_of_the_compose_file_share_user_socket_and_settings() -> None:
    server, engine = (COMPOSE["services"][name] for name in ("kv-server", "engine"))
    assert server["user"] == engine["user"]
    assert {"./kv.yaml:/etc/kv/kv.yaml:ro", "socket:/run/kv"} <= {*server["volumes"], *engine["volumes"]}
    assert '"config_file": "/etc/kv/kv.yaml"' in engine["command"][2]


def test_what_the_compose_file_mounts_is_there_and_nothing_is_open_to_the_network() -> None:
    for service in COMPOSE["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            there = (DEPLOY / "compose" / source).is_file() if source.startswith(".") else source in COMPOSE["volumes"]
            assert there, volume
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert "no-new-privileges:true" in service["security_opt"] and service["cap_drop"] == ["ALL"]


def test_versions_agree() -> None:
    version = project("kv-server")["version"]
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == version
    assert COMPOSE["services"]["kv-server"]["image"] == f"kv-server:{version}"
    assert COMPOSE["services"]["engine"]["image"] == f"kv-vllm:{project('kv-vllm')['version']}"
    (engine,) = re.findall(r"^FROM vllm/vllm-openai:v(\S+)", DOCKERFILE, re.M)
    assert Requirement(project("kv-vllm")["optional-dependencies"]["vllm"][0]).specifier.contains(engine)


def test_the_images_have_every_package_of_ours_that_they_need() -> None:
    def needed(package: str) -> set[str]:
        names = {Requirement(text).name for text in project(package)["dependencies"]}
        ours = {name for name in names if (ROOT / "packages" / name).is_dir()}
        return {package} | {deeper for name in ours for deeper in needed(name)}

    vllm, server = (DOCKERFILE.split("FROM ")[at] for at in (2, 1))
    for text, wanted in (
        (server, needed("kv-cluster") | {"kv-codecs"}),
        (vllm, needed("kv-blend") | needed("kv-vllm") | {"kv-codecs"}),
    ):
        (listed,) = re.findall(r"for name in (.*?); do", text)
        assert {f"kv-{name}" for name in listed.split()} == wanted


def test_the_table_of_compatibility_says_what_code_and_tests_say() -> None:
    checked = subprocess.run([sys.executable, ROOT / "scripts" / "compatibility.py"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_version_has_its_place_in_the_changelog() -> None:
    for package in ROOT.glob("packages/*/pyproject.toml"):
        version = project(package.parent.name)["version"]
        headings = re.findall(r"^## (.*)", (package.parent / "CHANGELOG.md").read_text(), re.M)
        assert headings[:2] == ["Unreleased", version], package


def test_the_release_workflow_keeps_no_secret_and_names_every_action_by_its_commit() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    assert "secrets." not in text and yaml.safe_load(text)["permissions"] == {}
    used = re.findall(r"uses: (\S+)", text)
    assert used and all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in used)
    publishing = [name for name, job in jobs.items() if job["permissions"].get("id-token") == "write"]
    assert publishing == ["packages", "image"]
    assert all(
        jobs[name]["environment"] == "release" and "attestations" in jobs[name]["permissions"] for name in publishing
    )
