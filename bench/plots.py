"""Pictures of what `transports` and `peers` kept: latency distributions, and cost against streams.

matplotlib comes with the extra (`pip install -e '.[bench]'`). `python -m bench.plots KEPT.json DIR` draws a run that
was kept by --json. SVG, without dates and with fixed ids, so that a picture of the same figures is the same file.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from itertools import chain
from pathlib import Path
from typing import Any

from bench import arguments

# The shares of all tokens, or streams, that the distributions are kept at.
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)
WIDTH_IN, ROW_IN = 9.0, 3.6
BASELINE = "C writer"
MODES = {"sse": "SSE", "chunked": "chunked text", "ws": "WebSocket"}

Pyplot = Any  # matplotlib has no types where it isn't installed


def main(argv: list[str]) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.plots", description=__doc__)
    of = arguments.kept(_look, "`python -m bench transports` or `peers`")
    parser.add_argument("kept", type=of, metavar="KEPT.json", help="what --json kept")
    parser.add_argument("folder", type=arguments.new_folder, metavar="DIR", help="where the pictures go")
    options = parser.parse_args(argv)
    for path in draw(options.kept, options.folder):
        print(path)
    return 0


def _look(kept: dict[str, Any]) -> None:
    """Fails where a run has nothing that is drawn."""
    if "samples" in kept:
        for sample in kept["samples"]:
            _ = [sample[name] for name in ("contender", "mode", "round")]
            _ = [float(sample[name]) for name in ("step_ms", "streams", "cpu_us", "gap_p50_ms", "gap_p99_ms")]
        _ = kept["samples"][0]
    else:
        runs = [run for each in kept["figures"].values() for found in each.values() for run in found]
        _ = [float(run[name]) for run in runs for name in ("cpu_us", "memory_kib")], runs[0]


def draw(kept: dict[str, Any], folder: str) -> list[Path]:
    """The pictures of a run that was kept, of whichever benchmark. Raises SystemExit without matplotlib."""
    pyplot = _pyplot()
    Path(folder).mkdir(parents=True, exist_ok=True)
    pictures = _peers(pyplot, kept) if "samples" in kept else _transports(pyplot, kept)
    paths = []
    for name, figure in pictures.items():
        figure.suptitle(figure.get_suptitle() + f"\n{kept['machine']}, load {kept['load']:.1f} before", fontsize=9)
        path = Path(folder) / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
        # Trailing blanks in a committed file are noise in its history.
        path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n", encoding="utf-8")
        paths.append(path)
    return paths


def check() -> None:
    """Before a long run: whether its pictures can be drawn. Raises SystemExit."""
    _pyplot()


def _pyplot() -> Pyplot:
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise SystemExit("pictures need matplotlib: pip install -e '.[bench]'") from None
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "sluice", "svg.fonttype": "none", "font.size": 9, "axes.grid": True})
    matplotlib.rcParams.update({"grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False})
    from matplotlib import pyplot

    return pyplot


# transports


def _transports(pyplot: Pyplot, kept: dict[str, Any]) -> dict[str, Any]:
    figures: dict[str, dict[str, list[dict[str, Any]]]] = kept["figures"]
    counts = sorted({int(count) for each in figures.values() for count in each})
    return {
        "transports-cost": _cost(pyplot, figures, counts),
        "transports-latency": _latency(pyplot, figures, counts[-1] if len(counts) < 3 else counts[-2]),
    }


def _cost(pyplot: Pyplot, figures: dict[str, Any], counts: list[int]) -> Any:
    """CPU and memory of each transport against the number of streams; bars from the least to the most."""
    figure, axes = pyplot.subplots(1, 2, figsize=(WIDTH_IN, ROW_IN + 0.6))
    for axis, field, label in (
        (axes[0], "cpu_us", "server CPU, µs a token"),
        (axes[1], "memory_kib", "server memory, KiB a stream"),
    ):
        for name, each in figures.items():
            # One stream's CPU and memory are the server's own turns and pages, not a stream's.
            at = [count for count in counts if str(count) in each and (count > 1 or len(counts) == 1)]
            found = [[run[field] for run in each[str(count)]] for count in at]
            middle = [statistics.median(values) for values in found]
            below = [m - min(values) for m, values in zip(middle, found, strict=True)]
            above = [max(values) - m for m, values in zip(middle, found, strict=True)]
            axis.errorbar(at, middle, yerr=[below, above], marker="o", markersize=3, linewidth=1, capsize=2, label=name)
        axis.set(xlabel="streams at once", ylabel=label, xscale="log", ylim=(0, None))
        axis.set_xticks([count for count in counts if count > 1 or len(counts) == 1])
        axis.get_xaxis().set_major_formatter("{x:,.0f}")
        axis.minorticks_off()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle("What each way to stream costs")
    figure.set_layout_engine("constrained", rect=(0, 0.14, 1, 0.86))
    return figure


def _latency(pyplot: Pyplot, figures: dict[str, Any], count: int) -> Any:
    """How many first tokens and gaps are at most so long, at one number of streams; the median run of each."""
    figure, axes = pyplot.subplots(1, 2, figsize=(WIDTH_IN, ROW_IN + 0.6), sharey=True)
    for axis, field, label in (
        (axes[0], "ttft_at_ms", "to the first token, ms"),
        (axes[1], "itl_at_ms", "between two tokens, ms"),
    ):
        for name, each in figures.items():
            runs = [run[field] for run in each.get(str(count), ()) if run.get(field)]
            if runs:
                axis.plot([statistics.median(at) for at in zip(*runs, strict=True)], SHARES, linewidth=1, label=name)
        axis.set(xlabel=label, xlim=(0, None))
    axes[0].set(ylabel="share that is there by then", ylim=(0, 1))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(f"Latency of each way to stream, {count:,} streams")
    figure.set_layout_engine("constrained", rect=(0, 0.14, 1, 0.86))
    return figure


# peers


def _peers(pyplot: Pyplot, kept: dict[str, Any]) -> dict[str, Any]:
    samples: list[dict[str, Any]] = kept["samples"]
    steps = sorted({sample["step_ms"] for sample in samples}, reverse=True)
    return {"peers-cost" if step else "peers-cost-unpaced": _ratios(pyplot, samples, step) for step in steps} | {
        "peers-latency": _gaps(pyplot, samples, steps[0])
    }


def _ratios(pyplot: Pyplot, samples: list[dict[str, Any]], step: float) -> Any:
    """CPU of each server as a ratio to the C writer of the same round; a panel for each way, a mark for each number of
    streams."""
    mine = [sample for sample in samples if sample["step_ms"] == step]
    modes = [mode for mode in MODES if any(sample["mode"] == mode for sample in mine)]
    counts = sorted({sample["streams"] for sample in mine})
    figure, axes = pyplot.subplots(1, len(modes), figsize=(WIDTH_IN + 2, ROW_IN), squeeze=False)
    for axis, mode in zip(axes[0], modes, strict=True):
        base = {
            (s["round"], s["streams"]): s["cpu_us"] for s in mine if s["mode"] == mode and s["contender"] == BASELINE
        }
        found: dict[str, dict[int, list[float]]] = {}
        for sample in mine:
            by = base.get((sample["round"], sample["streams"]))
            if sample["mode"] == mode and by:
                at = found.setdefault(sample["contender"], {}).setdefault(sample["streams"], [])
                at.append(sample["cpu_us"] / by)
        names = sorted(found, key=lambda name: -statistics.median(chain.from_iterable(found[name].values())))
        for place, count in enumerate(counts):
            rows = [(y, found[name][count]) for y, name in enumerate(names) if count in found[name]]
            middle = [statistics.median(values) for _, values in rows]
            below = [m - min(values) for m, (_, values) in zip(middle, rows, strict=True)]
            above = [max(values) - m for m, (_, values) in zip(middle, rows, strict=True)]
            height = 0.8 / len(counts)
            ys = [y + (place - (len(counts) - 1) / 2) * height for y, _ in rows]
            axis.barh(ys, middle, height=height, xerr=[below, above], label=f"{count:,} streams", error_kw={"lw": 0.8})
        axis.set_yticks(range(len(names)), names)
        axis.set(title=MODES[mode], xlabel="CPU a token, × the C writer's")
        axis.grid(axis="y", visible=False)
    axes[0][0].legend(fontsize=8)
    figure.suptitle("CPU time of each server, " + (f"a token every {step:g} ms" if step else "as fast as it goes"))
    figure.set_layout_engine("constrained")
    return figure


def _gaps(pyplot: Pyplot, samples: list[dict[str, Any]], step: float) -> Any:
    """The median and the 99th percentile of the gaps between tokens."""
    mine = [sample for sample in samples if sample["step_ms"] == step]
    modes = [mode for mode in MODES if any(sample["mode"] == mode for sample in mine)]
    count = min(sample["streams"] for sample in mine)
    figure, axes = pyplot.subplots(1, len(modes), figsize=(WIDTH_IN + 2, ROW_IN), squeeze=False)
    for axis, mode in zip(axes[0], modes, strict=True):
        found: dict[str, tuple[float, float]] = {}
        for name in dict.fromkeys(sample["contender"] for sample in mine):
            runs = [s for s in mine if (s["contender"], s["mode"], s["streams"]) == (name, mode, count)]
            if runs:
                p50, p99 = (statistics.median(run[f"gap_{p}_ms"] for run in runs) for p in ("p50", "p99"))
                found[name] = p50, p99
        names = sorted(found, key=lambda name: -found[name][1])
        for y, name in enumerate(names):
            axis.plot(found[name], (y, y), color="0.6", linewidth=1, zorder=1)
        ys = range(len(names))
        axis.scatter([found[name][0] for name in names], ys, s=14, label="median", zorder=2)
        axis.scatter([found[name][1] for name in names], ys, s=14, label="99th percentile", zorder=2)
        axis.set_yticks(ys, names)
        axis.set(title=MODES[mode], xlabel="between two tokens, ms", xlim=(0, None))
    axes[0][0].legend(fontsize=8)
    figure.suptitle(f"Gaps between tokens, {count:,} streams" + (f", one due every {step:g} ms" if step else ""))
    figure.set_layout_engine("constrained")
    return figure


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
