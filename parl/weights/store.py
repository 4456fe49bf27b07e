"""WeightStore: policy versions in memory and on disk, whole or not at all.

    <root>/v00007/weights.safetensors   the tensors
    <root>/v00007/manifest.json         version, checksum, sha256 of each tensor, model config

A version is written to a temporary folder, fsynced and renamed, so a reader never sees half of
one. What the ledger committed decides; a version on disk alone means nothing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections import OrderedDict
from dataclasses import asdict
from pathlib import Path

import numpy as np
import structlog
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from engine.errors import WeightsError
from engine.runtime.types import WeightManifest, WeightSet
from engine.runtime.weights import verify_weight_set

log = structlog.get_logger(__name__)

TENSORS = "weights.safetensors"
MANIFEST = "manifest.json"
TEMP_PREFIX = ".tmp-"
LEFTOVER_AFTER_S = 600.0
_FOLDER = re.compile(r"v(\d+)")


class WeightStore:
    """Publishes and serves versions. Safe between threads; one writer a folder at a time."""

    def __init__(self, root: Path, *, keep_on_disk: int = 3, keep_in_memory: int = 2) -> None:
        """``keep_*``: how many of the newest versions stay; older ones go after a publish."""
        if min(keep_on_disk, keep_in_memory) < 1:
            raise ValueError(
                f"keep_on_disk={keep_on_disk}, keep_in_memory={keep_in_memory}; expected at least "
                "1 of each, the active version"
            )
        self.root = root
        self._keep_on_disk = keep_on_disk
        self._keep_in_memory = keep_in_memory
        self._memory: OrderedDict[int, WeightSet] = OrderedDict()
        self._lock = threading.Lock()
        root.mkdir(parents=True, exist_ok=True)
        _sweep(root)

    def publish(self, weights: WeightSet) -> Path:
        """Make ``weights`` the latest version; returns its folder.

        Publishing the same set again is a no-op. Versions newer than this one, and the same
        version with another checksum, are leftovers of a crash before their commit and go away.
        WeightsError when the set does not match its own manifest or cannot be written.
        """
        verify_weight_set(weights)
        version = weights.manifest.version
        if version < 0:
            raise WeightsError(f"weight version {version}: expected 0 or more")
        with self._lock:
            self._drop_newer(version)
            folder = self._folder(version)
            if not self._holds(folder, weights.manifest):
                self._write(folder, weights)
            self._memory[version] = weights
            self._memory.move_to_end(version)
            while len(self._memory) > self._keep_in_memory:
                self._memory.popitem(last=False)
            for old in self._versions_on_disk()[: -self._keep_on_disk]:
                shutil.rmtree(self._folder(old))
        return folder

    def fetch(self, version: int | None = None) -> WeightSet:
        """A version (None = the latest), checked against its manifest when it comes from disk.

        WeightsError when it is not there, corrupt, or nothing was published yet.
        """
        with self._lock:
            wanted = self._latest() if version is None else version
            if wanted is None:
                raise WeightsError(
                    f"no weights in {self.root}; publish a version before engines start"
                )
            if wanted in self._memory:
                return self._memory[wanted]
        return self._read(wanted)

    def latest(self) -> int | None:
        """The newest version; None before the first publish."""
        with self._lock:
            return self._latest()

    def versions(self) -> list[int]:
        """What ``fetch`` can serve, ascending."""
        with self._lock:
            return sorted({*self._versions_on_disk(), *self._memory})

    def _latest(self) -> int | None:
        return max({*self._versions_on_disk(), *self._memory}, default=None)

    def _versions_on_disk(self) -> list[int]:
        matches = (_FOLDER.fullmatch(path.name) for path in self.root.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def _folder(self, version: int) -> Path:
        return self.root / f"v{version:05d}"

    def _drop_newer(self, version: int) -> None:
        for newer in [v for v in self._versions_on_disk() if v > version]:
            log.warning("weights_rolled_back", dropped=newer, published=version)
            shutil.rmtree(self._folder(newer))
        for newer in [v for v in self._memory if v > version]:
            del self._memory[newer]

    def _holds(self, folder: Path, manifest: WeightManifest) -> bool:
        if not (folder / MANIFEST).is_file():
            return False
        return _read_manifest(folder).checksum == manifest.checksum

    def _write(self, folder: Path, weights: WeightSet) -> None:
        temp = self.root / f"{TEMP_PREFIX}{folder.name}-{os.getpid()}"
        try:
            shutil.rmtree(temp, ignore_errors=True)
            temp.mkdir()
            # save_file writes a transposed view's memory as it lies, not its elements in order
            tensors = {n: np.asarray(t, order="C") for n, t in weights.tensors.items()}
            save_file(tensors, temp / TENSORS)
            (temp / MANIFEST).write_text(json.dumps(asdict(weights.manifest), sort_keys=True))
            for path in (temp / TENSORS, temp / MANIFEST, temp):
                _fsync(path)
            if folder.exists():
                log.warning("weights_replaced", version=weights.manifest.version)
                shutil.rmtree(folder)
            temp.rename(folder)
            _fsync(self.root)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temp, ignore_errors=True)
            raise WeightsError(
                f"weight version {weights.manifest.version} cannot be written to {folder}: "
                f"{error}; free space or make the folder writable, then resume"
            ) from error

    def _read(self, version: int) -> WeightSet:
        folder = self._folder(version)
        if not folder.is_dir():
            there = ", ".join(map(str, self.versions())) or "none"
            raise WeightsError(
                f"weight version {version} is not in {self.root} (versions there: {there}); it was "
                "never published or is older than the ones kept: resume from a checkpoint"
            )
        manifest = _read_manifest(folder)
        try:
            tensors = load_file(folder / TENSORS)
        except (OSError, SafetensorError) as error:
            raise WeightsError(
                f"{folder / TENSORS} cannot be read: {error}; delete the folder and publish "
                f"version {version} again"
            ) from error
        weights = WeightSet(manifest, tensors)
        verify_weight_set(weights)
        if manifest.version != version:
            raise WeightsError(
                f"{folder / MANIFEST} says version {manifest.version}, its folder {version}; "
                "delete the folder and publish the version again"
            )
        return weights


def _read_manifest(folder: Path) -> WeightManifest:
    path = folder / MANIFEST
    try:
        return WeightManifest(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise WeightsError(
            f"{path} is not a weight manifest: {error}; delete the folder and publish the version "
            "again"
        ) from error


def _sweep(root: Path) -> None:
    """Delete what a crash left half written; a younger folder may be another process at work."""
    for path in root.glob(f"{TEMP_PREFIX}*"):
        if path.stat().st_mtime < time.time() - LEFTOVER_AFTER_S:
            shutil.rmtree(path)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
