"""Which recipe to start with: the advice of docs/results.md, with the figures it rests on."""

from __future__ import annotations

from _glue_page import Glue
from _page_tables import (
    LANGUAGE,
    NAMES,
    diverged,
    fields_of,
    full_title,
    matched,
    of_language,
    of_vision,
)
from _pages import number, prose
from _summary import Results, Table


class Pictures:
    """What is said of both image models at once: "this and that"."""

    def __init__(self, results: Results) -> None:
        self.tables = [of_vision(results, model) for model in NAMES]

    def say(self, recipe: str, field: str, alpha: float = 1.0) -> str:
        """A figure of each model, in per cent."""
        found = [number(table.point(recipe, alpha)[field], 1) for table in self.tables]
        return f"{' and '.join(found)} %"

    def kept(self, recipe: str) -> str:
        return self.say(recipe, "imagenet")

    def learned(self, recipe: str) -> str:
        return self.say(recipe, "target")


def steps_back(table: Table, where: str, alpha: float) -> tuple[list[str], int]:
    """The models that at α are no worse on the target and keep more, and how many there are."""
    base, *fields = fields_of(where)
    trained = [r for r in table.recipes if r != base]
    if base == "probe":
        trained = [r for r in trained if not diverged(table, r)]

    def gains(recipe: str) -> list[float]:
        before, after = table.point(recipe), table.point(recipe, alpha)
        return [(-1 if f.endswith("_nll") else 1) * (after[f] - before[f]) for f in fields]

    return [r for r in trained if min(gains(r)) >= 0], len(trained)


