{{/* Name of the chart. */}}
{{- define "kybernate.name" -}}
{{- .Chart.Name -}}
{{- end -}}

{{/* Beginning of all names. Never "kyb" or "kyb-…": see values.yaml, fullnameOverride. */}}
{{- define "kybernate.fullname" -}}
{{- $name := include "kybernate.name" . -}}
{{- $release := .Release.Name -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if hasPrefix "kyb-" $release -}}
{{- printf "%s-%s" $name (trimPrefix "kyb-" $release) | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name $release -}}
{{- $release | trunc 40 | trimSuffix "-" -}}
{{- else if hasPrefix $release $name -}}
{{- $name -}}
{{- else -}}
{{- printf "%s-%s" $release $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kybernate.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/name: {{ include "kybernate.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: kybernate
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "kybernate.selector" -}}
app.kubernetes.io/name: {{ include "kybernate.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* metadata of an object: (dict "root" $ "component" "router" ["name" …] ["annotations" …] ["cluster" true]) */}}
{{- define "kybernate.metadata" -}}
name: {{ default (printf "%s-%s" (include "kybernate.fullname" .root) .component) .name }}
{{- if not .cluster }}
namespace: {{ .root.Release.Namespace }}
{{- end }}
labels:
  {{- include "kybernate.labels" .root | nindent 2 }}
  app.kubernetes.io/component: {{ .component }}
{{- with merge (dict) (default (dict) .annotations) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* metadata of a pod: (dict "root" $ "component" … ["labels" …] ["annotations" …] ["lasting" true]). What is lasting
has no label with a version, so that a new version alone does not replace it. */}}
{{- define "kybernate.podMetadata" -}}
labels:
  {{- if .lasting }}
  {{- include "kybernate.selector" . | nindent 2 }}
  {{- with .root.Values.commonLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- else }}
  {{- include "kybernate.labels" .root | nindent 2 }}
  app.kubernetes.io/component: {{ .component }}
  {{- end }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (default (dict) .annotations) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* An image: (dict "root" $ "image" <in place of .Values.image>). */}}
{{- define "kybernate.image" -}}
{{- $base := .root.Values.image -}}
{{- $version := printf "%s%s" .root.Chart.AppVersion (ternary "-dev" "" .root.Values.fakeGpu.enabled) -}}
{{- default (printf "%s%s%s" $base.repository (ternary "@" ":" (hasPrefix "sha256:" $base.tag)) (default $version $base.tag)) .image -}}
{{- end -}}

{{- define "kybernate.pullSecrets" -}}
{{- with .Values.global.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Security of a pod that needs nothing of the node. OpenShift gives user ids itself. */}}
{{- define "kybernate.podSecurity" -}}
runAsNonRoot: true
{{- if not .Values.openshift.enabled }}
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* Security of a pod that works with files of the node, which belong to root. It has no capabilities. */}}
{{- define "kybernate.nodePodSecurity" -}}
runAsUser: 0
runAsGroup: 0
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "kybernate.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* What a sample's Deployment is called after its model. */}}
{{- define "kybernate.sampleName" -}}
{{- . | lower | replace "." "-" | replace "/" "-" | replace "_" "-" -}}
{{- end -}}

{{/* Of the Jobs, and of bus-init. */}}
{{- define "kybernate.jobResources" -}}
requests: {cpu: 10m, memory: 64Mi}
limits: {cpu: "1", memory: 256Mi}
{{- end -}}

{{/* Where clients of the cluster bus connect. */}}
{{- define "kybernate.natsUrl" -}}
{{- if not .Values.externalNats.url -}}
{{- $host := default (printf "%s-nats.%s.svc" (include "kybernate.fullname" .) .Release.Namespace) .Values.nats.service.clusterIP -}}
{{- printf "%s://%s:4222" (ternary "nats" "tls" (empty (include "kybernate.natsTls" .))) $host -}}
{{- else -}}
{{- .Values.externalNats.url -}}
{{- end -}}
{{- end -}}

{{- define "kybernate.routerUrl" -}}
{{- $host := default (printf "%s-router.%s.svc" (include "kybernate.fullname" .) .Release.Namespace) .Values.router.service.spec.clusterIP -}}
{{- printf "%s://%s:%v" (ternary "http" "https" (empty .Values.router.tls.existingSecret)) $host .Values.router.service.port -}}
{{- end -}}

{{- define "kybernate.consoleUrl" -}}
{{- $host := printf "%s-console.%s.svc" (include "kybernate.fullname" .) .Release.Namespace -}}
{{- printf "%s://%s:8781" (ternary "http" "https" (empty .Values.console.tls.existingSecret)) $host -}}
{{- end -}}

{{/* Secret with the keys of the cluster bus; empty: connections without a key. */}}
{{- define "kybernate.keySecret" -}}
{{- if .Values.externalNats.url -}}
{{- .Values.externalNats.credsSecret | default .Values.keys.existingSecret -}}
{{- else -}}
{{- default (printf "%s-bus-keys" (include "kybernate.fullname" .)) .Values.keys.existingSecret -}}
{{- end -}}
{{- end -}}

{{/* Whether this release makes the streams: that of NATS, or with another NATS that of the console. */}}
{{- define "kybernate.busInit" -}}
{{- if or (not .Values.externalNats.url) (and .Values.router.enabled .Values.console.enabled) }}true{{ end -}}
{{- end -}}

{{/* What its files end with: seeds of nkeys, or JWTs with their seeds. */}}
{{- define "kybernate.keySuffix" -}}
{{- ternary "creds" "nk" (ne .Values.externalNats.credsSecret "") -}}
{{- end -}}

{{/* Secret with ca.crt of the bus; empty: the system's authorities, or no TLS. */}}
{{- define "kybernate.natsCaSecret" -}}
{{- if .Values.externalNats.url -}}
{{- .Values.externalNats.caSecret -}}
{{- else if include "kybernate.natsTls" . -}}
{{- include "kybernate.natsTlsSecret" . -}}
{{- end -}}
{{- end -}}

{{/* Whether the servers of the chart speak TLS. */}}
{{- define "kybernate.natsTls" -}}
{{- if or .Values.nats.tls.existingSecret .Values.nats.tls.certManager.issuerRef }}true{{ end -}}
{{- end -}}

{{- define "kybernate.natsTlsSecret" -}}
{{- default (printf "%s-nats-tls" (include "kybernate.fullname" .)) .Values.nats.tls.existingSecret -}}
{{- end -}}

{{/* Secret with the clients' certificate, when servers ask for one. */}}
{{- define "kybernate.natsClientSecret" -}}
{{- if not .Values.externalNats.url -}}{{- .Values.nats.tls.clientSecret -}}{{- end -}}
{{- end -}}

{{/* Settings of every service. (dict "root" $ "role" …); without a role it does not use the bus. */}}
{{- define "kybernate.env" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: KYB_NODE
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
- name: KYB_INSTANCE
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: KYB_LOG_LEVEL
  value: {{ .root.Values.log.level }}
{{- if and .root.Values.fakeGpu.enabled (ne (float64 .root.Values.fakeGpu.speed) 1.0) }}
- name: KYB_SPEED
  value: {{ .root.Values.fakeGpu.speed | quote }}
{{- end }}
{{- if .role }}
{{ include "kybernate.busEnv" . }}
{{- end }}
{{- with .root.Values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "kybernate.busEnv" -}}
- name: KYB_NATS_URL
  value: {{ include "kybernate.natsUrl" .root | quote }}
{{- if include "kybernate.keySecret" .root }}
- name: KYB_NATS_CREDS_FILE
  value: /etc/kybernate/bus-key/{{ .role }}.{{ include "kybernate.keySuffix" .root }}
{{- end }}
{{- if include "kybernate.natsCaSecret" .root }}
- name: KYB_NATS_CA_FILE
  value: /etc/kybernate/bus-tls/ca.crt
{{- end }}
{{- if include "kybernate.natsClientSecret" .root }}
- name: KYB_NATS_CERT_FILE
  value: /etc/kybernate/bus-tls/tls.crt
{{- end }}
{{- end -}}

{{- define "kybernate.busMounts" -}}
{{- if include "kybernate.keySecret" .root }}
- {name: bus-key, mountPath: /etc/kybernate/bus-key, readOnly: true}
{{- end }}
{{- if or (include "kybernate.natsCaSecret" .root) (include "kybernate.natsClientSecret" .root) }}
- {name: bus-tls, mountPath: /etc/kybernate/bus-tls, readOnly: true}
{{- end }}
{{- end -}}

{{/* Only the role's own file is in the pod. */}}
{{- define "kybernate.busVolumes" -}}
{{- $suffix := include "kybernate.keySuffix" .root }}
{{- with include "kybernate.keySecret" .root }}
- name: bus-key
  secret:
    secretName: {{ . }}
    defaultMode: 0440
    items:
      - {key: {{ $.role }}.{{ $suffix }}, path: {{ $.role }}.{{ $suffix }}}
{{- end }}
{{- $ca := include "kybernate.natsCaSecret" .root }}
{{- $client := include "kybernate.natsClientSecret" .root }}
{{- if or $ca $client }}
- name: bus-tls
  projected:
    defaultMode: 0440
    sources:
      {{- with $ca }}
      - secret:
          name: {{ . }}
          items: [{key: ca.crt, path: ca.crt}]
      {{- end }}
      {{- with $client }}
      - secret:
          name: {{ . }}
          items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]
      {{- end }}
{{- end }}
{{- end -}}

{{/* Probes over HTTP; liveness never depends on NATS. (dict "port" …) */}}
{{- define "kybernate.probes" -}}
{{- $scheme := default "HTTP" .scheme -}}
startupProbe:
  httpGet: {path: /healthz, port: {{ .port }}, scheme: {{ $scheme }}}
  periodSeconds: 1
  failureThreshold: 120
  timeoutSeconds: 2
livenessProbe:
  httpGet: {path: /healthz, port: {{ .port }}, scheme: {{ $scheme }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: {{ .port }}, scheme: {{ $scheme }}}
  periodSeconds: {{ default 3 .readyEvery }}
  timeoutSeconds: 3
  failureThreshold: {{ default 2 .readyFailures }}
{{- end -}}

{{/* Token of the API server for one container of a pod, not for all of them. */}}
{{- define "kybernate.tokenVolume" -}}
- name: api-token
  projected:
    defaultMode: 0444
    sources:
      - serviceAccountToken: {path: token, expirationSeconds: 3607}
      - configMap:
          name: kube-root-ca.crt
          items: [{key: ca.crt, path: ca.crt}]
      - downwardAPI:
          items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]
{{- end -}}
{{- define "kybernate.tokenMount" -}}
- {name: api-token, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
{{- end -}}

{{/* The floor: without these a node agent is silently wanted on no node at all. */}}
{{- define "kybernate.agentPlacement" -}}
priorityClassName: system-node-critical
tolerations:
  - {key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}
  - {key: CriticalAddonsOnly, operator: Exists}
  {{- if .Values.fakeGpu.enabled }}
  - {key: node-role.kubernetes.io/control-plane, operator: Exists, effect: NoSchedule}
  {{- end }}
{{- if not (or .Values.fakeGpu.enabled (dig "spec" "affinity" "" .Values.nodeAgents.podTemplate)) }}
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
        - matchExpressions:
            - {key: feature.node.kubernetes.io/pci-10de.present, operator: In, values: ["true"]}
        - matchExpressions:
            - {key: nvidia.com/gpu.present, operator: In, values: ["true"]}
        - matchExpressions:
            - {key: kyb.ai/seats, operator: In, values: ["true"]}
{{- end }}
{{- end -}}

{{/* The fake driver's socket is in a separate folder, which is mounted into containers with a seat. */}}
{{- define "kybernate.fakeDriverDir" -}}
{{ .Values.hostPaths.run }}/fake-gpu
{{- end -}}

{{- define "kybernate.gpuEnv" -}}
{{- if .Values.fakeGpu.enabled }}
- name: KYB_FAKE_DRIVER
  value: {{ include "kybernate.fakeDriverDir" . }}/driver.sock
{{- else }}
- name: NVIDIA_VISIBLE_DEVICES
  value: all
- name: NVIDIA_DRIVER_CAPABILITIES
  value: compute,utility
{{- end }}
{{- end -}}

{{- define "kybernate.runtimeClass" -}}
{{- if and (not .Values.fakeGpu.enabled) .Values.gpu.runtimeClassName }}
runtimeClassName: {{ .Values.gpu.runtimeClassName }}
{{- end }}
{{- end -}}

{{/* What sample engines ask for. */}}
{{- define "kybernate.sampleResource" -}}
{{- if .Values.config.existingConfigMap }}kyb.ai/gpu-1x-seat{{ else }}{{ (first .Values.config.configs.default.profiles).resource }}{{ end -}}
{{- end -}}

{{- define "kybernate.configMapName" -}}
{{- default (printf "%s-config" (include "kybernate.fullname" .)) .Values.config.existingConfigMap -}}
{{- end -}}

{{/* Where a pod that needs no GPU goes. (dict "root" $ "component" …) */}}
{{- define "kybernate.placement" -}}
priorityClassName: system-cluster-critical
{{- if .root.Values.fakeGpu.enabled }}
tolerations:
  - {key: node-role.kubernetes.io/control-plane, operator: Exists, effect: NoSchedule}
{{- end }}
topologySpreadConstraints:
  {{- $selector := include "kybernate.selector" . }}
  {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- $selector | nindent 8 }}
  {{- end }}
{{- end -}}

{{/* A workload with what the values add to its pods:
(dict "workload" <its YAML> "podTemplate" <PodTemplate> "containers" <by name, fields of a container>) */}}
{{- define "kybernate.merged" -}}
{{- $workload := fromYaml .workload -}}
{{- with $workload.Error -}}{{- fail . -}}{{- end -}}
{{- include "kybernate.merge" (dict "into" $workload.spec.template "from" .podTemplate) -}}
{{- range $container := $workload.spec.template.spec.containers -}}
{{- include "kybernate.merge" (dict "into" $container "from" (get $.containers $container.name | default dict)) -}}
{{- end -}}
{{- toYaml $workload -}}
{{- end -}}

{{/* Put one map into another: null takes a key away, maps are merged, lists of what has a name and tolerations get
longer, other lists are replaced. */}}
{{- define "kybernate.merge" -}}
{{- range $key, $given := .from -}}
{{- $here := get $.into $key -}}
{{- if kindIs "invalid" $given -}}
{{- $_ := unset $.into $key -}}
{{- else if and (kindIs "map" $given) (kindIs "map" $here) -}}
{{- include "kybernate.merge" (dict "into" $here "from" $given) -}}
{{- else if and $here (has $key (list "env" "tolerations" "volumes" "volumeMounts" "containers" "initContainers")) -}}
{{- $by := ternary "mountPath" "name" (eq $key "volumeMounts") -}}
{{- $names := list -}}
{{- range $given -}}{{- $names = append $names (get . $by) -}}{{- end -}}
{{- $kept := list -}}
{{- range $here -}}{{- if or (eq $key "tolerations") (not (has (get . $by) $names)) -}}{{- $kept = append $kept . -}}{{- end -}}{{- end -}}
{{- $_ := set $.into $key (concat $kept $given) -}}
{{- else -}}
{{- $_ := set $.into $key $given -}}
{{- end -}}
{{- end -}}
{{- end -}}
