"""Starts a real PostgreSQL server for tests: initdb in a temporary folder, unix socket only."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import psycopg


def find_binaries() -> Path | None:
    """Folder with initdb and postgres: Debian's newest version, else the one on PATH."""
    versions = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: int(p.parts[-3])
    )
    on_path = shutil.which("initdb")
    found = versions[-1] if versions else (Path(on_path) if on_path else None)
    return found.parent if found else None


class PostgresServer:
    """``with PostgresServer(find_binaries()) as server: server.new_database()``.

    PostgreSQL refuses to run as root, so root starts it as ``postgres`` or ``nobody``.
    """

    def __init__(self, binaries: Path) -> None:
        self._binaries = binaries
        # the path of a unix socket may have 107 bytes, so not below pytest's long folders
        self.folder = Path(tempfile.mkdtemp(prefix="parl-pg-"))
        self._as: dict[str, Any] = {}
        if os.geteuid() == 0:
            user = _first_user("postgres", "nobody")
            os.chown(self.folder, user.pw_uid, user.pw_gid)
            self._as = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        self._log = self.folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count(1)

    def __enter__(self) -> PostgresServer:
        data = self.folder / "data"
        subprocess.run(
            [self._binaries / "initdb", "-D", data, "-U", "parl", "-A", "trust", "--no-sync"],
            check=True,
            capture_output=True,
            cwd=self.folder,
            **self._as,
        )
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.folder)

    def start(self) -> None:
        """Start the server and wait until it answers."""
        settings = ["listen_addresses=", f"unix_socket_directories={self.folder}"]
        settings += ["fsync=off", "max_connections=60", "shared_buffers=16MB"]
        command = [str(self._binaries / "postgres"), "-D", str(self.folder / "data")]
        for setting in settings:
            command += ["-c", setting]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self.folder, **self._as
            )
        deadline = time.monotonic() + 60
        while True:
            try:
                psycopg.connect(f"host={self.folder} user=parl dbname=postgres").close()
                return
            except psycopg.OperationalError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"no server: {self._log.read_text()[-2000:]}") from None
                time.sleep(0.05)

    def stop(self) -> None:
        """Fast shutdown: open sessions are disconnected."""
        if self._process is not None:
            self._process.send_signal(2)
            self._process.wait(timeout=30)
            self._process = None

    def new_database(self) -> str:
        """SQLAlchemy URL of a fresh empty database."""
        name = f"test{next(self._numbers)}"
        with self.admin() as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        return f"postgresql+psycopg://parl@/{name}?host={self.folder}"

    def admin(self) -> psycopg.Connection:
        """An autocommit connection of the superuser."""
        return psycopg.connect(f"host={self.folder} user=parl dbname=postgres", autocommit=True)


def _first_user(*names: str) -> pwd.struct_passwd:
    by_name = {entry.pw_name: entry for entry in pwd.getpwall()}
    return next(by_name[name] for name in names if name in by_name)
