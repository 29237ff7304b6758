from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.lra.token_labels import labels_of
from experiments.lra.weights import FILE


def print_result(console: Console, metrics: dict[str, Any], path: Path) -> None:
    source = "generated data" if metrics["generated_data"] else "released data"
    denoises = metrics["objective"] == "denoise"
    asked = "hidden tokens of the test examples" if denoises else "test examples"
    table = Table(title=f"{metrics['task']} ({source}), {metrics['test_examples']:,} {asked}")
    for column in ("", "accuracy", "loss (nats)"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row(
        f"{metrics['mask']} mask{supervision(metrics)}",
        f"{metrics['test_accuracy']:.3f}",
        f"{metrics['test_loss']:.3f}",
    )
    add_baselines(table, metrics)
    console.print(table)
    console.print(
        f"{metrics['steps']} steps in {metrics['training_seconds']:.0f} s, "
        f"{metrics['tokens_per_s']:,.0f} tokens/s on {metrics['device']}; "
        f"density {metrics['density']:.3f}; {metrics['parameters']:,} parameters"
    )
    if metrics["config"]["keep"] == "best":
        console.print(
            f"Tested: the weights of step {metrics['tested_step']}, the best validation, "
            f"{metrics['validation_accuracy']:.3f}"
        )
    if metrics["plateau_left_at"] is None:
        console.print("[yellow]The loss never fell below guessing:[/yellow] more steps may help, or another seed.")
    else:
        console.print(f"The loss fell below guessing at step {metrics['plateau_left_at']}.")
    console.print(f"Metrics: {path}", soft_wrap=True)
    if denoises:
        console.print(f"Begin with these weights: train --initial {path.with_name(FILE)}", soft_wrap=True)


def print_evaluated(console: Console, found: dict[str, Any], path: Path) -> None:
    table = Table(title=f"{found['task']} ({found['data']['origin']}), {found['test_examples']:,} test examples")
    for column in ("", "accuracy", "loss (nats)"):
        table.add_column(column, justify="left" if not column else "right")
    accuracy = f"{found['test_accuracy']:.3f} ± {found['error']:.3f}"
    table.add_row(f"{found['mask']} mask{supervision(found)}", accuracy, f"{found['test_loss']:.3f}")
    add_baselines(table, found)
    console.print(table)
    if (kinds := found["kinds"]) is not None:
        groups = kinds["groups"]
        table = Table(title=f"by {kinds['by']}")
        for column in ("", "examples", "accuracy", *groups[0]["rules"]):
            table.add_column(column, justify="left" if not column else "right")
        for group in groups:
            accuracies = [group["accuracy"], *group["rules"].values()]
            table.add_row(group["name"], f"{group['examples']:,}", *(f"{value:.3f}" for value in accuracies))
        console.print(table)
    if found["accuracy_of_run"] is not None:
        console.print(f"The run itself, on its own test split: {found['accuracy_of_run']:.3f}")
    if found["figure"] is not None:
        console.print(f"Its stored figure: {found['figure']}", soft_wrap=True)
    if found["trained_on"] is None:
        console.print("[yellow]Its file does not say what it was trained on:[/yellow] see that it was nothing of this.")
    console.print(f"Written to {path}", soft_wrap=True)


def print_summary(console: Console, summary: dict[str, Any], path: Path) -> None:
    source = "generated data" if summary["generated_data"] else "released data"
    title = f"{summary['task']} ({source}), {summary['test_examples']} test examples, {summary['mask']} mask"
    title += supervision(summary)
    table = Table(title=title)
    for column in ("", "accuracy", "loss (nats)", "left guessing at"):
        table.add_column(column, justify="left" if not column else "right")
    for run in summary["runs"]:
        left = "never" if run["plateau_left_at"] is None else str(run["plateau_left_at"])
        name = f"seed {run['seed']}"
        if summary["config"].get("keep") == "best":
            name += f", weights of step {run['tested_step']}"
        table.add_row(name, f"{run['test_accuracy']:.3f}", f"{run['test_loss']:.3f}", left)
    table.add_section()
    spread = "" if summary["test_accuracy_std"] is None else f" ± {summary['test_accuracy_std']:.3f}"
    table.add_row("mean ± std", f"{summary['test_accuracy_mean']:.3f}{spread}", "", "", style="bold")
    add_baselines(table, summary)
    console.print(table)
    console.print(f"Summary: {path}", soft_wrap=True)


def print_table(console: Console, lines: list[list[str]]) -> None:
    table = Table()
    for number, column in enumerate(lines[0]):
        table.add_column(column, justify="right" if number else "left")
    for line in lines[1:]:
        table.add_row(*line)
    console.print(table)


def supervision(metrics: dict[str, Any]) -> str:
    return f", {labels_of(metrics['task'])} in training" if metrics.get("token_labels") else ""


def add_baselines(table: Table, metrics: dict[str, Any]) -> None:
    for baseline in metrics["baselines"]:
        loss = "" if baseline["loss"] is None else f"{baseline['loss']:.3f}"
        table.add_row(baseline["rule"], f"{baseline['accuracy']:.3f}", loss, style="dim")
