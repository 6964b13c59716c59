"""What operators' own tools say of what they install. `scripts/setup.sh deploy` installs the tools."""

import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml
from kv_core.testing import key_chain
from kv_server import RemoteCache, launch
from kv_server.config import server_config
from kv_testing.servers import free_port
from kv_testing.wait import until
from kv_tiers.settings import Layer, resolve

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "kv-server"
pytestmark = pytest.mark.slow

EVERYTHING = {
    "user": {"uid": 1000700000, "gid": 0},
    "config": {"peers": {"listen": "0.0.0.0:9500"}, "host": {"capacity_bytes": 536870912000}},
    "secretName": "kv-secrets",
    "imagePullSecrets": [{"name": "registry"}],
    "nodeSelector": {"gpu": "yes"},
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "system-node-critical",
    "podAnnotations": {"a": "b"},
    "podLabels": {"c": "d"},
    "networkPolicy": {"egress": [{"ports": [{"port": 6379}]}]},
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "alerts": {"enabled": True, "labels": {"release": "prometheus"}},
    "dashboard": {"enabled": True},
}
VALUES = pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])


def tool(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    return found or pytest.skip(f"there is no {name}: scripts/setup.sh deploy")


def said(*command: str) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


@pytest.fixture
def helm() -> Any:
    return pytest.importorskip("helm_python", reason="there is no Helm: scripts/setup.sh deploy")


@pytest.fixture
def rendered(helm: Any) -> Callable[[dict[str, Any]], list[dict[str, Any]]]:
    """The chart's objects with these values, as `helm template` makes them."""

    def render(values: dict[str, Any]) -> list[dict[str, Any]]:
        chart = helm.Chart.load(CHART)
        chart.validate_schema(values)
        files = chart.render(values, name="kv", namespace="llm")
        assert "runAsUser: " in files.pop("kv-server/templates/NOTES.txt")
        return [one for text in files.values() for one in yaml.safe_load_all(text) if one]

    return render


def test_the_dockerfile_satisfies_hadolint() -> None:
    assert said(tool("hadolint"), "deploy/image/Dockerfile") == ""


def test_the_workflows_satisfy_zizmor() -> None:
    said(tool("zizmor"), "--offline", "--no-progress", ".github/workflows")


@pytest.mark.timeout(600)
def test_a_release_has_sdists_and_kernels_for_both_processors(tmp_path: Path) -> None:
    for name in ("aarch64-linux-gnu-gcc", "gcc", "auditwheel"):
        tool(name)
    if platform.machine() != "x86_64":
        pytest.skip("the other processor's compiler is another one here")
    build = [sys.executable, "scripts/wheels.py", "--release", "--url", "https://example.org/kv"]
    said(*build, "--directory", str(tmp_path))
    packages = {path.parent.name.replace("-", "_") for path in ROOT.glob("packages/*/pyproject.toml")}
    compiled = {path.parent.name.replace("-", "_") for path in ROOT.glob("packages/*/hatch_build.py")}
    sdists = {path.name.partition("-")[0]: path for path in tmp_path.glob("*.tar.gz")}
    pure = {path.name.partition("-")[0] for path in tmp_path.glob("*-py3-none-any.whl")}
    assert (sdists.keys(), pure) == (packages, packages - compiled)
    for package in compiled:
        machines = {}
        for wheel in tmp_path.glob(f"{package}-*manylinux*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                (library,) = (name for name in archive.namelist() if name.endswith(".so"))
                machines[wheel.stem.rpartition("manylinux_2_17_")[2]] = archive.read(library)[18]  # ELF's e_machine
        assert machines == {"x86_64": 62, "aarch64": 183}
    with tarfile.open(sdists["kv_codecs"]) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert {"hatch_build.py", "LICENSE", "README.md", "CHANGELOG.md"} <= set(names)
    assert any(name.endswith(".c") for name in names) and not any(name.startswith("tests") for name in names)
    said(tool("twine"), "check", "--strict", *map(str, tmp_path.iterdir()))


def test_the_compose_file_is_one_to_compose() -> None:
    shown = yaml.safe_load(said(tool("docker-compose"), "-f", "deploy/compose/compose.yaml", "config"))
    assert shown["services"].keys() == {"kv-server", "engine", "prometheus", "grafana"}
    arguments = shown["services"]["engine"]["command"]
    assert json.loads(arguments[arguments.index("--kv-transfer-config") + 1])["kv_connector"] == "KVTiersConnector"


def test_prometheus_takes_the_alerts_and_every_one_fires_on_a_bad_host_alone() -> None:
    promtool = tool("promtool")
    assert "SUCCESS" in said(promtool, "check", "rules", "deploy/prometheus/alerts.yaml")
    assert "SUCCESS" in said(promtool, "test", "rules", "tests/deploy/alerts.yaml")
    rules = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())["groups"][0]["rules"]
    tested = yaml.safe_load((ROOT / "tests/deploy/alerts.yaml").read_text())["tests"][0]["promql_expr_test"][0]
    names = {sample["labels"] for sample in tested["exp_samples"]}
    assert names == {f'{{alertname="{rule["alert"]}"}}' for rule in rules}


def asked_of(port: str, expressions: Iterable[str]) -> dict[str, list[Any]]:
    """What a Prometheus answers to each, as Grafana would ask it."""
    found = {}
    for expression in expressions:
        query = re.sub(r"\$__(rate_interval|range|interval)", "10s", expression)
        query = re.sub(r"\$\{?\w+\}?", ".*", query)
        answer = httpx.get(f"http://127.0.0.1:{port}/api/v1/query", params={"query": query})
        assert answer.status_code == 200, (query, answer.text)
        found[expression] = answer.json()["data"]["result"]
    return found


def test_a_prometheus_set_up_as_the_tutorial_says_answers_every_query_of_the_dashboard(tmp_path: Path) -> None:
    tool("prometheus")
    ports = {"9090": str(free_port()), "8000": str(free_port())}  # no engine is there
    disk = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": "4MiB"}
    tenants = [{"name": "acme", "salt": "acme", "quota_bytes": "64KiB"}]
    config = {
        "host": {"capacity_bytes": "1MiB"},
        "http": {"listen": "127.0.0.1:0"},
        "tiers": [disk],
        "tenants": tenants,
    }
    server = launch(config, socket=tmp_path / "s")
    cache = RemoteCache(server.socket, group_bytes=(4096,), fingerprint="f")
    cache.commit(cache.begin_store(key_chain(3), "w"))
    assert cache.lookup(key_chain(3), "r").chunks == 3
    ports["9400"] = str(urlsplit(server.url).port)
    page = (ROOT / "docs/tutorials/server.md").read_text().replace("CLONE", str(ROOT)).replace(" 5s", " 1s")
    page = re.sub(r"(?<=127\.0\.0\.1:)\d+", lambda found: ports[found[0]], page)
    setup, query = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    log = tmp_path / "log"
    with log.open("w") as said_here:
        shell = ["bash", "-euc", f"{setup}echo READY; wait"]
        ran = subprocess.Popen(shell, cwd=tmp_path, stdout=said_here, stderr=said_here, start_new_session=True)
    try:
        until(lambda: "READY" in log.read_text())

        def up() -> dict[str, str]:
            result = json.loads(said("bash", "-euc", query.replace("sleep 10", "sleep 1")))["data"]["result"]
            return {one["metric"]["job"]: one["value"][1] for one in result}

        until(lambda: up() == {"kv-server": "1", "vllm": "0"})
        until(lambda: sum(map(len, asked_of(ports["9090"], ["rate(kv_lookups_total[10s])"]).values())))
        dashboard = json.loads((ROOT / "docs/grafana.json").read_text())
        asked = {target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())}
        found = asked_of(ports["9090"], asked)
    finally:
        os.killpg(ran.pid, signal.SIGKILL)
        ran.wait(60)
        cache.close()
        server.stop()
    assert len(asked) > 80
    shown = {name for expression, result in found.items() if result for name in re.findall(r"kv_\w+", expression)}
    assert shown >= {"kv_chunks_hit_total", "kv_pool_bytes", "kv_leases", "kv_tier_healthy", "kv_tenant_quota_bytes"}


