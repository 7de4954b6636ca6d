"""What docs/results.md, README.md and docs/choose.md say in words holds in the committed results.

The pages take their figures from the results; these are the verdicts between the figures.
"""

import itertools
import sys
from pathlib import Path

import pytest

PAPERS = Path(__file__).parents[1] / "benchmarks" / "papers"


@pytest.fixture(scope="module")
def found():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(PAPERS), str(PAPERS.parent), *sys.path])
        import _glue_page
        import _page_tables
        import _summary

        results = {name: _summary.Results(name) for name in ("glue", "vision", "language")}
        yield {
            "page": _page_tables,
            "glue": results["glue"],
            "glue_page": _glue_page,
            "mobilenet": _page_tables.of_vision(results["vision"], "mobilenet-v2"),
            "efficientnet": _page_tables.of_vision(results["vision"], "efficientnet-lite0"),
            "language": _page_tables.of_language(results["language"]),
            "results": results,
        }


def pair(table, recipe, own=False):
    """Target and kept, both the better the larger."""
    point = table.point(recipe)
    if "gsm8k_nll" in point.figures:
        return -point["gsm8k_nll"], -point["wikitext_nll"]
    return point["target"], point["imagenet_tuned_bn" if own else "imagenet"]


def beats(one, other):
    return one[0] > other[0] and one[1] > other[1]


def test_no_run_is_missing(found):
    assert all(results.missing == [] for results in found["results"].values())


def test_what_the_grid_chose_is_the_best_of_seed_0(found):
    glue = found["glue"]
    for task, start in itertools.product(found["glue_page"].NAMES, ("pi", "ri")):
        grid = [r for r in glue.where(task=task, method=start, seed=0) if "k" in r]
        for by, choice in glue.protocol["choice"][f"{task}-{start}"].items():
            best = max(grid, key=lambda run: run[by])
            assert [best["k"], best["t0"]] == choice


def test_a_wide_shift_and_a_fifth_of_the_rate_do_not_learn_cola(found):
    page, glue = found["glue_page"], found["glue"]
    for name, by_task in page.same_for_all(glue).items():
        learned = page.median(by_task["cola"], "dev") > 5
        assert learned == ("t0 0.5" not in name and "0.2 of" not in name), name


def test_recadams_weights_and_those_of_lower_rates_end_nearer(found):
    page, glue = found["glue_page"], found["glue"]
    ways = page.same_for_all(glue)
    far = {name: [page.median(r, "distance") for r in w.values()] for name, w in ways.items()}
    for name, distances in far.items():
        if name != "plain Adam":
            assert all(a < b for a, b in zip(distances, far["plain Adam"], strict=True)), name


@pytest.mark.parametrize(("by", "field"), [("dev", "dev"), ("half_a", "half_b")])
def test_recadam_beside_plain_adam_is_within_what_seeds_differ_by(found, by, field):
    page, glue = found["glue_page"], found["glue"]
    gaps = [0.0] * 5
    for task in page.NAMES:
        plain = {run["seed"]: run[field] for run in glue.where(task=task, method="vanilla")}
        for run in page.chosen(glue, task, "pi", by):
            gaps[run["seed"]] += (run[field] - plain[run["seed"]]) / len(page.NAMES)
    assert min(gaps) < 0 < max(gaps)
    of_glue = page.Glue(glue)
    for without in (None, 0):
        words = of_glue.ahead("pi", by, without)
        assert float(words.split()[0]) < max(gaps) - min(gaps)
        assert ("ahead" in words) == (by == "dev")


def test_from_random_weights_it_comes_to_where_it_comes_from_the_pretrained_ones(found):
    page, glue = found["glue_page"], found["glue"]
    for task in page.NAMES:
        pi, ri = ([r["dev"] for r in page.chosen(glue, task, way, "dev")] for way in ("pi", "ri"))
        assert max(pi) > min(ri)
        assert max(ri) > min(pi)


def test_a_weaker_coupled_pull_learns_as_much_as_the_decoupled_one(found):
    page, glue = found["glue_page"], found["glue"]
    for task in page.NAMES:
        (weak,) = glue.where(task=task, method="coupled-weak")
        (decoupled,) = glue.where(task=task, method="pi", k=weak["k"], t0=weak["t0"], seed=0)
        assert weak["dev"] > decoupled["dev"] - 1.5
        (coupled,) = glue.where(task=task, method="coupled", seed=0)
        assert coupled["dev"] < weak["dev"] - 5


