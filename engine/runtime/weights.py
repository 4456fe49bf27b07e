"""Weight sets: named tensors with a digest each. numpy only: any process may build or check."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from engine.errors import WeightsError
from engine.runtime.types import WeightManifest, WeightSet


def tensor_digest(tensor: np.ndarray) -> str:
    """sha256 over dtype, shape and little-endian bytes."""
    data = np.ascontiguousarray(tensor)
    if data.dtype.byteorder == ">":
        data = data.astype(data.dtype.newbyteorder("<"))
    digest = hashlib.sha256(f"{data.dtype.str.lstrip('<|')}{data.shape}".encode())
    digest.update(data.tobytes())
    return digest.hexdigest()


def set_checksum(digests: Mapping[str, str]) -> str:
    """sha256 over the sorted ``name:digest`` lines."""
    lines = "".join(f"{name}:{digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()


def make_weight_set(
    version: int, tensors: Mapping[str, np.ndarray], model_config: Mapping[str, object]
) -> WeightSet:
    """Name ``tensors`` as policy ``version``."""
    digests = {name: tensor_digest(tensor) for name, tensor in tensors.items()}
    manifest = WeightManifest(version, set_checksum(digests), digests, dict(model_config))
    return WeightSet(manifest, dict(tensors))


def verify_weight_set(weights: WeightSet) -> None:
    """WeightsError naming the first tensor that is missing, extra or not what its digest says."""
    manifest = weights.manifest
    missing = sorted(set(manifest.tensors) - set(weights.tensors))
    extra = sorted(set(weights.tensors) - set(manifest.tensors))
    if missing or extra:
        raise WeightsError(
            f"weight set {manifest.version}: missing {missing[:3]}, unlisted {extra[:3]}; "
            "expected exactly the manifest's tensors: publish the version again"
        )
    for name, tensor in weights.tensors.items():
        if tensor_digest(tensor) != manifest.tensors[name]:
            raise WeightsError(
                f"weight set {manifest.version}: tensor {name} does not match its sha256; the copy "
                "is corrupt: publish the version again"
            )
    if set_checksum(manifest.tensors) != manifest.checksum:
        raise WeightsError(
            f"weight set {manifest.version}: manifest checksum {manifest.checksum[:12]} does not "
            "match its own tensor list; publish the version again"
        )
