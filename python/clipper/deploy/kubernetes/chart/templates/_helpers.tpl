{{/* The name with which names of objects begin: short, since names of models follow it. */}}
{{- define "clipper.name" -}}
{{- .Release.Name | trunc 20 | trimSuffix "-" -}}
{{- end -}}

{{/* A token: the given one, else that of the last release, else a new one. */}}
{{- define "clipper.token" -}}
{{- $old := (lookup "v1" "Secret" .root.Release.Namespace .secret).data | default dict -}}
{{- $kept := index $old .key | default "" | b64dec -}}
{{- .given | default $kept | default (randAlphaNum 32) -}}
{{- end -}}

{{- define "clipper.image" -}}
{{- .Values.image | default (printf "clipper/server:%s" .Chart.AppVersion) | quote -}}
{{- end -}}

{{- define "clipper.state" -}}
{{- if .Values.state.url }}external{{ else }}{{ .Values.state.kind }}{{ end -}}
{{- end -}}

{{/* Where the state is: for servers and nodes. */}}
{{- define "clipper.stateUrl" -}}
{{- $redis := printf "redis://%s-redis:6379/0" (include "clipper.name" .) -}}
{{- $kind := include "clipper.state" . -}}
{{- if eq $kind "redis" }}{{ $redis }}{{ else if eq $kind "volume" }}/state{{ else -}}
{{- required "state.url: of the Redis or etcd that pods reach" .Values.state.url }}{{ end -}}
{{- end -}}

{{/* Of a component, from its name: what Services select its pods by, and its labels. */}}
{{- define "clipper.selector" -}}
app.kubernetes.io/name: clipper
app.kubernetes.io/instance: {{ . }}
{{- end -}}

{{- define "clipper.labels" -}}
{{ include "clipper.selector" .name }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{- define "clipper.meta" -}}
name: {{ .name }}
labels:
  {{- include "clipper.labels" . | nindent 2 }}
{{- end -}}

{{/* Restricted rights: of a pod of this user, and of its container. */}}
{{- define "clipper.pod" -}}
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ . }}
  runAsGroup: {{ . }}
  fsGroup: {{ . }}
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "clipper.confined" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{- define "clipper.pulled" -}}
imagePullSecrets: {{ toJson .Values.imagePullSecrets }}
{{- end -}}

{{/* Of one component: spread over zones and machines. */}}
{{- define "clipper.spread" -}}
topologySpreadConstraints:
  {{- $name := .name }}
  {{- range .over }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "clipper.selector" $name | nindent 8 }}
  {{- end }}
{{- end -}}

{{/* One at a time, after its successor is ready. */}}
{{- define "clipper.oneAtATime" -}}
strategy:
  type: RollingUpdate
  rollingUpdate: {maxUnavailable: 0, maxSurge: 1}
{{- end -}}

{{- define "clipper.budget" -}}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "clipper.meta" . | nindent 2 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- include "clipper.selector" .name | nindent 6 }}
{{- end -}}

{{/* A Service: its name, the component whose pods it selects, ports by name. */}}
{{- define "clipper.service" -}}
---
apiVersion: v1
kind: Service
metadata:
  {{- include "clipper.meta" (dict "name" .name "part" "server") | nindent 2 }}
spec:
  {{- if .headless }}
  clusterIP: None
  publishNotReadyAddresses: true
  {{- end }}
  selector:
    {{- toYaml .selector | nindent 4 }}
  ports:
    {{- range $name, $port := .ports }}
    - {name: {{ $name }}, port: {{ $port }}, targetPort: {{ $name }}}
    {{- end }}
{{- end -}}

{{- define "clipper.claim" -}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  {{- include "clipper.meta" . | nindent 2 }}
spec:
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 2Gi}}
{{- end -}}

{{- define "clipper.secret" -}}
---
apiVersion: v1
kind: Secret
metadata:
  name: {{ .name }}
stringData:
  {{- range $key, $value := .data }}
  {{ $key }}: {{ quote $value }}
  {{- end }}
{{- end -}}

{{/* A variable whose value is in a Secret. */}}
{{- define "clipper.fromSecret" -}}
- name: {{ .variable }}
  valueFrom: {secretKeyRef: {name: {{ .secret }}, key: {{ .key }}}}
{{- end -}}

{{/* Probes of a component that answers over HTTP, and the time until it has left its Service. */}}
{{- define "clipper.probes" -}}
startupProbe:
  httpGet: {path: /v2/health/live, port: http}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /v2/health/live, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet: {path: /v2/health/ready, port: http}
  periodSeconds: {{ .readyPeriod }}
  timeoutSeconds: 5
  failureThreshold: 2
lifecycle: {preStop: {exec: {command: [sleep, {{ .away | quote }}]}}}
{{- end -}}

{{/* A Redis on a volume. */}}
{{- define "clipper.redis" -}}
---
apiVersion: apps/v1
kind: Deployment
metadata:
  {{- include "clipper.meta" (dict "name" . "part" "redis") | nindent 2 }}
spec:
  replicas: 1
  selector:
    matchLabels:
      {{- include "clipper.selector" . | nindent 6 }}
  strategy: {type: Recreate}
  template:
    metadata:
      labels:
        {{- include "clipper.labels" (dict "name" . "part" "redis") | nindent 8 }}
    spec:
      {{- include "clipper.pod" 999 | nindent 6 }}
      terminationGracePeriodSeconds: 30
      containers:
        - name: redis
          image: redis:7.4-bookworm
          args: [--appendonly, "yes", --appendfsync, always]
          ports:
            - {name: redis, containerPort: 6379}
          {{- include "clipper.confined" . | nindent 10 }}
          resources:
            requests: {cpu: 100m, memory: 128Mi}
            limits: {memory: 1Gi}
          livenessProbe:
            tcpSocket: {port: redis}
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: 3
          readinessProbe:
            tcpSocket: {port: redis}
            periodSeconds: 5
            timeoutSeconds: 5
            failureThreshold: 2
          volumeMounts:
            - {name: data, mountPath: /data}
            - {name: tmp, mountPath: /tmp}
      volumes:
        - {name: data, persistentVolumeClaim: {claimName: {{ . }}}}
        - {name: tmp, emptyDir: {}}
{{ include "clipper.service" (dict "name" . "selector" (include "clipper.selector" . | fromYaml)
    "ports" (dict "redis" 6379)) }}
{{ include "clipper.claim" (dict "name" . "part" "redis") }}
{{- end -}}
