"""``parl task new | check | publish | import | export``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from parl.cli.boxes import Backend, BaseImages, SettingsFile, boxes
from parl.cli.live import AllowLive, ProxyFile, live
from parl.cli.registry import Registry

if TYPE_CHECKING:
    from sandbox.check.findings import CheckReport
    from sandbox.check.run import CheckSettings

app = typer.Typer()


@app.command("new")
def new(
    name: Annotated[str, typer.Argument(help="org/name, or name; the folder is called name.")],
    family: Annotated[
        str, typer.Option("--family", "-f", help="python | http | mcp | bash.")
    ] = "python",
    parent: Annotated[Path, typer.Option("--dir", help="Where the folder goes.")] = Path(),
) -> None:
    """Write a complete example task that passes its check; change it from there."""
    from sandbox.templates.new import write_task

    folder = write_task(parent / name.split("/")[-1], name, family)
    typer.echo(f"wrote {folder}\ncheck it with: parl task check {folder}")


@app.command("check")
def check(
    target: Annotated[str, typer.Argument(help="Task folder, or family or family/type.")],
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the report here; - prints it.")
    ] = None,
    repeat: Annotated[
        int, typer.Option("--repeat", "-n", min=1, help="Episodes of oracle and nop each.")
    ] = 20,
    backend: Backend = "auto",
    base_images: BaseImages = None,
    sandbox: SettingsFile = None,
    allow_live: AllowLive = False,
    proxy_file: ProxyFile = None,
    build_image: Annotated[
        bool, typer.Option("--build-image", help="Also run docker build, without network.")
    ] = False,
    registry: Registry = "",
) -> None:
    """Everything that must hold before a task may train; 0 = passed (certified from --repeat 5
    on), 1 = flaws, 2 = no task."""
    import asyncio
    import json

    from infra.errors import ConfigError
    from sandbox.check.certificate import too_few
    from sandbox.check.findings import report_text
    from sandbox.check.run import CheckSettings

    quiet = json_file is not None and str(json_file) == "-"
    if json_file is not None and not quiet:
        _writable(json_file)  # a check takes minutes
    settings = CheckSettings(
        repeat=repeat,
        config=live(boxes(backend, base_images, sandbox), allow_live, proxy_file, Path(target)),
        build_image=build_image,
        say=(lambda line: None) if quiet else lambda line: typer.echo(line, err=True),
    )
    report = asyncio.run(_report(target, settings))
    text = json.dumps(report.to_dict(), indent=1, ensure_ascii=False)
    if quiet:
        typer.echo(text)
    else:
        typer.echo(report_text(report))
    if json_file is not None and not quiet:
        try:
            json_file.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {json_file}: {error.strerror}") from error
    if not report.passed:
        raise typer.Exit(1)
    few = too_few(report.flake)
    if few is not None:
        typer.echo(f"not certified: {few}", err=True)
        return
    _certify(target, report, registry, quiet)


def _writable(path: Path) -> None:
    """ConfigError when the report could not be written; leaves no file behind."""
    from infra.errors import ConfigError

    existed = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror}") from error
    if not existed:
        path.unlink()


async def _report(target: str, settings: CheckSettings) -> CheckReport:
    from sandbox.catalog.registry import get_family, list_families
    from sandbox.check.certificate import MIN_REPEAT
    from sandbox.check.run import check_family, check_folder
    from sandbox.errors import TaskError

    folder = Path(target)
    if folder.is_dir():
        if settings.repeat >= MIN_REPEAT and not os.access(folder, os.W_OK):
            raise TaskError(
                f"{folder}: cannot be written, so the check would end without its certificate; "
                "make the folder writable or check a copy"
            )
        return await check_folder(folder, settings)
    family, _, task_type = target.partition("/")
    if family in list_families():
        found = get_family(family)
        if task_type and task_type not in found.task_types:
            raise TaskError(
                f"{family} has no task type {task_type!r}; known: {', '.join(found.task_types)}"
            )
        return await check_family(found, task_type or None, settings)
    raise TaskError(
        f"{target!r} is neither a folder nor a shipped family ({', '.join(list_families())}); "
        "`parl task new` makes a task folder"
    )


def _certify(target: str, report: CheckReport, registry_url: str, quiet: bool) -> None:
    """Sign, keep in the registry and beside the folder."""
    from parl.cli.registry import open_registry
    from sandbox.catalog.registry import get_family
    from sandbox.check.certificate import issue, write_certificate
    from sandbox.check.keys import load_key
    from sandbox.task import load_task

    certificate = issue(report, load_key())
    registry = open_registry(registry_url)
    assert registry is not None, "open_registry(create=True) always opens one"
    folder = Path(target)
    if folder.is_dir():
        spec = load_task(folder).spec
        where = str(write_certificate(folder, certificate))
    else:
        spec = get_family(target.partition("/")[0]).instance(0, 0, "train", report.task_types[0])
        where = "the registry"
    registry.add_certificate(certificate, report.to_dict(), spec)
    if not quiet:
        typer.echo(f"certificate {certificate.id[:16]} in {where}")


@app.command("publish")
def publish(
    folder: Annotated[Path, typer.Argument(help="Checked task folder.")], registry: Registry = ""
) -> None:
    """Put a certified task into the registry as the next version of its name."""
    from parl.cli.registry import open_registry, registry_url
    from sandbox.check.certificate import require_certificate

    require_certificate(folder)
    opened = open_registry(registry)
    assert opened is not None, "open_registry(create=True) always opens one"
    published = opened.publish(folder)
    typer.echo(f"published {published.name}@{published.version} in {registry_url(registry)}")


@app.command("import")
def import_tasks(
    format_name: Annotated[
        str,
        typer.Argument(metavar="FORMAT", help="harbor | terminal-bench | nemo-gym | tau2 | bfcl."),
    ],
    source: Annotated[Path, typer.Argument(help="Folder or file in that format.")],
    dest: Annotated[Path, typer.Argument(help="New folder for the tasks.")],
    limit: Annotated[int, typer.Option(min=0, help="At most so many; 0 = all.")] = 0,
) -> None:
    """Write tasks of another format as task folders, and say everything that is lost."""
    from sandbox.importers.registry import import_from

    result = import_from(format_name, source, dest, limit)
    for task in result.tasks:
        typer.echo(f"{task.folder}")
        for line in task.downgrades:
            typer.echo(f"  downgrade: {line}")
    for line in result.skipped:
        typer.echo(f"skipped: {line}")
    typer.echo(
        f"{len(result.tasks)} tasks, {sum(len(task.downgrades) for task in result.tasks)} "
        f"downgrades, {len(result.skipped)} skipped"
    )
    if not result.tasks:
        raise typer.Exit(1)


@app.command("export")
def export(
    reference: Annotated[
        str, typer.Argument(help="Published name[@version], family/type, or a task folder.")
    ],
    dest: Annotated[Path, typer.Argument(help="New folder.")],
    seed: Annotated[int, typer.Option(help="Of a shipped family's instance.")] = 0,
    index: Annotated[int, typer.Option(min=0, help="Of a shipped family's instance.")] = 0,
    registry: Registry = "",
) -> None:
    """Write a task as a Harbor 1.4 folder."""
    from parl.cli.registry import registry_or_error
    from sandbox.check.archive import pack_folder, unpack_folder
    from sandbox.importers.harbor import export_family

    if (Path(reference) / "task.toml").is_file():
        unpack_folder(pack_folder(Path(reference)), dest)
    elif not export_family(reference, seed, index, dest):
        unpack_folder(registry_or_error(registry).archive(reference), dest)
    typer.echo(f"wrote {dest}")
