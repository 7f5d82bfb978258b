"""The PNG files of a run: one for each question, and all of them in overview.png."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from fp8rl_operator.report.records import Run

BLUE, ORANGE, GREEN, RED, GREY = "#3266ad", "#e08214", "#2f8f5b", "#c23b3b", "#8a8f98"
STAGE_COLORS = ("#3266ad", "#7fb0e0", "#2f8f5b", "#a6d18f", "#e08214", "#f3c07b", "#8657a3", "#c9b3dc")
STYLE = {
    "figure.dpi": 130,
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#5b616b",
    "axes.titlesize": 14,
    "axes.titlepad": 8,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e6e8ec",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 2.2,
    "legend.fontsize": 11,
    "figure.constrained_layout.h_pad": 0.12,
    "figure.constrained_layout.w_pad": 0.12,
}

Panel = Callable[[Axes, Run], None]


def series(run: Run, kind: str, key: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric."""
    found = [(record.step, record.metrics[key]) for record in run.of_kind(kind) if key in record.metrics]
    return [step for step, _ in found], [value for _, value in found]


def finish(axes: Axes, title: str, unit: str) -> None:
    """Title, labels, legend."""
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best")


def reward(axes: Axes, run: Run) -> None:
    """Reward of the training samples and of the held-out prompts."""
    axes.plot(*series(run, "step", "reward"), color=BLUE, alpha=0.55, label="training samples")
    axes.plot(*series(run, "evaluation", "reward_heldout"), "o-", color=ORANGE, label="held out, greedy")
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    finish(axes, "Reward", "mean reward")


def mismatch(axes: Axes, run: Run) -> None:
    """Mismatch KL of each step with the limit of the job."""
    limit = float(run.spec.get("limits", {}).get("mismatchKL", {}).get("warn", 0.015))
    steps, kl = series(run, "step", "mismatch_kl")
    axes.plot(steps, kl, color=BLUE, label="mean of the step")
    axes.axhline(limit, color=RED, linestyle="--", linewidth=1.2, label=f"limit {limit:g}")
    if any(value > 0 for value in kl):
        axes.set_yscale("log")
    finish(axes, "Mismatch of trainer and engines", "KL (k3), nat")


def staleness(axes: Axes, run: Run) -> None:
    """Age of the samples with the limit of the job."""
    limit = run.spec["rollout"].get("maxOffPolicySteps", 8)
    axes.plot(*series(run, "step", "off_policy_max"), color=BLUE, drawstyle="steps-mid", label="oldest")
    axes.plot(*series(run, "step", "off_policy_mean"), color=GREEN, label="mean")
    axes.axhline(limit, color=RED, linestyle="--", linewidth=1.2, label=f"limit {limit}")
    axes.set_ylim(-0.1, limit + 0.6)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    finish(axes, "Age of the samples", "steps")


def sync_stages(axes: Axes, run: Run) -> None:
    """Seconds of each stage of each weight sync, stacked."""
    syncs = run.of_kind("sync")
    stages = [record.stages for record in syncs]
    names = list(dict.fromkeys(name for found in stages for name in found))
    positions = range(1, len(syncs) + 1)
    bottom = [0.0] * len(syncs)
    for index, name in enumerate(names):
        height = [found.get(name, 0.0) for found in stages]
        color = STAGE_COLORS[index % len(STAGE_COLORS)]
        axes.bar(positions, height, bottom=bottom, width=1.0, color=color, label=name)
        bottom = [low + more for low, more in zip(bottom, height, strict=True)]
    finish(axes, "Weight sync by stage", "seconds")
    axes.set_xlabel("sync")
    if syncs:
        axes.set_ylim(0, 1.45 * max(bottom))
        axes.legend(loc="upper left", ncols=3, columnspacing=1.0, handlelength=1.2)


def tokens(axes: Axes, run: Run) -> None:
    """Sampled tokens a second; a zero is a step beside which nothing was left to sample, and no speed."""
    found = [(step, speed) for step, speed in zip(*series(run, "step", "tokens_per_second"), strict=True) if speed > 0]
    steps, speed = [step for step, _ in found], [speed for _, speed in found]
    axes.fill_between(steps, speed, color=GREEN, alpha=0.18, linewidth=0)
    axes.plot(steps, speed, color=GREEN)
    axes.set_ylim(bottom=0)
    finish(axes, "Sampling", "tokens a second")


def entropy(axes: Axes, run: Run) -> None:
    """Entropy of the policy."""
    axes.plot(*series(run, "step", "entropy"), color=BLUE)
    axes.set_ylim(bottom=0)
    finish(axes, "Entropy of the policy", "nat a token")


PANELS: dict[str, Panel] = {
    "reward": reward,
    "mismatch_kl": mismatch,
    "staleness": staleness,
    "sync_seconds": sync_stages,
    "tokens_per_second": tokens,
    "entropy": entropy,
}


def draw(run: Run, folder: Path) -> list[Path]:
    """Write all PNG files; returns their paths.

    Raises:
        OSError: the folder cannot be written.
    """
    written = []
    with plt.style.context(STYLE):
        for name, panel in PANELS.items():
            figure, axes = plt.subplots(figsize=(7.2, 4.4), layout="constrained")
            panel(axes, run)
            written.append(save(figure, folder / f"{name}.png"))
        figure, grid = plt.subplots(2, 3, figsize=(16.5, 9.0), layout="constrained")
        for axes, panel in zip(grid.flat, PANELS.values(), strict=True):
            panel(axes, run)
        figure.suptitle(headline(run), fontsize=17, fontweight="bold")
        written.append(save(figure, folder / "overview.png"))
    return written


def headline(run: Run) -> str:
    """Name and precision of the run."""
    precision = run.status.get("precision", {})
    return f"{run.name}   recipe {precision.get('recipe', '?')}   wire {precision.get('wire', '?')}"


def save(figure: plt.Figure, path: Path) -> Path:
    """Write and forget a figure."""
    figure.savefig(path)
    plt.close(figure)
    return path
