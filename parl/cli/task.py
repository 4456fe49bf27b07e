"""``parl task``: what there is to train on (making and checking: task_author, task_run)."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from parl.cli import task_author, task_record, task_run
from parl.cli.registry import Registry
from parl.cli.shipped import find_task

if TYPE_CHECKING:
    from parl.store.tasks import Published
    from sandbox.catalog.base import Split
    from sandbox.task import TaskSpec

app = typer.Typer(no_args_is_help=True)
app.add_typer(task_author.app)
app.command("run")(task_run.run)
app.command("record")(task_record.record)


@app.command("list")
def list_tasks(registry: Registry = "") -> None:
    """Shipped tasks (family/type, tools, budget units, smallest correct length), then published
    ones (name@version)."""
    from parl.cli.registry import open_registry
    from sandbox.catalog.registry import get_family, list_families

    for family_name in list_families():
        family = get_family(family_name)
        for task_type in family.task_types:
            spec = family.instance(0, 0, "train", task_type)
            tools = ", ".join(tool.name for tool in spec.tools)
            typer.echo(f"{family_name}/{task_type}  tools: {tools}  {_budget(spec)}")
    opened = open_registry(registry, create=False)
    for task in opened.published() if opened is not None else []:
        tools = ", ".join(tool["name"] for tool in task.spec["tools"])
        typer.echo(f"{task.name}@{task.version}  tools: {tools}  type: {task.task_type}")


@app.command("show")
def show(
    name: Annotated[
        str, typer.Argument(help="family/type or name@version as `parl task list` prints it.")
    ],
    seed: Annotated[int, typer.Option(help="Run seed of the instance.")] = 0,
    index: Annotated[int, typer.Option(help="Instance number.", min=0)] = 0,
    heldout: Annotated[bool, typer.Option("--heldout", help="Held-out split.")] = False,
    registry: Registry = "",
) -> None:
    """One instance: instruction, tools, the box's data, the answer and how to get it."""
    from parl.cli.registry import open_registry

    opened = open_registry(registry, create=False)
    bare = name.partition("@")[0]
    if opened is not None and opened.published(bare):
        found = opened.find(name)
        _show_published(found, [c.id for c in opened.certificates(found.id)])
        return
    family, task_type = find_task(name)
    split: Split = "heldout" if heldout else "train"
    spec = family.instance(seed, index, split, task_type)
    typer.echo(f"{family.name}/{task_type}  seed {seed}  {split} #{index}")
    typer.echo(f"id           {spec.content_hash}")
    typer.echo(f"instruction  {spec.instruction}")
    for tool in spec.tools:
        typer.echo(f"tool         {tool.name}: {tool.description} ({tool.effect})")
        typer.echo(f"             {json.dumps(tool.schema, ensure_ascii=False)}")
    limits = spec.limits
    typer.echo(f"budget       {_budget(spec)}")
    typer.echo(
        f"limits       {limits.max_turns} turns, {limits.timeout_s:g} s an episode, "
        f"{limits.call_timeout_s:g} s a call, {limits.max_output_bytes} bytes an answer"
    )
    typer.echo(f"world        {json.dumps(spec.environment.data, ensure_ascii=False)}")
    typer.echo(f"verifier     {json.dumps(spec.verifier.data, ensure_ascii=False)}")
    oracle = family.oracle(spec)
    for number, calls in enumerate(oracle.rounds, start=1):
        written = "; ".join(f"{call.name_text}({call.arguments_text})" for call in calls)
        typer.echo(f"oracle {number}     {written}")
    typer.echo(f"answer       {oracle.final_text}")


def _show_published(task: Published, certificates: list[str]) -> None:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(task.published_at))
    typer.echo(f"{task.name}@{task.version}  published {when} UTC")
    typer.echo(f"id           {task.id}")
    typer.echo(f"type         {task.task_type}")
    typer.echo(f"instruction  {task.spec['instruction']}")
    for tool in task.spec["tools"]:
        typer.echo(f"tool         {tool['name']}: {tool['description']} ({tool['effect']})")
    for certificate in certificates:
        typer.echo(f"certificate  {certificate}")


def _budget(spec: TaskSpec) -> str:
    units = ", ".join(f"{value:g} {unit}" for unit, value in spec.budget_units.items()) or "none"
    return f"budget units: {units}, shortest correct answer: {spec.min_tokens or '?'} tokens"
