{{- define "kv.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 55 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 55 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kv.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kv.labels" -}}
{{ include "kv.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "kv.config" -}}
{{- $http := dict "listen" "0.0.0.0:9400" "token_file" "/run/kv-secrets/http-token" -}}
{{- $ours := dict "server" (dict "socket" "/run/kv/server/kv.sock") "http" $http -}}
{{- toYaml (mustMergeOverwrite $ours (deepCopy .Values.config)) -}}
{{- end -}}

{{- define "kv.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
