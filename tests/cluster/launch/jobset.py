"""The structure of a JobSet, typed in from the documentation of its API (jobset.x-k8s.io/v1alpha2), of
batch/v1 Jobs and of v1 Pods: the fields that manifests use and their neighbours. Anything else is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Metadata(Strict):
    name: Name
    annotations: dict[str, str] = {}
    labels: dict[str, str] = {}


class KeyRef(Strict):
    name: Name
    key: str


class FieldRef(Strict):
    fieldPath: str


class SecretRef(Strict):
    name: Name
    optional: bool = False


class EnvFrom(Strict):
    secretRef: SecretRef


class ValueFrom(Strict):
    secretKeyRef: KeyRef | None = None
    fieldRef: FieldRef | None = None


class EnvVar(Strict):
    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    value: str | None = None
    valueFrom: ValueFrom | None = None


class Resources(Strict):
    limits: dict[str, str] = {}
    requests: dict[str, str] = {}


class Port(Strict):
    containerPort: Annotated[int, Field(ge=1, le=65535)]


class Socket(Strict):
    port: Annotated[int, Field(ge=1, le=65535)]


class Probe(Strict):
    tcpSocket: Socket
    periodSeconds: Annotated[int, Field(ge=1)]
    failureThreshold: Annotated[int, Field(ge=1)]


class Mount(Strict):
    name: Name
    mountPath: Annotated[str, Field(pattern="^/")]
    readOnly: bool = False


class Container(Strict):
    name: Name
    image: str
    command: list[str]
    env: list[EnvVar] = []
    envFrom: list[EnvFrom] = []
    ports: list[Port] = []
    resources: Resources = Resources()
    startupProbe: Probe | None = None
    volumeMounts: list[Mount] = []
    restartPolicy: None = None


class InitContainer(Container):
    restartPolicy: Literal["Always"] | None = None  # a sidecar


class Claim(Strict):
    claimName: Name


class ConfigMapSource(Strict):
    name: Name


class EmptyDir(Strict):
    medium: Literal["", "Memory"] = ""


class Volume(Strict):
    name: Name
    persistentVolumeClaim: Claim | None = None
    configMap: ConfigMapSource | None = None
    emptyDir: EmptyDir | None = None


class PodSpec(Strict):
    containers: Annotated[list[Container], Field(min_length=1)]
    initContainers: list[InitContainer] = []
    volumes: list[Volume] = []
    nodeSelector: dict[str, str] = {}
    restartPolicy: Literal["OnFailure", "Never"]  # a Job's
    terminationGracePeriodSeconds: int = 30


class PodTemplate(Strict):
    spec: PodSpec


class JobSpec(Strict):
    parallelism: Annotated[int, Field(ge=0)] = 1
    completions: Annotated[int, Field(ge=0)] = 1
    completionMode: Literal["Indexed", "NonIndexed"] = "NonIndexed"
    backoffLimit: Annotated[int, Field(ge=0)] = 6
    activeDeadlineSeconds: Annotated[int, Field(ge=1)] | None = None
    template: PodTemplate


class TemplateMetadata(Strict):
    annotations: dict[str, str] = {}


class JobTemplate(Strict):
    metadata: TemplateMetadata | None = None
    spec: JobSpec


class ReplicatedJob(Strict):
    name: Name
    groupName: Name = "default"
    replicas: Annotated[int, Field(ge=0)] = 1
    template: JobTemplate


class Network(Strict):
    enableDNSHostnames: bool
    subdomain: Name | None = None
    publishNotReadyAddresses: bool = True


class SuccessPolicy(Strict):
    operator: Literal["All", "Any"]
    targetReplicatedJobs: list[Name] = []


class Rule(Strict):
    name: Annotated[str, Field(pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    action: Literal["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]
    onJobFailureReasons: list[
        Literal[
            "BackoffLimitExceeded",
            "DeadlineExceeded",
            "FailedIndexes",
            "MaxFailedIndexesExceeded",
            "PodFailurePolicy",
        ]
    ] = []
    targetReplicatedJobs: list[Name] = []


class FailurePolicy(Strict):
    maxRestarts: Annotated[int, Field(ge=0)] = 0
    restartStrategy: Literal["Recreate", "BlockingRecreate"] = "Recreate"
    rules: list[Rule] = []


class Spec(Strict):
    replicatedJobs: Annotated[list[ReplicatedJob], Field(min_length=1)]
    network: Network
    successPolicy: SuccessPolicy
    failurePolicy: FailurePolicy
    suspend: bool = False
    ttlSecondsAfterFinished: int | None = None

    def model_post_init(self, _context: Any) -> None:
        names = [job.name for job in self.replicatedJobs]
        assert len(names) == len(set(names)), f"replicatedJobs is keyed by name: {names}"
        targets = {*self.successPolicy.targetReplicatedJobs}
        targets |= {name for rule in self.failurePolicy.rules for name in rule.targetReplicatedJobs}
        assert targets <= set(names), f"a policy names no replicated job: {targets - set(names)}"


class JobSet(Strict):
    apiVersion: Literal["jobset.x-k8s.io/v1alpha2"]
    kind: Literal["JobSet"]
    metadata: Metadata
    spec: Spec
