{{/* Values that contradict each other: each text says which to change. Types and names are the schema's business. */}}
{{- define "kybernate.validate" -}}
{{- $v := .Values -}}
{{- $wrong := list -}}

{{- range $name := list $v.fullnameOverride -}}
{{- if or (eq $name "kyb") (hasPrefix "kyb-" $name) -}}
{{- $wrong = append $wrong (printf "fullnameOverride %q: names must not be kyb or begin with kyb-, since Kubernetes makes KYB_… variables of such Services, which look like settings; take another name" $name) -}}
{{- end -}}
{{- end -}}
{{- if and (hasPrefix "sha256:" $v.image.tag) (not (regexMatch "^sha256:[a-f0-9]{64}$" $v.image.tag)) -}}
{{- $wrong = append $wrong (printf "image.tag=%s is no digest: give sha256: and 64 hexadecimal digits, as `docker images --digests` shows it, or a tag" $v.image.tag) -}}
{{- end -}}
{{- range $where, $image := dict "fakeGpu.samples.image" $v.fakeGpu.samples.image -}}
{{- if and $image (not (regexMatch "(:[A-Za-z0-9_][A-Za-z0-9._-]*|@sha256:[a-f0-9]{64})$" $image)) -}}
{{- $wrong = append $wrong (printf "%s=%s is without a version: write repository:tag, or repository@sha256: and 64 hexadecimal digits" $where $image) -}}
{{- end -}}
{{- end -}}
{{- range $where, $path := dict "kubeletRootDir" $v.kubeletRootDir "hostPaths.run" $v.hostPaths.run "hostPaths.state" $v.hostPaths.state "hostPaths.cdi" $v.hostPaths.cdi "hostPaths.nvidiaCdi" (default "/etc/cdi" $v.hostPaths.nvidiaCdi) -}}
{{- if not (regexMatch "^/.*[^/]$" $path) -}}
{{- $wrong = append $wrong (printf "%s=%q is no folder of the node: give an absolute path without / at its end" $where $path) -}}
{{- end -}}
{{- end -}}
{{- if and $v.externalNats.url (not (regexMatch "^(nats|tls|wss?)://[^,]+(,(nats|tls|wss?)://[^,]+)*$" $v.externalNats.url)) -}}
{{- $wrong = append $wrong (printf "externalNats.url=%s: give nats://host:4222 or tls://host:4222, several by commas" $v.externalNats.url) -}}
{{- end -}}
{{- range $label := list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" -}}
{{- if hasKey $v.commonLabels $label -}}
{{- $wrong = append $wrong (printf "commonLabels.%s: selectors go by it; take it out of commonLabels" $label) -}}
{{- end -}}
{{- end -}}

{{- if and $v.webhook.tls.existingSecret $v.webhook.certManager.enabled -}}
{{- $wrong = append $wrong "webhook.tls.existingSecret and webhook.certManager.enabled are two certificates: keep one of them" -}}
{{- end -}}
{{- if and $v.webhook.tls.caBundle (not $v.webhook.tls.existingSecret) -}}
{{- $wrong = append $wrong "webhook.tls.caBundle is the authority of webhook.tls.existingSecret: set that, too" -}}
{{- end -}}
{{- if and $v.externalNats.credsSecret (or $v.keys.existingSecret (not $v.externalNats.url)) -}}
{{- $wrong = append $wrong "externalNats.credsSecret has JWTs, for the NATS of externalNats.url: set that, and leave keys.existingSecret (nkeys) empty" -}}
{{- end -}}
{{- if not $v.externalNats.url -}}
{{- if not (has (int $v.nats.replicas) (list 1 3 5)) -}}
{{- $wrong = append $wrong (printf "nats.replicas=%v: JetStream needs a majority; set 1, 3 or 5" $v.nats.replicas) -}}
{{- end -}}
{{- $tls := $v.nats.tls -}}
{{- $issuer := $tls.certManager.issuerRef -}}
{{- if and (gt (int $v.nats.replicas) 1) (not (include "kybernate.natsTls" $)) (not $v.networkPolicy.enabled) -}}
{{- $wrong = append $wrong (printf "nats.replicas=%v with keys, but a client that reaches port 6222 of a server needs none: set networkPolicy.enabled=true (and have it enforced), or nats.tls.existingSecret" $v.nats.replicas) -}}
{{- end -}}
{{- if and $tls.existingSecret $issuer -}}
{{- $wrong = append $wrong "nats.tls.existingSecret and nats.tls.certManager.issuerRef both make the certificate: keep one of them" -}}
{{- end -}}
{{- if and $issuer (not (get $issuer "name")) -}}
{{- $wrong = append $wrong "nats.tls.certManager.issuerRef needs a name, of an Issuer or ClusterIssuer whose certificates carry ca.crt" -}}
{{- end -}}
{{- if and $tls.clientSecret (not (include "kybernate.natsTls" $)) -}}
{{- $wrong = append $wrong "nats.tls.clientSecret without TLS: set nats.tls.existingSecret or nats.tls.certManager.issuerRef" -}}
{{- end -}}
{{- if lt (int64 (include "kybernate.bytes" $v.nats.persistence.size)) 1845493760 -}}
{{- $wrong = append $wrong (printf "nats.persistence.size=%s cannot hold the streams, which reserve 1.25 GiB of four fifths of it and share the rest with the roster: set 1760Mi or more" $v.nats.persistence.size) -}}
{{- end -}}
{{- end -}}

{{- if and $v.fakeGpu.enabled (not $v.node.enabled) -}}
{{- $wrong = append $wrong "fakeGpu.enabled=true without node.enabled: no plugin would offer the fake GPUs; set node.enabled=true, or fakeGpu.enabled=false" -}}
{{- end -}}
{{- if and (not $v.fakeGpu.enabled) (ne (float64 $v.fakeGpu.speed) 1.0) -}}
{{- $wrong = append $wrong (printf "fakeGpu.speed=%v: only fake GPUs can be faster than time; set fakeGpu.enabled=true, or leave speed at 1" $v.fakeGpu.speed) -}}
{{- end -}}
{{- if ne (toString (dig "rollingUpdate" "maxSurge" 0 $v.node.updateStrategy)) "0" -}}
{{- $wrong = append $wrong "node.updateStrategy.rollingUpdate.maxSurge must be 0: two managers of one node would wait for each other's lock" -}}
{{- end -}}

{{- if and $v.config.existingConfigMap (gt (len $v.config.configs) 1) -}}
{{- $wrong = append $wrong "config.existingConfigMap is used in place of config.configs: put the configurations into that ConfigMap, or leave existingConfigMap empty" -}}
{{- end -}}
{{- if not $v.config.existingConfigMap -}}
{{- if not (hasKey $v.config.configs "default") -}}
{{- $wrong = append $wrong (printf "config.configs has no default, only %s: nodes without the label kyb.ai/config need it" (join ", " (keys $v.config.configs | sortAlpha))) -}}
{{- end -}}
{{- range $name, $config := $v.config.configs -}}
{{- $resources := list -}}
{{- $sizes := list -}}
{{- if not $config.profiles -}}
{{- $wrong = append $wrong (printf "config.configs.%s.profiles is empty: name at least one kind of seats" $name) -}}
{{- end -}}
{{- range $profile := $config.profiles -}}
{{- if has $profile.resource $resources -}}
{{- $wrong = append $wrong (printf "config.configs.%s: two profiles are called %s: kubelet knows resources by name; give each its own resource" $name $profile.resource) -}}
{{- end -}}
{{- if and (not $profile.migProfile) (has (toString $profile.groupSize) $sizes) -}}
{{- $wrong = append $wrong (printf "config.configs.%s: two profiles have groupSize %v: give each size once" $name $profile.groupSize) -}}
{{- end -}}
{{- if lt (int $profile.seatsPerGroup) 1 -}}
{{- $wrong = append $wrong (printf "config.configs.%s: profile %s has seatsPerGroup %v: set 1 or more" $name $profile.name $profile.seatsPerGroup) -}}
{{- end -}}
{{- $covered := false -}}
{{- range $v.admissionPolicy.resourcePrefixes -}}
{{- if hasPrefix . $profile.resource -}}{{- $covered = true -}}{{- end -}}
{{- end -}}
{{- if not $covered -}}
{{- $wrong = append $wrong (printf "config.configs.%s: resource %s begins with none of admissionPolicy.resourcePrefixes (%s): add its prefix there, so that webhook and policy know its pods" $name $profile.resource (join ", " $v.admissionPolicy.resourcePrefixes)) -}}
{{- end -}}
{{- if and $profile.migProfile (ne (default "none" $config.migStrategy) "mixed") -}}
{{- $wrong = append $wrong (printf "config.configs.%s: profile %s has migProfile: set migStrategy: mixed, or take migProfile out" $name $profile.name) -}}
{{- end -}}
{{- $resources = append $resources $profile.resource -}}
{{- if not $profile.migProfile -}}{{- $sizes = append $sizes (toString $profile.groupSize) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- range $who, $memory := dict "nats" (dig "resources" "limits" "memory" "512Mi" $v.nats.container) "router" (dig "resources" "limits" "memory" "768Mi" $v.router.container) -}}
{{- if not (regexMatch "^[0-9]+(\\.[0-9]+)?([kMGT]|[KMGT]i)?$" (toString $memory)) -}}
{{- $wrong = append $wrong (printf "%s.container.resources.limits.memory=%v is no quantity of Kubernetes: write 768Mi or 1Gi" $who $memory) -}}
{{- else if and (eq $who "router") (lt (int64 (include "kybernate.bytes" $memory)) 201326592) -}}
{{- $wrong = append $wrong (printf "router.container.resources.limits.memory=%v: a third of it holds requests, which may have 32 MiB each, and a caller gets half of that; set 192Mi or more" $memory) -}}
{{- end -}}
{{- end -}}
{{- if $v.router.enabled -}}
{{- with $v.router.autoscaling.maxReplicas -}}
{{- if gt (int $v.router.replicas) (int .) -}}
{{- $wrong = append $wrong (printf "router.replicas=%v is above router.autoscaling.maxReplicas=%v: swap them" $v.router.replicas .) -}}
{{- end -}}
{{- end -}}
{{- if lt (int $v.router.drainSeconds) 5 -}}
{{- $wrong = append $wrong (printf "router.drainSeconds=%v is less than the 5 s in which Services forget a router: set 5 or more" $v.router.drainSeconds) -}}
{{- end -}}
{{- end -}}
{{- if lt (int $v.node.terminationGracePeriodSeconds) 30 -}}
{{- $wrong = append $wrong (printf "node.terminationGracePeriodSeconds=%v cuts a park that is under way: set it above the longest park, at least 30" $v.node.terminationGracePeriodSeconds) -}}
{{- end -}}
{{- if and $v.fakeGpu.enabled (eq (toString $v.image.tag) .Chart.AppVersion) -}}
{{- $wrong = append $wrong (printf "fakeGpu.enabled with image.tag=%s, the production image, which has no fakes: leave image.tag empty, or take %s-dev" $v.image.tag $v.image.tag) -}}
{{- end -}}
{{- $samples := list -}}
{{- range $v.fakeGpu.samples.models -}}
{{- $name := include "kybernate.sampleName" .name -}}
{{- if and $v.fakeGpu.enabled (has $name $samples) -}}
{{- $wrong = append $wrong (printf "fakeGpu.samples.models: two of them make the Deployment %s; rename %s" $name .name) -}}
{{- end -}}
{{- $samples = append $samples $name -}}
{{- end -}}

{{- if and $v.webhook.enabled (not $v.node.manager.hostPort) -}}
{{- $wrong = append $wrong "webhook.enabled=true needs node.manager.hostPort (9471): kyb-probe asks there; set it, or webhook.enabled=false" -}}
{{- end -}}
{{- if and $v.monitoring.prometheusRule.enabled (not $v.monitoring.enabled) -}}
{{- $wrong = append $wrong "monitoring.prometheusRule.enabled needs the metrics: set monitoring.enabled=true, or prometheusRule.enabled=false" -}}
{{- end -}}

{{- if $wrong -}}
{{- fail (printf "these values do not work:\n  - %s\n" (join "\n  - " (uniq $wrong))) -}}
{{- end -}}
{{- end -}}
