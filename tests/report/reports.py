"""Reports of every kind, for property tests."""

from hypothesis import strategies as st

from holdfast.evaluate.report import (
    ROLES,
    Curve,
    Divergence,
    Drift,
    DriftRow,
    Estimate,
    ForgettingReport,
    Score,
)

HOSTILE = (
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "<!--",
    "{{report}}",
    "var(--ink)",
    "a|b`c`*d*\n# e",
    "[red]bold[/red]",
    "%{x}",
    "\x1b[31m\u202e",
    "\udc80",
    "",
)
names = st.sampled_from(HOSTILE) | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
floats = st.floats() | st.sampled_from([0.0, 0.03, -0.03, 1e-9])
maybe = st.none() | floats
estimates = st.builds(Estimate, floats, maybe, maybe, st.integers(0, 10**6))
metrics = st.sampled_from(["nll", "perplexity", "accuracy", "acc_norm,none", "bleu"]) | names
scores = st.builds(
    Score, names, metrics, st.booleans(), estimates, estimates, estimates, st.sampled_from(ROLES)
)
divergences = st.builds(Divergence, names, estimates, st.integers(0), names, names)
distances = st.floats(min_value=0) | st.just(0.0)
rows = st.builds(DriftRow, names, distances, distances, st.integers(0), names, names)


def some(what, most=4):
    return st.lists(what, max_size=most).map(tuple)


drifts = st.builds(
    Drift, rows, some(rows, 8), some(rows), some(rows, 8), some(names), some(names), some(names)
)
curves = some(st.tuples(st.integers(0), floats)).flatmap(
    lambda points: names.map(
        lambda name: Curve(name, tuple(s for s, _ in points), tuple(v for _, v in points))
    )
)
settings = st.dictionaries(
    names, st.none() | st.booleans() | st.integers() | names | st.floats(allow_nan=False)
)
reports = st.builds(
    ForgettingReport,
    names,
    names,
    st.none() | drifts,
    some(divergences),
    some(scores),
    some(curves),
    some(names),
    settings,
    st.dictionaries(names, names, max_size=3),
)
