# ruff: noqa: T201, PTH101, PTH102, PTH110, PTH112, PTH114, PTH115, PTH116, PTH118, PTH123, PTH208
# ruff: noqa: PTH211
"""Runs once in a container of a freshly built image, as its root, by PARL's own Python: copies the
folders that tasks will write below /.parl-seed and says what is there. Shipped as text; standard
library only. Nothing of the image is executed.

One argument: JSON {wanted: [path], limit_bytes, small_bytes, user}. Prints one JSON line."""

from __future__ import annotations

import json
import os
import stat
import sys
from typing import Any

SEEDS = "/.parl-seed"
SYSTEM = {"bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "run", "sbin",
          "sys", "tmp", "usr", "var", "box", ".parl", ".parl-seed", ".dockerenv"}  # fmt: skip


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Folders {path: {seed, bytes, files, mode}}, who the user is, and what stays read-only."""
    uid, gid, home = find_user(job["user"])
    wanted = [os.path.realpath(path) for path in [*job["wanted"], home] if path != "/"]
    maybe = ["/" + name for name in sorted(os.listdir("/")) if name not in SYSTEM]
    folders: dict[str, Any] = {}
    read_only: list[str] = []
    left = job["limit_bytes"]
    os.mkdir(SEEDS, 0o755)
    for path in sorted({*wanted, *maybe}):
        inside = any(path.startswith(other + "/") for other in folders)
        if inside or os.path.islink(path) or (os.path.exists(path) and not os.path.isdir(path)):
            continue
        size, count = measure(path)
        if size > (left if path in wanted else min(left, job["small_bytes"])):
            if path in wanted:
                raise SystemExit(f"{path} holds {size >> 20} MiB, too much to be writable")
            read_only.append(f"{path} ({size >> 20} MiB)")
            continue
        left -= size
        mode = stat.S_IMODE(os.stat(path).st_mode) if os.path.isdir(path) else 0o755
        seed = None
        if count:
            seed = str(len(folders))
            copy(path, f"{SEEDS}/{seed}", uid)
        # for a root that is nobody in the box, everything of it opens
        mode = mode | 0o700 if uid else mode | 0o755
        folders[path] = {"seed": seed, "bytes": size, "files": count, "mode": mode & 0o1777}
    return {"folders": folders, "uid": uid, "gid": gid, "home": home, "read_only": read_only}


def find_user(text: str) -> tuple[int, int, str]:
    """(uid, gid, home) of ``name|uid[:group|gid]``; nothing = root."""
    name, _, group = text.partition(":")
    name = name or "0"
    rows = [line.split(":") for line in read_lines("/etc/passwd")]
    row = next((r for r in rows if len(r) > 5 and name in (r[0], r[2])), None)
    if row is None and not name.isdigit():
        raise SystemExit(f"USER {text}: /etc/passwd of the image does not name it")
    uid = int(row[2]) if row else int(name)
    gid = int(row[3]) if row else 0
    if group:
        rows = [line.split(":") for line in read_lines("/etc/group")]
        found = next((r for r in rows if len(r) > 2 and group in (r[0], r[2])), None)
        gid = int(found[2]) if found else int(group)
    home = row[5] if row else ""
    if home in ("", "/", "/box"):  # the last is where PARL's own agent works
        home = "/root" if uid == 0 else "/tmp"
    return uid, gid, home


def read_lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except FileNotFoundError:
        return []


def measure(path: str) -> tuple[int, int]:
    """Bytes in whole pages and number of entries below ``path``; 0 when there is nothing."""
    size = count = 0
    for folder, folders, names in os.walk(path):
        for name in [*folders, *names]:
            state = os.lstat(os.path.join(folder, name))
            count += 1
            size += 4096 * (-(-state.st_size // 4096)) if stat.S_ISREG(state.st_mode) else 0
    return size, count


def copy(source: str, target: str, uid: int) -> None:
    """Folders, files and links as they are; pipes, sockets and devices are left out."""
    state = os.lstat(source)
    if stat.S_ISLNK(state.st_mode):
        os.symlink(os.readlink(source), target)
        os.chown(target, state.st_uid, state.st_gid, follow_symlinks=False)
        return
    if stat.S_ISDIR(state.st_mode):
        os.mkdir(target)
        for name in os.listdir(source):
            copy(os.path.join(source, name), os.path.join(target, name), uid)
    elif stat.S_ISREG(state.st_mode):
        with open(source, "rb") as read, open(target, "wb") as write:
            while chunk := read.read(1 << 20):
                write.write(chunk)
    else:
        return
    mode = stat.S_IMODE(state.st_mode) & 0o1777
    if uid == 0:  # what root reads, the box's own user must read
        mode |= 0o555 if mode & 0o111 or stat.S_ISDIR(state.st_mode) else 0o444
    os.chown(target, state.st_uid, state.st_gid)
    os.chmod(target, mode)
    os.utime(target, (state.st_mtime, state.st_mtime))


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
