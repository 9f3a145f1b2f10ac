"""Which values work without a warning, and the errors of those that do not."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from kybernate import __version__
from kybernate.onboard import onboard
from tests.helm.chart import CHART, KUBE_VERSION, SETS, helm, manifest, render, template

WRONG = {
    "a name that no value has": (["router.replica=3"], "additional properties 'replica' not allowed"),
    "a word that is no choice": (["log.level=loud"], "'debug', 'info', 'warning', 'error'"),
    "a text for a number": (["router.replicas=many"], "got string, want integer"),
    "no number of GPUs": (["fakeGpu.gpus=0"], "minimum: got 0, want 1"),
    "an address without a scheme": (
        ["externalNats.url=mine:4222"],
        "externalNats.url=mine:4222: give nats://host:4222",
    ),
    "two sets of users": (
        ["externalNats.url=tls://a:1", "keys.existingSecret=x", "externalNats.credsSecret=y"],
        "leave keys.existingSecret (nkeys) empty",
    ),
    "users of no bus": (["externalNats.credsSecret=y"], "for the NATS of externalNats.url: set that"),
    "two NATS servers": (["nats.replicas=2"], "set 1, 3 or 5"),
    "servers whose routes anybody may open": (
        ["nats.replicas=3", "networkPolicy.enabled=false"],
        "set networkPolicy.enabled=true (and have it enforced), or nats.tls.existingSecret",
    ),
    "verified clients without TLS": (["nats.tls.clientSecret=x"], "set nats.tls.existingSecret or"),
    "a certificate without an issuer": (["nats.tls.certManager.issuerRef.kind=Issuer"], "issuerRef needs a name"),
    "two certificates": (
        ["nats.tls.certManager.issuerRef.name=mine", "nats.tls.existingSecret=x"],
        "keep one of them",
    ),
    "two certificates of the webhook": (
        ["webhook.enabled=true", "webhook.certManager.enabled=true", "webhook.tls.existingSecret=x"],
        "webhook.tls.existingSecret and webhook.certManager.enabled are two certificates: keep one of them",
    ),
    "an authority of no certificate": (["webhook.tls.caBundle=x"], "set that, too"),
    "a bus without room for its streams": (["nats.persistence.size=1Gi"], "set 1760Mi or more"),
    "samples without a version": (["fakeGpu.samples.image=x"], "fakeGpu.samples.image=x is without a version"),
    "fake GPUs that no plugin offers": (
        ["fakeGpu.enabled=true", "node.enabled=false"],
        "no plugin would offer the fake GPUs",
    ),
    "real GPUs faster than time": (["fakeGpu.speed=20"], "set fakeGpu.enabled=true, or leave speed at 1"),
    "two managers at once": (
        ["node.updateStrategy.type=RollingUpdate", "node.updateStrategy.rollingUpdate.maxSurge=1"],
        "maxSurge must be 0",
    ),
    "a name that looks like a setting": (["fullnameOverride=kyb"], "take another name"),
    "labels that selectors go by": (["commonLabels.app\\.kubernetes\\.io/name=x"], "take it out of commonLabels"),
    "a digest that is none": (["image.tag=sha256:latest"], "give sha256: and 64 hexadecimal digits"),
    "a folder that is none": (["kubeletRootDir=/var/lib/kubelet/"], "give an absolute path without / at its end"),
    "no default configuration": (
        ["config.configs.default=null", "config.configs.a100.profiles[0].name=x"]
        + [f"config.configs.a100.profiles[0].{one}" for one in ("resource=kyb.ai/x", "groupSize=1", "seatsPerGroup=2")],
        "config.configs has no default, only a100",
    ),
    "a profile without seats": (
        [f"config.configs.default.profiles[0].{one}" for one in ("name=x", "resource=kyb.ai/x", "groupSize=1")]
        + ["config.configs.default.profiles[0].seatsPerGroup=0"],
        "profile x has seatsPerGroup 0: set 1 or more",
    ),
    "a resource that the webhook does not know": (
        ["admissionPolicy.resourcePrefixes={example.com/}"],
        "add its prefix there",
    ),
    "two places for the configuration": (
        ["config.existingConfigMap=mine", "config.configs.a100.drainSeconds=5"],
        "leave existingConfigMap empty",
    ),
    "a router without room for a request": (["router.container.resources.limits.memory=0.2G"], "set 192Mi or more"),
    "memory of NATS that is no quantity": (["nats.container.resources.limits.memory=8GB"], "8GB is no quantity"),
    "memory that is no quantity": (
        ["router.container.resources.limits.memory=768MB"],
        "768MB is no quantity of Kubernetes",
    ),
    "a value that the chart does not have": (
        ["router.heldBytes=1000"],
        "additional properties 'heldBytes' not allowed",
    ),
    "a pod's field of no pod": (["router.podTemplate.nodeSelector.a=b"], "additional properties 'nodeSelector' not"),
    "a park that is cut": (["node.terminationGracePeriodSeconds=0"], "set it above the longest park"),
    "fakes of an image without them": (["fakeGpu.enabled=true", f"image.tag={__version__}"], f"take {__version__}-dev"),
    "two samples of one name": (
        ["fakeGpu.enabled=true", "fakeGpu.samples.models[0].name=A_b", "fakeGpu.samples.models[1].name=a-b"]
        + [f"fakeGpu.samples.models[{number}].vram=1GiB" for number in (0, 1)],
        "two of them make the Deployment a-b",
    ),
    "a scale upside down": (
        ["router.replicas=20", "router.autoscaling.maxReplicas=10"],
        "router.replicas=20 is above router.autoscaling.maxReplicas=10",
    ),
    "no time to end": (["router.drainSeconds=2"], "set 5 or more"),
    "a probe without an answer": (
        ["webhook.enabled=true", "node.manager.hostPort=0"],
        "webhook.enabled=true needs node.manager.hostPort",
    ),
    "rules without metrics": (["monitoring.prometheusRule.enabled=true"], "set monitoring.enabled=true"),
}


@pytest.mark.parametrize("name", SETS)
def test_a_value_set_is_rendered_and_linted_without_a_warning(name: str) -> None:
    render(name)
    done = helm("lint", "--strict", "--quiet", "--kube-version", KUBE_VERSION, "helm/kybernate", "-f", str(SETS[name]))
    assert done.returncode == 0, done.stdout
    assert "WARNING" not in done.stdout


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_fail_with_what_to_change(name: str) -> None:
    values, text = WRONG[name]
    done = template(*[word for value in values for word in ("--set", value)])
    assert done.returncode != 0, f"{values} was taken"
    assert text in done.stderr


@pytest.mark.parametrize("memory", ["1G", "1.5Gi", "1073741824"])
def test_memory_may_be_written_as_kubernetes_takes_it(memory: str) -> None:
    render("default", f"--set=router.container.resources.limits.memory={memory}")


def test_all_errors_are_reported_at_once() -> None:
    done = template("--set", "nats.replicas=2", "--set", "router.drainSeconds=2", "--set", "image.tag=sha256:x")
    wanted = ("nats.replicas=2", "router.drainSeconds", "image.tag=sha256:x")
    assert [text for text in wanted if text not in done.stderr] == []


@pytest.mark.timeout(300)
def test_every_object_of_kubernetes_is_one_that_the_api_server_takes(tmp_path: Path) -> None:
    """kubeconform, strictly, with schemas out of Kubernetes' own OpenAPI document: the chart, and seats that kyb
    onboard makes of its examples."""
    tools = Path(os.environ["HELM_TEST_TOOLS"])
    for name in SETS:
        (tmp_path / f"{name}.yaml").write_text(manifest(name))
    for path in (CHART.parents[1] / "examples" / "onboard").glob("*.yaml"):
        seat = onboard(yaml.safe_load(path.read_text()), model="m").manifest
        (tmp_path / f"onboard-{path.name}").write_text(yaml.safe_dump(seat))
    # Not Kubernetes' own: the Prometheus operator's, cert-manager's, the Gateway API's, OpenShift's.
    foreign = "ServiceMonitor,PodMonitor,PrometheusRule,Certificate,Issuer,HTTPRoute,SecurityContextConstraints"
    schemas = f"{tools}/schemas/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json"
    command = [str(tools / "kubeconform"), "-strict", "-summary", "-skip", foreign, "-schema-location", schemas]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", Invalid: 0, Errors: 0" in done.stdout
