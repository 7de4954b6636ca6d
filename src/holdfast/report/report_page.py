"""A forgetting report as one page: what is on its cards."""

from __future__ import annotations

from holdfast.evaluate.report import ForgettingReport
from holdfast.report.page import card, facts, folded, hero, listing, page, pair, place, tile, tiles
from holdfast.report.plot import JSON
from holdfast.report.report_figures import curve_plot, divergence_plot, drift_plot
from holdfast.report.score_figures import score_plots
from holdfast.report.tables import all_tables
from holdfast.report.verdict import source_of, verdict, where
from holdfast.report.words import change_of, nats, percent, plain

__all__ = ["to_html"]

_MARKS = {
    "nothing": "No loss found",
    "little": "Little forgotten",
    "some": "Some forgetting",
    "much": "Much forgotten",
    "unknown": "Not known",
}
_ABOUT_SCORES = (
    "Red was lost, green was gained; grey is within chance: the 95 % interval of the change "
    "holds 0."
)
_ABOUT_DRIFT = (
    "How far the weights moved, in per cent of their norm: by kind and layer, and by layer."
)


def to_html(report: ForgettingReport) -> str:
    """The page's text.

    Needs plotly, of which it takes the JavaScript.
    """
    report = ForgettingReport.from_json(report.to_json())  # lists as tuples, numpy's as floats
    plots: dict[str, JSON] = {}
    cards = [
        _hero(report),
        _tiles(report),
        card("Before and after", _scores(report, plots), _ABOUT_SCORES),
        card("Predictions", _divergences(report, plots), _about_divergences(report)),
        card("Weights", _drift(report, plots), _ABOUT_DRIFT),
        card("During training", pair(place(curve_plot(c), plots) for c in report.curves)),
        card("What could not be measured", listing(report.notes)),
        card("Details", "".join(folded(table) for table in all_tables(report) if table.rows)),
        card(
            "How it was measured", facts({"Settings": report.settings, "Versions": report.versions})
        ),
    ]
    return page(
        title=f"{plain(report.tuned)}: {verdict(report).headline}",
        brand="forgetting report",
        cards=cards,
        plots=plots,
        data=report.to_json(),
        download="forgetting-report.json",
        version=report.versions.get("holdfast", ""),
    )


def _hero(report: ForgettingReport) -> str:
    said = verdict(report)
    names = (report.base, report.tuned)
    headline = said.headline.replace("-fold", "\N{NON-BREAKING HYPHEN}fold")
    return hero(said.level, _MARKS[said.level], headline, said.sentences, names)


def _tiles(report: ForgettingReport) -> str:
    """The worst loss, the target, the predictions and the weights, in a figure each."""
    found = []
    changes = [(score, change_of(score)) for score in report.scores]
    lost = [(s, c) for s, c in changes if c.outcome == "lost" and s.role == "retained"]
    if lost:
        score, change = max(lost, key=lambda row: row[1].severity)
        found.append(tile(f"Worst loss: {plain(score.name)}", change.signed, change.unit, "lost"))
    for score, change in [(s, c) for s, c in changes if s.role == "target"][:1]:
        found.append(
            tile(f"Target: {plain(score.name)}", change.signed, change.unit, change.outcome)
        )
    for d in report.divergences[-1:]:
        label = f"Predictions moved on {source_of(d)}"
        unit = f"nats a {plain(d.per)}"
        found.append(tile(label, f"{nats(d.kl.value)} {unit}", unit))
    if (drift := report.drift) is not None:
        layers = where(drift.layers)
        most = f"Weights moved, most in {layers}" if layers else "Weights moved"
        found.append(tile(most, f"{percent(drift.total.relative)} of their norm", "of their norm"))
    return tiles(found)


def _scores(report: ForgettingReport, plots: dict[str, JSON]) -> str:
    return "".join(
        pair([place(left, plots), place(right, plots)])
        for left, right in score_plots(report.scores)
    )


def _divergences(report: ForgettingReport, plots: dict[str, JSON]) -> str:
    return place(divergence_plot(report.divergences), plots) if report.divergences else ""


def _about_divergences(report: ForgettingReport) -> str:
    about = "How far the tuned model's predictions are from the base model's on the same inputs."
    if any(d.name == "context-free" for d in report.divergences):
        about += " Context-free: on texts that the base model itself wrote."
    return about


def _drift(report: ForgettingReport, plots: dict[str, JSON]) -> str:
    plot = None if report.drift is None else drift_plot(report.drift)
    return "" if plot is None else place(plot, plots)