def test_figure_2s_words(found):
    glue = found["glue"]
    for task in ("stsb", "cola"):
        (plain,) = [r for r in glue.where(task=task, method="vanilla", seed=0) if "curve" in r]
        ours = {
            r["k"]: r["curve"]
            for r in glue.where(task=task, method="pi", t0=0.3, seed=0)
            if "curve" in r
        }
        assert sorted(ours) == [0.02, 0.1, 0.5]
        for curve in ours.values():
            assert curve[7][0] < 200
            assert curve[7][2] < 0.1 * plain["curve"][7][2]  # held where they were
            assert curve[-1][1] > plain["curve"][-1][1]  # less of the training set is learned
        ends = [ours[k][-1][2] for k in sorted(ours)]
        assert ends[0] < min(ends[1:])
        assert max(ends) < plain["curve"][-1][2]


def test_a_fifth_of_the_rate_is_ahead_of_recadams_default_but_not_everywhere(found):
    low, ours = "standard-0.2lr", "recadam-0.3-0.1"
    assert beats(pair(found["language"], low), pair(found["language"], ours))
    low, ours = "standard-adamw-0.2lr", "recadam-30-10"
    assert beats(pair(found["mobilenet"], low), pair(found["mobilenet"], ours))
    assert pair(found["efficientnet"], ours)[1] > pair(found["efficientnet"], low)[1]


def others(table):
    """Methods at the rate of the table: no RecAdam, no other rate, nothing untrained."""
    return [
        recipe for recipe in table.recipes
        if not ("recadam" in recipe or "lr" in recipe or recipe in ("probe", "pretrained"))
    ]  # fmt: skip


def test_on_images_the_wide_shift_keeps_more_than_any_other_method_at_its_rate(found):
    for name in ("mobilenet", "efficientnet"):
        ours = pair(found[name], "recadam-50-15")
        assert all(pair(found[name], recipe)[1] < ours[1] for recipe in others(found[name]))
    assert beats(pair(found["efficientnet"], "probe"), ours)


def test_on_text_lora_at_the_same_rate_keeps_more_than_the_wide_shift_and_learns_less(found):
    table = found["language"]
    (run,) = [run for run in table.runs if run["recipe"] == "lora-low"]
    assert run["lr"] == 1e-3
    lora, ours = pair(table, "lora-low"), pair(table, "recadam-0.5-0.15")
    assert lora[1] > ours[1]
    assert lora[0] < ours[0]
    more = [r for r in others(table) if pair(table, r)[1] > ours[1]]
    assert more == ["lora-low"]


def test_at_equal_target_the_wide_shift_has_no_lead(found):
    table, page = found["mobilenet"], found["page"]
    names = ("recadam-50-15", "l2-sp-adamw", "standard-adamw-0.2lr")
    kept = [page.matched(table, name, "mobilenet-v2") for name in names]
    assert kept[0] - max(kept[1:]) < 0.7  # a standard error
    own = [page.matched(table, r, "mobilenet-v2", "imagenet_tuned_bn") for r in (*names, "mofo")]
    assert own[0] < min(own[1:])
    wide = ("recadam-50-15", "recadam-50-06", "recadam-30-10")
    table = found["efficientnet"]
    assert [page.matched(table, r, "efficientnet-lite0") for r in wide] == [None] * 3
    at = [
        page.matched(found["language"], r, "language")
        for r in ("recadam-0.5-0.15", "standard-0.2lr")
    ]
    assert abs(at[0] - at[1]) < 0.01


def test_recadams_default_keeps_less_than_its_wide_shift_and_costs_less(found):
    names = {"language": ("recadam-0.3-0.1", "recadam-0.5-0.15")}
    for name in ("mobilenet", "efficientnet", "language"):
        default, wide = names.get(name, ("recadam-30-10", "recadam-50-15"))
        one, other = pair(found[name], default), pair(found[name], wide)
        assert one[0] > other[0]
        assert one[1] < other[1]


