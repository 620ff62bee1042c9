{{- define "tenantry.labels" -}}
app.kubernetes.io/name: tenantry
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/part-of: tenantry
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "tenantry.selector" -}}
app.kubernetes.io/name: tenantry
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "tenantry.account" -}}
system:serviceaccount:{{ .Release.Namespace }}:tenantry-operator
{{- end }}

{{- define "tenantry.gatewayUrl" -}}
{{- .Values.gateway.url | default (printf "http://tenantry-gateway.%s.svc:8080/v1" .Release.Namespace) }}
{{- end }}

{{- define "tenantry.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "tenantry.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* Name of the Secret that holds a part's private key. */ -}}
{{- define "tenantry.keySecret" -}}
{{- (index .root.Values.identity .part).existingSecret | default (printf "tenantry-%s-identity" .part) }}
{{- end }}

{{- /* Name of the Secret that holds the authority for mutual TLS: given, cert-manager's, or made by this chart. */ -}}
{{- define "tenantry.authoritySecret" -}}
{{- if .Values.identity.certManager.issuerRef.name }}tenantry-issued-authority
{{- else }}{{ .Values.identity.existingAuthoritySecret | default "tenantry-authority" }}
{{- end }}
{{- end }}

{{- define "tenantry.saltSecret" -}}
{{- .Values.identity.existingSaltSecret | default "tenantry-salt" }}
{{- end }}

{{- /* Pods that a rolling update must not leave on one node. */ -}}
{{- define "tenantry.placement" -}}
{{- with .values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "tenantry.selector" . | nindent 8 }}
{{- end }}

{{- define "tenantry.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: {{ . }}}
  periodSeconds: 2
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /healthz, port: {{ . }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet: {path: /readyz, port: {{ . }}}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 2
{{- end }}

{{- /* Quantities as strings: YAML takes a bare `2` for a number. */ -}}
{{- define "tenantry.amounts" -}}
{{- $amounts := dict }}
{{- range $name, $amount := . }}{{- $_ := set $amounts $name (toString $amount) }}{{- end }}
{{- toYaml $amounts }}
{{- end }}

{{- /* The operator's configuration file. */ -}}
{{- define "tenantry.config" -}}
releaseNamespace: {{ .Release.Namespace }}
engineImage: {{ .Values.images.engine | quote }}
imagePullPolicy: {{ .Values.images.pullPolicy }}
gatewayUrl: {{ include "tenantry.gatewayUrl" . | quote }}
fetcherUrl: {{ printf "http://tenantry-fetcher.%s.svc:8090" .Release.Namespace | quote }}
serviceAccount: tenantry-operator
tenantRole: tenantry-tenant-namespace
tiers: {{- toYaml .Values.tiers | nindent 2 }}
poolTemplates: {{- toYaml .Values.poolTemplates | nindent 2 }}
verifiers: {{- toYaml .Values.verifiers | nindent 2 }}
attestationPolicies: {{- toYaml .Values.attestationPolicies | nindent 2 }}
certificateSeconds: {{ .Values.certificateSeconds | int64 }}
nodePoolTemplates: {{- toYaml .Values.nodePoolTemplates | nindent 2 }}
gateway:
  image: {{ .Values.images.gateway | quote }}
  pullPolicy: {{ .Values.images.pullPolicy }}
  keySecret: {{ include "tenantry.keySecret" (dict "root" . "part" "gateway") }}
  saltSecret: {{ include "tenantry.saltSecret" . }}
  requests: {{- include "tenantry.amounts" .Values.gateway.resources.requests | nindent 4 }}
  limits: {{- include "tenantry.amounts" .Values.gateway.resources.limits | nindent 4 }}
  nodeSelector: {{- toYaml .Values.gateway.nodeSelector | nindent 4 }}
  tolerations: {{- toYaml .Values.gateway.tolerations | nindent 4 }}
gateImage: {{ .Values.images.operator | quote }}
quota: {{- toYaml .Values.quota | nindent 2 }}
resyncSeconds: {{ .Values.resyncSeconds | int64 }}
workers: {{ .Values.workers | int64 }}
protectedCidrs: {{- toYaml .Values.protectedCidrs | nindent 2 }}
protectedNamespaces: {{- toYaml .Values.protectedNamespaces | nindent 2 }}
regionLabel: {{ .Values.regionLabel | quote }}
privilegedNamespaces: {{- toYaml .Values.policies.privilegedNamespaces | nindent 2 }}
{{- if .Values.policies.enabled }}
admission:
  DedicatedNodes: [tenantry-nodes, tenantry-bindings, tenantry-namespaces]
  NetworkIsolation: [tenantry-namespaces]
  NoEgress: [tenantry-namespaces]
  PodHardening: [tenantry-namespaces]
  QuotaEnforced: [tenantry-namespaces]
{{- end }}
evidence:
  periodSeconds: {{ .Values.evidence.periodSeconds | int64 }}
  maxAgeSeconds: {{ .Values.evidence.maxAgeSeconds | int64 }}
  {{- if .Values.evidence.probes }}
  image: {{ .Values.images.operator | quote }}
  {{- end }}
  {{- if .Values.evidence.accessKeySecret }}
  accessKeyFile: /etc/tenantry/access/key
  {{- end }}
  {{- with .Values.evidence.outside }}
  outside: {{ . | quote }}
  {{- end }}
{{- end }}

{{- /* Bytes of a size such as 20Gi; the schema admits Mi, Gi and Ti. */ -}}
{{- define "tenantry.bytes" -}}
{{- $units := dict "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 }}
{{- $unit := substr (int (sub (len .) 2)) (len .) . }}
{{- mul (trimSuffix $unit . | int64) (index $units $unit | int64) }}
{{- end }}
