"""The charts: what helm makes of them, and whether alerts and dashboard speak of metrics that there are."""

import contextlib
import json
import pathlib
import re
import subprocess
import sys
import time
import urllib.request

import promql_parser
import pytest
import yaml
from conftest import BIN, ROOT, Stack, free_port, model_file
from prometheus_client.openmetrics.parser import text_string_to_metric_families

sys.path.insert(0, str(ROOT / "scripts"))
import kube  # noqa: E402

CHART = ROOT / "charts" / "tandem"
MONITORED = ["--set", "metrics.podMonitor.enabled=true,metrics.alerts.enabled=true,metrics.dashboard.enabled=true"]


@pytest.fixture(scope="session")
def helm() -> str:
    if reason := kube.lacking(("helm",)):
        pytest.skip(reason)
    return str(kube.build("helm"))


def render(helm: str, *args: str, release: str = "tandem") -> list[dict]:
    command = [helm, "template", release, CHART, "--namespace=tandem-system", *args]
    done = subprocess.run(command, text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def one(objects: list[dict], kind: str, name: str) -> dict:
    (found,) = [o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name]
    return found


def names(objects: list[dict], kind: str) -> set[str]:
    return {o["metadata"]["name"] for o in objects if o["kind"] == kind}


def test_helm_finds_nothing_to_complain_of(helm: str):
    for chart in ("tandem", "tandem-crds"):
        done = subprocess.run(
            [helm, "lint", "--strict", ROOT / "charts" / chart], text=True, capture_output=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_definition_is_kept_when_its_chart_goes(helm: str):
    shown = subprocess.check_output([helm, "template", "crds", ROOT / "charts" / "tandem-crds"], text=True)
    definition = yaml.safe_load(shown)
    assert definition["metadata"]["name"] == "pddeployments.tandem.dev"
    assert definition["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_the_operators_pod_meets_the_restricted_standard(helm: str):
    pod = one(render(helm), "Deployment", "tandem-operator")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "volumes" not in pod and not pod.get("hostNetwork")


def test_each_flag_that_the_chart_gives_is_one_of_the_operators(helm: str):
    values = ["--set", "watchNamespaces={a,b},metrics.namespaces={monitoring},operator.extraArgs={--trace-sample=0}"]
    deployment = one(render(helm, *values), "Deployment", "tandem-operator")
    args = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    known = set(re.findall(r"--[a-z-]+", subprocess.check_output([BIN / "tandem-operator", "--help"], text=True)))
    given = [arg.split("=")[0] for arg in args if not arg.startswith("--trace-sample")]
    assert set(given) <= known, set(given) - known
    assert [a for a in args if "watch" in a] == ["--watch-namespace=a", "--watch-namespace=b"]
    assert "--metrics-namespace=monitoring" in args and args[-1] == "--trace-sample=0"


def test_the_rights_are_those_that_are_tested(helm: str):
    tested = {o["metadata"]["name"]: o for o in yaml.safe_load_all((CHART / "files" / "rbac.yaml").read_text())}
    shipped = {o["metadata"]["name"]: o for o in render(helm) if o["kind"] == "ClusterRole"}
    assert tested.keys() == shipped.keys()
    for name, role in tested.items():
        assert shipped[name]["rules"] == role["rules"], name
        assert shipped[name]["metadata"]["labels"].items() >= role["metadata"].get("labels", {}).items(), name
    assert names(render(helm, "--set", "rbac.aggregate=false"), "ClusterRole").isdisjoint({"tandem-view", "tandem-edit"})


def test_an_operator_of_some_namespaces_is_bound_in_these_alone(helm: str):
    everywhere = render(helm)
    assert names(everywhere, "ClusterRoleBinding") == {"tandem-operator", "tandem-operator-nodes"}
    some = render(helm, "--set", "watchNamespaces={chat,search}")
    assert names(some, "ClusterRoleBinding") == {"tandem-operator-nodes"}
    bound = [o["metadata"]["namespace"] for o in some if o["kind"] == "RoleBinding" and "namespace" in o["metadata"]]
    assert bound == ["chat", "search"]
    for binding in (o for o in everywhere + some if o["kind"].endswith("RoleBinding")):
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": "tandem-operator", "namespace": "tandem-system"}
        ]
        assert binding["roleRef"]["name"] in names(everywhere, "ClusterRole")


def test_the_role_for_diagnosing_opens_the_tokens_of_the_deployments_that_are_named(helm: str, tmp_path: pathlib.Path):
    subject = {"kind": "Group", "name": "oncall", "apiGroup": "rbac.authorization.k8s.io"}
    of = [{"namespace": "serving", "deployments": ["chat", "search"], "subjects": [subject]}, {"namespace": "lab", "deployments": ["x"]}]
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"diagnose": of}))
    objects = render(helm, f"--values={values}")
    tested = yaml.safe_load((CHART / "files" / "diagnose-rbac.yaml").read_text())["rules"]
    roles = {o["metadata"]["namespace"]: o for o in objects if o["kind"] == "Role"}
    assert roles.keys() == {"serving", "lab"}
    for namespace, deployments in (("serving", ["chat", "search"]), ("lab", ["x"])):
        for rule, shipped in zip(tested, roles[namespace]["rules"], strict=True):
            tokens = {"resourceNames": [f"{name}-admin-token" for name in deployments]} if "resourceNames" in rule else {}
            assert shipped == rule | tokens
    (binding,) = [o for o in objects if o["kind"] == "RoleBinding" and o["metadata"]["name"] == "tandem-diagnose"]
    assert (binding["metadata"]["namespace"], binding["subjects"]) == ("serving", [subject])
    assert not [o for o in render(helm) if o["kind"] == "Role"]