def test_what_is_said_of_flow(found):
    images, others_ = found["mobilenet"], found["efficientnet"]
    assert pair(images, "standard")[1] < 10 < 40 < pair(images, "flow")[1]
    assert pair(images, "flow-adamw")[1] < 5
    assert pair(images, "flow-normalized")[1] < pair(images, "flow")[1] / 2
    for table in (images, others_):
        assert beats(pair(table, "standard-0.2lr"), pair(table, "flow"))
    page = found["page"]
    rows = page.additions(found["language"], page.OF_TEXTS, "language")
    assert sum(row.kept < -0.001 for row in rows) > len(rows) / 2
    rows = page.additions(images, page.OF_PICTURES, "mobilenet-v2")
    assert sum(row.kept > 0 for row in rows) > len(rows) / 2
    assert page.kept_beside(images, "standard", "flow", "mobilenet-v2") > 60


def test_at_equal_target_lora_keeps_the_most_of_wikitext(found):
    matched = found["page"].matched
    at = {r: matched(found["language"], r, "language") for r in found["language"].recipes}
    assert min((r for r in at if at[r] is not None), key=at.get) in ("lora", "lora+flow")
    assert at["lora"] < at["lora-high"]
    assert at["lora-low"] is None


def test_l2_sp_has_the_best_target_at_the_high_rate(found):
    losses = {
        r: found["language"].point(r)["gsm8k_nll"]
        for r in found["language"].recipes
        if "lr" not in r
    }
    assert min(losses, key=losses.get) == "l2-sp"


def test_flow_by_token_learns_little_and_loses_the_most_of_wikitext(found):
    table = found["language"]
    assert table.point("flow-token")["gsm8k_nll"] > 1.2
    kept = {r: table.point(r)["wikitext_nll"] for r in table.recipes}
    assert max(kept, key=kept.get) == "flow-token"


def test_what_is_said_of_batchnorms_statistics(found):
    table = found["efficientnet"]
    frozen = pair(table, "recadam-50-15-frozen-bn", own=True)
    trained = [r for r in table.recipes if r != "probe"]
    average = {r: sum(pair(table, r)) for r in trained}
    assert max(average, key=average.get) == "recadam-50-15-frozen-bn"
    assert pair(table, "standard", own=True)[1] > pair(table, "recadam-50-15", own=True)[1]
    for plain in ("standard", "standard-adamw"):
        assert pair(table, f"{plain}-frozen-bn", own=True)[1] < pair(table, plain, own=True)[1]
    for low in ("flow", "standard-0.2lr", "standard-adamw-0.1lr", "recadam-50-15"):
        assert pair(table, low)[0] < pair(table, "probe")[0] < frozen[0]
    gone = [r for r in found["mobilenet"].recipes if found["page"].diverged(found["mobilenet"], r)]
    assert gone == ["standard-frozen-bn", "standard-adamw-frozen-bn"]
    assert not any(found["page"].diverged(table, r) for r in table.recipes)


def test_what_predicts_forgetting(found):
    rows = found["page"].correlations(found["results"]["vision"], found["results"]["language"])
    texts = [row for name, row in rows.items() if "SmolLM2" in name]
    assert all(row["context-free"] > row["kl"] > row["distance"] for row in texts)
    pictures = [row for name, row in rows.items() if "ImageNet accuracy" in name]
    assert all(row["kl"] > row["distance"] for row in pictures)
    mobilenet, efficientnet = (row for name, row in rows.items() if "own BatchNorm" in name)
    assert mobilenet["kl"] < mobilenet["distance"]
    assert max(map(abs, efficientnet.values())) < 0.4
    distance = {r: found["language"].point(r)["distance"] for r in ("lora", "recadam-0.3-0.1")}
    assert distance["lora"] > distance["recadam-0.3-0.1"]  # and forgets less
    assert beats_in_kept(found["language"], "lora", "recadam-0.3-0.1")


def beats_in_kept(table, one, other):
    return pair(table, one)[1] > pair(table, other)[1]


def test_without_boolq_lora_has_no_lead(found):
    tests = [test for test in found["page"].TESTS if test != "boolq"]
    mean = {
        recipe: sum(found["language"].point(recipe)[test] for test in tests) / len(tests)
        for recipe in ("lora", "standard-0.2lr")
    }
    assert mean["lora"] - mean["standard-0.2lr"] < 0.002