def start(of_glue: Glue, of_images: Results, of_lm: Results) -> str:
    """The advice."""
    pictures, texts = Pictures(of_images), of_language(of_lm)
    images, others = pictures.tables
    base = texts.point("pretrained")["wikitext_nll"]
    gone = {r: number(texts.point(r)["wikitext_nll"] - base, 2) for r in texts.recipes}
    kept = {r: number(texts.point(r)["wikitext_nll"], 3) for r in texts.recipes}
    learned = {r: number(texts.point(r)["gsm8k_nll"], 3) for r in texts.recipes}
    equal = {r: matched(texts, r, "language") for r in texts.recipes}
    even = {r: number(matched(images, r, "mobilenet-v2"), 1) for r in images.recipes}
    near = min((v, r) for r, v in equal.items() if v is not None and "lora" not in r)
    same = {r: number(value, 3) for r, value in equal.items()}
    own = {
        r: number(matched(images, r, "mobilenet-v2", "imagenet_tuned_bn"), 1)
        for r in images.recipes
    }
    back, models = steps_back(images, "mobilenet-v2", 0.75)
    backs, more = steps_back(others, "efficientnet-lite0", 0.75)
    probe = others.point("probe")
    under = [r for r in backs if others.point(r)["target"] < probe["target"]]
    words, written = steps_back(texts, "language", 0.7)
    lines = [
        f"""- **Lower a high learning rate first.** On GSM8K a fifth of 1e-3 learned as much
        ({learned["standard-0.2lr"]} against {learned["standard"]} nats) and lost
        {gone["standard-0.2lr"]} instead of {gone["standard"]} nats of WikiText-2. On images
        (MobileNetV2 and EfficientNet-Lite0) a fifth of AdamW's 1e-3 kept
        {pictures.kept("standard-adamw-0.2lr")} of ImageNet instead of
        {pictures.kept("standard-adamw")}, at {pictures.learned("standard-adamw-0.2lr")} of
        Flowers102 instead of {pictures.learned("standard-adamw")}. A rate can be too low: from the
        5e-5 of GLUE a fifth costs {of_glue.lower(0.2)}, and a fifth of SGD's .01 ends at
        {pictures.learned("standard-0.2lr")} of Flowers102 instead of
        {pictures.learned("standard")}.""",
        f"""- **Then sweep WiSE-FT.** It costs no training. {len(back)} of {models} models of
        MobileNetV2 are no worse on the target at α = .75 than they were, and keep more; of
        EfficientNet {len(backs)} of {more}, {len(under)} of which had ended below the linear probe.
        On text it is a trade ({len(words)} of {written} at α = .7), and a cheap one to look at.""",
        f"""- **LoRA for a language model**: at equal target it kept the most here (WikiText-2 at
        {same["lora"]}; the next, {full_title(LANGUAGE, near[1])}, at {same[near[1]]}, a fifth of
        the rate at {same["standard-0.2lr"]}). Its rate is the best at that target of the three that
        were run.""",
        f"""- **RecAdam where the rate stays high.** As it comes (`t0=0.3, width=0.1`) it learned as
        much of GSM8K as plain fine-tuning at that rate ({learned["recadam-0.3-0.1"]}) and lost
        {gone["recadam-0.3-0.1"]} instead of {gone["standard"]}; on images it kept
        {pictures.kept("recadam-30-10")}, at {pictures.learned("recadam-30-10")} of Flowers102.
        Plain fine-tuning at a fifth of the rate is ahead of that in both on GSM8K and MobileNetV2.
        With a wide shift (`t0=0.5, width=0.15`) it kept nearly all: it lost
        {gone["recadam-0.5-0.15"]} at {learned["recadam-0.5-0.15"]} on GSM8K, and kept
        {pictures.kept("recadam-50-15")} at {pictures.learned("recadam-50-15")} of Flowers102. On
        images no other method kept as much at that rate before WiSE-FT, each at one or two
        settings; on text LoRA at 1e-3 kept more (WikiText-2 at {kept["lora-low"]} beside
        {kept["recadam-0.5-0.15"]}) and learned less ({learned["lora-low"]}). On EfficientNet the
        linear probe alone is better in both ({number(probe["imagenet"], 1)} % at
        {number(probe["target"], 1)} %). At equal target, with WiSE-FT for all, the wide shift has
        no lead: on MobileNetV2 {even["recadam-50-15"]} % beside {even["l2-sp-adamw"]} % with L2-SP
        and {even["standard-adamw-0.2lr"]} % at a fifth of the rate, and with the models' own
        statistics it is behind ({own["recadam-50-15"]} % beside {own["mofo"]} % with MoFO,
        {own["l2-sp-adamw"]} % with L2-SP and {own["standard-adamw-0.2lr"]} % at a fifth); on
        EfficientNet it does not reach the target; on text {same["recadam-0.5-0.15"]} beside
        {same["standard-0.2lr"]} at a fifth.""",
        f"""- **At the low rates of encoders a shorter shift, if any.** On GLUE RecAdam's default
        costs {of_glue.cost(0.3, 0.1)}, `t0=0.25, width=0.02` {of_glue.cost(0.25, 0.02)}, and a wide
        shift leaves too little to learn in. What was kept is not measured there.""",
        f"""- **L2-SP** had the best target of all on GSM8K at the high rate ({learned["l2-sp"]};
        half the rate without it {learned["standard-0.5lr"]}) and lost {gone["l2-sp"]} (half the
        rate {gone["standard-0.5lr"]}); on images it kept {pictures.kept("l2-sp-adamw")} at
        {pictures.learned("l2-sp-adamw")}. At half the rate it lost {gone["l2-sp-0.5lr"]} at
        {learned["l2-sp-0.5lr"]}.""",
        f"""- **With BatchNorm, mind the statistics.** If the tuned model itself must still know the
        old task, hold them too. WiSE-FT averages them: at α = .5 and with its own statistics
        RecAdam's default kept {pictures.say("recadam-30-10", "imagenet_tuned_bn", 0.5)}, L2-SP
        {pictures.say("l2-sp-adamw", "imagenet_tuned_bn", 0.5)}, plain SGD
        {pictures.say("standard", "imagenet_tuned_bn", 0.5)}: the method matters little then. Or
        train with them frozen: RecAdam with a wide shift then kept
        {pictures.say("recadam-50-15-frozen-bn", "imagenet_tuned_bn")} at
        {pictures.learned("recadam-50-15-frozen-bn")} of Flowers102 (one seed), instead of
        {pictures.say("recadam-50-15", "imagenet_tuned_bn")} with statistics that moved.""",
    ]
    return "\n".join(prose(line) for line in lines)
