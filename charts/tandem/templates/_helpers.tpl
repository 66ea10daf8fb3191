{{/* What the names of the release's own objects begin with: `tandem` for the release of that name. */}}
{{- define "tandem.name" -}}
{{- if eq .Release.Name .Chart.Name }}{{ .Chart.Name }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 45 | trimSuffix "-" }}{{ end -}}
{{- end -}}

{{- define "tandem.operator" -}}{{ include "tandem.name" . }}-operator{{- end -}}

{{/* By these the NetworkPolicies of each deployment know the operator's pods: they never change. */}}
{{- define "tandem.selector" -}}
app.kubernetes.io/name: tandem-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "tandem.labels" -}}
{{ include "tandem.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{/* An image by its name: (list $ "tandem-engine" "what values name instead"). */}}
{{- define "tandem.image" -}}
{{- $root := index . 0 }}{{ $named := index . 2 -}}
{{- if $named }}{{ $named }}{{ else }}{{ $root.Values.image.registry }}/{{ index . 1 }}:{{ $root.Values.image.tag | default $root.Chart.AppVersion }}{{ end -}}
{{- end -}}

{{/* The name in this release of an object of files/rbac.yaml. */}}
{{- define "tandem.renamed" -}}
{{- $root := index . 0 }}{{ include "tandem.name" $root }}{{ trimPrefix "tandem" (index . 1) -}}
{{- end -}}