def test_two_releases_share_no_name(helm: str):
    first, second = ({(o["kind"], o["metadata"]["name"]) for o in render(helm, *MONITORED, release=r)} for r in ("tandem", "b"))
    assert first.isdisjoint(second)
    # The policies of each deployment let pods with this label in.
    pods = one(render(helm, release="b"), "Deployment", "b-tandem-operator")["spec"]["template"]["metadata"]["labels"]
    assert pods["app.kubernetes.io/name"] == "tandem-operator"


def test_images_come_from_the_registry_that_is_named(helm: str):
    objects = render(helm, "--set", "image.registry=registry.example.com/ml,image.tag=v9,image.pullSecrets={a}")
    pod = one(objects, "Deployment", "tandem-operator")["spec"]["template"]["spec"]
    assert pod["imagePullSecrets"] == [{"name": "a"}]
    (container,) = pod["containers"]
    assert container["image"] == "registry.example.com/ml/tandem-operator:v9"
    assert container["args"][:2] == [
        "--default-engine-image=registry.example.com/ml/tandem-engine:v9",
        "--default-router-image=registry.example.com/ml/tandem-router:v9",
    ]
    named = render(helm, "--set", "defaultImages.engine=mine/engine@sha256:0123")
    args = one(named, "Deployment", "tandem-operator")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[0] == "--default-engine-image=mine/engine@sha256:0123"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("operatr.replicas=2", "operatr"),
        ("operator.replicas=many", "replicas"),
        ("operator.leaseSeconds=0", "leaseSeconds"),
        ("image.pullPolicy=Sometimes", "pullPolicy"),
        ("watchNamespaces={Not_A_Name}", "watchNamespaces"),
        ("operator.extraArgs={verbose}", "extraArgs"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(helm: str, wrong: str, says: str):
    done = subprocess.run(
        [helm, "template", "t", CHART, "--set", wrong], text=True, capture_output=True, timeout=60
    )
    assert done.returncode != 0
    assert says in done.stderr


@pytest.fixture(scope="session")
def metrics(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    """All metrics of all processes: a sample's name, and the labels that it is seen with."""
    texts = [process.metrics() for process in stack.processes.values()]
    # These two count before they have found an API server.
    images = ["--default-engine-image=e", "--default-router-image=r"]
    texts.append(alone(tmp_path_factory.mktemp("operator"), "tandem_operator_leading", "tandem-operator", *images))
    found = ["--discover-prefill=p", "--discover-decode=d", "--namespace=n", "--listen=127.0.0.1:0"]
    found += ["--model-name=m", f"--tokenizer={model_file()}"]
    texts.append(alone(tmp_path_factory.mktemp("router"), "tandem_router_discovery_current", "tandem-router", *found))
    seen: dict[str, list[dict[str, str]]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                seen.setdefault(sample.name, []).append(sample.labels)
    return seen


def alone(folder: pathlib.Path, awaited: str, program: str, *flags: str) -> str:
    """The metrics of a process with a kubeconfig that leads nowhere, as soon as `awaited` is one of them."""
    kubeconfig = {
        "apiVersion": "v1", "kind": "Config", "current-context": "c", "users": [{"name": "u", "user": {}}],
        "clusters": [{"name": "none", "cluster": {"server": "http://127.0.0.1:9"}}],
        "contexts": [{"name": "c", "context": {"cluster": "none", "user": "u"}}],
    }  # fmt: skip
    path = folder / "kubeconfig"
    path.write_text(json.dumps(kubeconfig))
    ops = f"127.0.0.1:{free_port()}"
    command = [BIN / program, f"--kubeconfig={path}", f"--ops-listen={ops}", *flags]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            end = time.monotonic() + 60
            while True:
                with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{ops}/metrics", timeout=5) as answer:
                    text = answer.read().decode()
                    if awaited in text:
                        return text
                assert time.monotonic() < end and process.poll() is None, (folder / "log").read_text()
                time.sleep(0.05)
        finally:
            process.kill()


# Of a pod, added by the PodMonitors.
TARGET_LABELS = {"namespace", "pod", "tandem_dev_deployment", "tandem_dev_role"}


def check_expression(expression: str, metrics: dict[str, list[dict[str, str]]]):
    """It parses; each metric in it is there, and each value that a label is compared with is one that it takes."""
    expression = expression.replace("$__rate_interval", "5m").replace("$namespace", "n").replace("$deployment", "d")
    promql_parser.parse(expression)
    selectors = re.findall(r"\b(tandem_(?!dev_)\w+)(?:\{([^}]*)\})?", expression)
    assert selectors, expression
    for name, matchers in selectors:
        assert name in metrics, f"{name} is no metric: {expression}"
        for label, operator, value in re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', matchers):
            if label in TARGET_LABELS:
                continue
            taken = {labels.get(label) for labels in metrics[name]}
            wanted = value.split("|") if operator in ("=~", "!~") else [value]
            assert set(wanted) <= taken, f"{label}={set(wanted) - taken} of {name}: it takes {taken}"


def test_alerts_speak_of_what_is_measured(helm: str, metrics: dict[str, list[dict[str, str]]]):
    rules = one(render(helm, *MONITORED), "PrometheusRule", "tandem")["spec"]["groups"]
    alerts = [rule for group in rules for rule in group["rules"]]
    assert len({rule["alert"] for rule in alerts}) == len(alerts) > 8
    for rule in alerts:
        check_expression(rule["expr"], metrics)
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert {"summary", "description"} <= rule["annotations"].keys()


def test_the_dashboard_speaks_of_what_is_measured(helm: str, metrics: dict[str, list[dict[str, str]]]):
    dashboard = json.loads(one(render(helm, *MONITORED), "ConfigMap", "tandem-dashboard")["data"]["tandem.json"])
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for panel in panels:
        for target in panel["targets"]:
            check_expression(target["expr"], metrics)
    monitors = [o for o in render(helm, *MONITORED) if o["kind"] == "PodMonitor"]
    labels = {label.replace(".", "_").replace("/", "_") for m in monitors for label in m["spec"].get("podTargetLabels", [])}
    assert labels == {"tandem_dev_deployment", "tandem_dev_role"}
