"""Media types of manifests, configurations and layers, of OCI and of Docker's schema 2."""

from __future__ import annotations

OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_LAYER = "application/vnd.oci.image.layer.v1.tar"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"

INDEXES = (OCI_INDEX, DOCKER_INDEX)
MANIFESTS = (OCI_MANIFEST, DOCKER_MANIFEST)
CONFIGS = (OCI_CONFIG, DOCKER_CONFIG)
