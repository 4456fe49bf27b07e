"""TaskRegistry: certificates and published tasks in a ledger.

registry = TaskRegistry(open_ledger(url))
registry.add_certificate(certificate, report, spec)
published = registry.publish(Path("my-task"))       # version 1, 2, ... of its name
registry.archive(published.name)                    # bytes for sandbox.check.archive
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from infra.db.engine import Ledger
from infra.db.models import TaskCertificateRow, TaskRow
from sandbox.check.archive import pack_folder
from sandbox.check.certificate import Certificate, require_certificate
from sandbox.check.subject import content_hash
from sandbox.errors import TaskError
from sandbox.task import TaskSpec, load_task


@dataclass(frozen=True, slots=True)
class Published:
    """One version of a task in the registry."""

    id: str
    name: str
    version: int
    task_type: str
    published_at: float
    spec: dict[str, Any]


class TaskRegistry:
    """Safe to share between threads."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def add_certificate(
        self, certificate: Certificate, report: Mapping[str, Any] | None, spec: TaskSpec
    ) -> None:
        """Store the certificate with its report; the same one again changes nothing."""

        def write(session: Session) -> None:
            _ensure_task(session, certificate.content_hash, spec)
            if session.get(TaskCertificateRow, certificate.id) is None:
                session.add(
                    TaskCertificateRow(
                        id=certificate.id,
                        task_id=certificate.content_hash,
                        signature=certificate.signature,
                        public_key=certificate.public_key,
                        report_json={
                            "certificate": asdict(certificate),
                            "report": dict(report or {}),
                        },
                        created_at=certificate.created_at,
                    )
                )

        self._ledger.run(write)

    def certificates(self, content: str) -> list[Certificate]:
        """Of one content hash, the newest first; not checked."""
        with self._ledger.session() as session:
            rows = session.scalars(
                select(TaskCertificateRow)
                .where(TaskCertificateRow.task_id == content)
                .order_by(TaskCertificateRow.created_at.desc())
            ).all()
        return [Certificate(**row.report_json["certificate"]) for row in rows]

    def publish(self, folder: Path) -> Published:
        """Give the folder's content the next version of its name.

        TaskError without a valid certificate, and for content that is published already.
        """
        certificate = require_certificate(folder)
        digest = content_hash(folder)
        spec = load_task(folder).spec
        archive = pack_folder(folder)

        def write(session: Session) -> Published:
            row = _ensure_task(session, digest, spec)
            if row.published_at is not None:
                raise TaskError(
                    f"{folder}: this content is published already as {row.name} version "
                    f"{row.version}; change the task and check it again to publish another"
                )
            last = session.scalars(
                select(TaskRow.version).where(
                    TaskRow.name == spec.name, TaskRow.published_at.is_not(None)
                )
            ).all()
            row.version = str(max((int(version) for version in last), default=0) + 1)
            row.published_at = time.time()
            row.archive = archive
            session.flush()
            return _published(row)

        self.add_certificate(certificate, None, spec)
        return self._ledger.run(write)

    def published(self, name: str | None = None) -> list[Published]:
        """Every version, by name and then version; or those of one name."""
        query = select(TaskRow).where(TaskRow.published_at.is_not(None))
        if name is not None:
            query = query.where(TaskRow.name == name)
        with self._ledger.session() as session:
            found = [_published(row) for row in session.scalars(query)]
        return sorted(found, key=lambda task: (task.name, task.version))

    def find(self, reference: str) -> Published:
        """``name`` (its newest version) or ``name@version``; TaskError lists what there is."""
        name, _, version = reference.partition("@")
        versions = self.published(name)
        chosen = [task for task in versions if version in ("", str(task.version))]
        if not chosen:
            known = ", ".join(sorted({task.name for task in self.published()})) or "none"
            there = ", ".join(str(task.version) for task in versions)
            what = f"it has versions {there}" if versions else f"published: {known}"
            raise TaskError(f"no published task {reference!r}; {what}")
        return chosen[-1]

    def archive(self, reference: str) -> bytes:
        """The published folder as tar.gz; TaskError as for ``find``."""
        found = self.find(reference)
        with self._ledger.session() as session:
            content = session.scalars(select(TaskRow.archive).where(TaskRow.id == found.id)).one()
        assert content is not None, f"{reference} is published without its archive"
        return content

    def num_certificates(self) -> int:
        """How many certificates the ledger holds."""
        with self._ledger.session() as session:
            return session.scalar(select(func.count()).select_from(TaskCertificateRow)) or 0


def _ensure_task(session: Session, digest: str, spec: TaskSpec) -> TaskRow:
    row = session.get(TaskRow, digest)
    if row is None:
        row = TaskRow(id=digest, name=spec.name, task_type=spec.task_type, spec_json=asdict(spec))
        session.add(row)
        session.flush()
    return row


def _published(row: TaskRow) -> Published:
    assert row.published_at is not None, f"{row.name} is not published"
    return Published(
        id=row.id,
        name=row.name,
        version=int(row.version),
        task_type=row.task_type,
        published_at=row.published_at,
        spec=dict(row.spec_json),
    )