def test_prometheus_takes_the_settings_of_the_compose_file(tmp_path: Path) -> None:
    text = (ROOT / "deploy/compose/prometheus.yaml").read_text()
    rules = "/etc/prometheus/alerts.yaml"
    assert rules in text
    (tmp_path / "prometheus.yaml").write_text(text.replace(rules, str(ROOT / "deploy/prometheus/alerts.yaml")))
    assert "1 rule files found" in said(tool("promtool"), "check", "config", str(tmp_path / "prometheus.yaml"))


@VALUES
def test_the_chart_satisfies_helms_lint(helm: Any, values: dict[str, Any]) -> None:
    report = helm.lint(CHART, values, strict=True)
    assert report["errors"] == [] and [one["error"] for one in report["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"user": {"uid": -1, "gid": 0}},
        {"usr": {}},
        {"socketHostPath": "run/kv"},
        {"podMonitor": {"enabled": "yes"}},
        # Probes, services and mounts are of these.
        {"config": {"http": {"listen": "0.0.0.0:8080"}}},
        {"config": {"http": None}},
        {"config": {"http.listen": "0.0.0.0:9400"}},
        {"config": {"peers": {"listen": "0.0.0.0:9600"}}},
        {"config": {"server": {"socket": "/run/kv/another.sock"}}},
    ],
)
def test_wrong_values_are_refused(helm: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(helm.HelmValuesError):
        helm.Chart.load(CHART).validate_schema(wrong)


def test_the_schema_names_every_value(helm: Any) -> None:
    chart = helm.Chart.load(CHART)

    def check(values: dict[str, Any], schema: dict[str, Any]) -> None:
        for name, value in values.items():
            assert name in schema["properties"], name
            inner = schema["properties"][name]
            if isinstance(value, dict) and inner.get("additionalProperties") is False:  # `config` is kv-server's
                check(value, inner)

    check(chart.values, chart.schema)


@VALUES
@pytest.mark.parametrize("kubernetes", ["1.25", "1.37"])
def test_kubernetes_takes_what_the_chart_renders(
    rendered: Callable[[dict[str, Any]], list[dict[str, Any]]], values: dict[str, Any], kubernetes: str
) -> None:
    pytest.importorskip("kubernetes_validate")
    import kubernetes_validate as kubernetes_schemas

    objects = rendered(values)
    kinds = {one["kind"] for one in objects}
    assert {"ConfigMap", "DaemonSet", "Service", "NetworkPolicy"} <= kinds
    assert (kinds >= {"PodMonitor", "PrometheusRule"}) == bool(values)
    for one in objects:
        if not one["apiVersion"].startswith("monitoring.coreos.com/"):  # schemas of CRDs are not among them
            kubernetes_schemas.validate(one, kubernetes, strict=True)


@VALUES
def test_the_charts_settings_are_a_servers_and_its_pod_is_confined(
    rendered: Callable[[dict[str, Any]], list[dict[str, Any]]], values: dict[str, Any]
) -> None:
    objects = {(one["kind"], one["metadata"]["name"]): one for one in rendered(values)}
    settings = yaml.safe_load(objects["ConfigMap", "kv-kv-server"]["data"]["kv.yaml"])
    config = server_config(resolve([Layer("the chart", settings)], {})[0])
    pod = objects["DaemonSet", "kv-kv-server"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounted = [mount["mountPath"] for mount in container["volumeMounts"]]
    for path in (config.socket, config.http.token_file, *(str(tier["directory"]) for tier in config.tiers)):
        assert any(path.startswith(f"{place}/") for place in mounted), path
    assert {port["containerPort"] for port in container["ports"]} >= {int(config.http.listen.split(":")[1])}
    assert all(
        {"hostPID", "hostNetwork", "hostIPC", "shareProcessNamespace"}.isdisjoint(one) for one in (pod, container)
    )
    for one in (*pod["initContainers"], container):
        limits = one["securityContext"]
        assert limits["readOnlyRootFilesystem"] and not limits["allowPrivilegeEscalation"]
        assert limits["capabilities"]["drop"] == ["ALL"]
    user = values.get("user", {"uid": 10001, "gid": 10001})
    assert (container["securityContext"]["runAsUser"], container["securityContext"]["runAsGroup"]) == (
        user["uid"],
        user["gid"],
    )
    environment = {one["name"]: one["value"] for one in pod["initContainers"][0]["env"]}
    assert environment == {"KV_UID": str(user["uid"]), "KV_GID": str(user["gid"])}


def test_the_init_container_gives_the_user_what_it_needs(
    rendered: Callable[[dict[str, Any]], list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Its own script, as root with the three capabilities, over a mounted Secret and a node's directories."""
    if os.geteuid() or not shutil.which("bwrap"):
        pytest.skip("it needs root and bubblewrap")
    (daemons,) = (one for one in rendered(EVERYTHING) if one["kind"] == "DaemonSet")
    (init,) = daemons["spec"]["template"]["spec"]["initContainers"]
    folders = {
        "/run/kv": "run",
        "/var/cache/kv": "cache",
        "/run/kv-secret-given": "given",
        "/run/kv-secrets": "secrets",
    }
    command = shlex.split(
        "bwrap --ro-bind /usr /usr --symlink usr/bin /bin --symlink usr/lib /lib --symlink usr/lib64 /lib64"
    )
    for place, name in folders.items():
        (tmp_path / name).mkdir()
        command += ["--bind", str(tmp_path / name), place]
    secret = tmp_path / "given" / "..data"  # as a kubelet mounts it
    secret.mkdir()
    (secret / "http-token").write_text("t" * 32)
    (secret / "http-token").chmod(0o400)
    (tmp_path / "given" / "http-token").symlink_to("..data/http-token")
    command += ["--cap-drop", "ALL"]
    command += [
        part for name in init["securityContext"]["capabilities"]["add"] for part in ("--cap-add", f"CAP_{name}")
    ]
    command += [part for one in init["env"] for part in ("--setenv", one["name"], one["value"])]
    for _ in range(2):  # a pod may start again
        said(*command, *init["command"], *init["args"])
    made = {name: tmp_path / name for name in ("run/server", "cache", "secrets/http-token")}
    assert {name: (path.stat().st_uid, oct(path.stat().st_mode)[-3:]) for name, path in made.items()} == {
        "run/server": (1000700000, "700"), "cache": (1000700000, "700"), "secrets/http-token": (1000700000, "400"),
    }  # fmt: skip


def test_a_packed_chart_has_the_alerts_and_the_dashboard(helm: Any, tmp_path: Path) -> None:
    """They are links in the repository."""
    packed = helm.Chart.load_archive(Path(helm.package(CHART, destination=tmp_path)).read_bytes())
    objects = packed.render(EVERYTHING, name="kv")["kv-server/templates/monitoring.yaml"]
    _, rule, dashboard = yaml.safe_load_all(objects)
    assert rule["spec"] == yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())
    assert json.loads(dashboard["data"]["kv.json"]) == json.loads((ROOT / "docs/grafana.json").read_text())
