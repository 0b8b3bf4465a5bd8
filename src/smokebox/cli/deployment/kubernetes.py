"""A project on Kubernetes: one pod that keeps its work on a volume."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smokebox.cli.deployment.facts import Facts

NEXT = """\
Next: smokebox build, build the image and push it, put its name into deploy/kubernetes.yaml, then
  kubectl create secret generic {name} --from-env-file=.env
  kubectl apply -f deploy/kubernetes.yaml"""

_MANIFESTS = """\
# One replica: the work of an app is in files, of which one pod is in charge.
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {name}
spec:
  serviceName: {name}
  replicas: 1
  selector:
    matchLabels: {{app: {name}}}
  template:
    metadata:
      labels: {{app: {name}}}
    spec:
      # What goes on has 30 seconds to end.
      terminationGracePeriodSeconds: 40
      securityContext:
        runAsNonRoot: true
        runAsUser: 10001
        fsGroup: 10001
      containers:
        - name: app
          image: {name}:{version}
          # SMOKEBOX_APP_KEYS, and the keys of models.
          envFrom:
            - secretRef: {{name: {name}}}
          ports:
            - {{name: http, containerPort: 8600}}
          readinessProbe:
            httpGet: {{path: /health, port: http}}
          livenessProbe:
            httpGet: {{path: /health, port: http}}
            initialDelaySeconds: 20
            failureThreshold: 5
          resources:
            requests: {{cpu: 100m, memory: 256Mi}}
            limits: {{memory: 1Gi}}
          volumeMounts:
            - {{name: state, mountPath: /state}}
  volumeClaimTemplates:
    - metadata:
        name: state
      spec:
        accessModes: [ReadWriteOnce]
        resources:
          requests: {{storage: 5Gi}}
---
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  selector: {{app: {name}}}
  ports:
    - {{name: http, port: 80, targetPort: http}}
"""


def files(facts: Facts) -> dict[str, str]:
    """The manifests. Names are those that Kubernetes takes."""
    name = facts.package.replace("_", "-")
    text = _MANIFESTS.format(name=name, version=facts.version)
    return {"deploy/kubernetes.yaml": text}
