"""What docs/results.md says about its tables. Figures are taken from the results."""

from __future__ import annotations

from _glue_page import Glue
from _page_tables import TESTS, correlations, matched, of_language, of_vision
from _pages import number, prose
from _summary import Results

HEAD = """
# Results

The tables and figures of the papers that holdfast stands on, made again with real pretrained models
and real data, and then all methods side by side. Every figure comes from a JSON file that is in the
repository with the script that made it.
"""

DIFFERENT = """
## What differs from the papers

- **Smaller models.** MiniLM-L6 (22.7 M) where RecAdam's paper has BERT-base and ALBERT-xxlarge;
  MobileNetV2 and EfficientNet-Lite0 where FLOW's has ResNets; SmolLM2-135M-Instruct, dequantised
  from 4 bits, where it has Gemma-2-2B and Llama-3.2-3B.
- **Other data, or less.** Five of GLUE's tasks; Flowers102 with 2040 training images, not in the
  official split; GSM8K instead of MetaMathQA; 5000 of ImageNet's validation images; 500 rows of
  most language tests (1000 of MMLU), 200 questions where answers are written out.
- **Shorter.** 1000 updates a task on GLUE, 20 epochs on flowers, one epoch of GSM8K.
- **A smaller grid.** RecAdam's k ∈ {.02, .1, .5} and t0 ∈ {.1, .3} of the run, with one seed, where
  the paper has twenty settings; lr 5e-5 and γ = 0.1/lr, so that lr·γ is the paper's.
- **What was chosen on what.** The first table of GLUE chooses on the set that it reports, as the
  paper does, and says so. In vision and language all settings that were run are in the tables, but
  the advice below was read off these same test sets.
- **Few seeds**: medians are shown, and how many there are. Errors of sampling alone, one standard
  error: Flowers102 .9 points, ImageNet .7, WikiText-2 .03 nats (less between two models on the same
  text), an accuracy of the seven tests 2 points, GSM8K's exact match 2 points.
"""

GLUE = """
MiniLM-L6 (all-MiniLM-L6-v2, tuned for sentence embeddings) on CoLA (Matthews correlation), STS-B
(Pearson), MRPC, RTE and SST-2 (accuracy): 1000 updates of 32, lr 5e-5 linearly to 0, float32
weights under bfloat16 autocast. A number in brackets is how many seeds there are, where they are
not five.
"""

FIGURE_2 = """
Seed 0, t0 = 300. While λ is near 0 the weights stay where they were, and only the head learns; then
they go, less far the smaller k is, since the pull lasts on. RecAdam's training loss ends above
plain Adam's: it has learned less of the training set in as many updates.
"""

FIGURE_1 = """
λ weighs learning, 1 − λ recalling. k → ∞ is plain fine-tuning from t0 on, k = 0 is both in equal
parts throughout. In `RecAdamUpdate`, `t0` and `width` = 1/k are shares of the run.
"""

VISION = """
A new head is fitted on the frozen features first, in all rows; then head and body are tuned for 20
epochs on Flowers102: SGD with momentum .9, lr .01 and weight decay 5e-4 as in the paper, or Adam
with lr 1e-3 and no decay; batches of 120, no warm-up, cosine to 0. ImageNet is tested with the
pretrained head and the pretrained BatchNorm statistics put back; "own statistics" is beside it what
the model keeps with those that it has after training, which no method here holds on to. "ImageNet
at Flowers102 …" compares at equal target: the most that is kept anywhere on WiSE-FT's way from the
tuned model to the start (weights, statistics and head; thin lines in the picture) where the target
is at least that good.
"""

LANGUAGE = """
SmolLM2-135M-Instruct on GSM8K, one epoch in batches of 32, at a learning rate where plain
fine-tuning truly forgets, 1e-3 (3 % warm-up, linearly to 0; LoRA 3e-3). Losses are nats a token,
of the reference answers or the text; MBPP's is that of the reference solution. "Seven tests" is the
mean accuracy below. The last column compares at equal target: the lowest WikiText-2 loss anywhere
on WiSE-FT's way back where GSM8K's is at most 0.65, in straight lines between measured points (α =
1, .7, .5, 0). Exact match wants the answer after "####", which the pretrained model does not write.
BoolQ is asked without its passage.
"""

PREDICTS = """
What was lost by all trained models of the two sections above (medians over seeds, without the
points of WiSE-FT), and its rank correlation (Spearman's ρ) with what can be measured without any
test of the old abilities: how far the weights went, how far the predictions moved on the target's
inputs, KL(base‖tuned), and on texts that the base writes itself from nothing. Images have no such
texts. The two runs that diverged are left out.
"""

AGAIN = """
```sh
python benchmarks/papers/glue.py --model MINILM --data DATA --runs RUNS/glue
python benchmarks/papers/vision.py --weights FILE --efficientnet DIR --flowers TAR \\
    --imagenet TAR TAR --runs RUNS/vision
python benchmarks/papers/language.py --model SMOLLM2 --data DATA --runs RUNS/language
```

Started several times side by side they share the work, and a run that is done is not done again.
`--collect benchmarks/papers/results/NAME.json` puts the runs into one file;
`python benchmarks/papers/page.py` makes this page of them.
"""


def start(of_glue: Glue, of_images: Results, of_lm: Results) -> str:
    """The advice, with the figures it rests on."""
    images, texts = of_vision(of_images, "mobilenet-v2"), of_language(of_lm)
    others = of_vision(of_images, "efficientnet-lite0")
    base = texts.point("pretrained")["wikitext_nll"]
    gone = {r: number(texts.point(r)["wikitext_nll"] - base, 2) for r in texts.recipes}
    learned = {r: number(texts.point(r)["gsm8k_nll"], 3) for r in texts.recipes}
    equal = {r: number(matched(texts, r, "language"), 3) for r in texts.recipes}

    def kept(recipe: str, field: str = "imagenet") -> str:
        return " and ".join(f"{number(t.point(recipe)[field], 1)} %" for t in (images, others))

    def cost(recipe: str) -> str:
        gaps = [t.point("standard-adamw")["target"] - t.point(recipe)["target"] for t in both]
        return " and ".join(number(gap, 1).replace("-", "−") for gap in gaps)

    def even(recipe: str) -> str:
        models = zip(both, ("mobilenet-v2", "efficientnet-lite0"), strict=True)
        return " and ".join(number(matched(t, recipe, model), 1) for t, model in models)

    both = (images, others)
    lines = [
        f"""- **Lower the learning rate first.** On GSM8K a fifth of it learned as much
        ({learned["standard-0.2lr"]} against {learned["standard"]} nats) and lost
        {gone["standard-0.2lr"]} instead of {gone["standard"]} nats of WikiText-2. On images it kept
        {kept("standard-adamw-0.2lr")} of ImageNet instead of {kept("standard-adamw")} (MobileNetV2
        and EfficientNet-Lite0), for {cost("standard-adamw-0.2lr")} points of Flowers102.""",
        """- **Then sweep WiSE-FT.** It costs no training. For full fine-tuning at a high rate the
        first steps back often cost nothing of the target; otherwise it is a trade, and a cheap
        one to look at.""",
        f"""- **LoRA for a language model**: at equal target it kept the most here (WikiText-2 at
        {equal["lora"]}; a fifth of the rate {equal["standard-0.2lr"]}, RecAdam with a wide shift
        {equal["recadam-0.5-0.15"]}, plain fine-tuning {equal["standard"]}).""",
        f"""- **RecAdam where the rate is high.** As it comes (`t0=0.3, width=0.1`) it learned as
        much of GSM8K as plain fine-tuning ({learned["recadam-0.3-0.1"]}) and lost
        {gone["recadam-0.3-0.1"]}; on ImageNet it kept {kept("recadam-30-10")}, for
        {cost("recadam-30-10")} points of Flowers102. With a wide shift (`t0=0.5, width=0.15`) it
        kept nearly all: it lost {gone["recadam-0.5-0.15"]}, kept {kept("recadam-50-15")} and cost
        {cost("recadam-50-15")} points, and GSM8K ended at {learned["recadam-0.5-0.15"]}. No other
        method kept as much at that rate without a sweep. At equal target, with WiSE-FT for
        all, the lead is small: on images {even("recadam-50-15")} % beside {even("l2-sp-adamw")} %
        with L2-SP, {even("standard-adamw-0.2lr")} % at a fifth of the rate and
        {even("standard-adamw")} % by plain AdamW; on text it is where a lower rate is.""",
        f"""- **At the low rates of encoders a shorter shift, or none.** On GLUE RecAdam's default
        costs {of_glue.cost(0.3, 0.1)} points in the mean, `t0=0.25, width=0.02` costs
        {of_glue.cost(0.25, 0.02)}, and a wide shift leaves too little to learn in.""",
        f"""- **L2-SP is the easiest penalty**: at the same rate the best target on GSM8K
        ({learned["l2-sp"]}), {gone["l2-sp"]} lost; {kept("l2-sp-adamw")} of ImageNet for
        {cost("l2-sp-adamw")} points. At half the rate it lost {gone["l2-sp-0.5lr"]}
        ({learned["l2-sp-0.5lr"]}).""",
        f"""- **With BatchNorm, mind the statistics.** If the tuned model itself must still know the
        old task, train with them frozen and hold the weights: RecAdam with a wide shift then kept
        {kept("recadam-50-15-frozen-bn", "imagenet_tuned_bn")} with its own statistics, instead of
        {kept("recadam-50-15", "imagenet_tuned_bn")} (one seed).""",
    ]
    return "\n".join(prose(line) for line in lines)


def say_glue(of_glue: Glue) -> str:
    return prose(
        f"""By the paper's protocol RecAdam is {of_glue.ahead("pi", "dev")} plain Adam in the mean;
        chosen on one half of dev and reported on the other it is {of_glue.ahead("pi", "half_a")}.
        Neither is more than the seeds differ by. From random weights (RI) it comes to about where
        it comes from the pretrained ones, as in the paper. With one setting for all tasks the
        default costs {of_glue.cost(0.3, 0.1)} points ({of_glue.worse(0.3, 0.1)} with every seed), a
        short shift {of_glue.cost(0.25, 0.02)}, half the learning rate {of_glue.lower(0.5)}; with
        RecAdam the weights end nearer to the pretrained ones. A wide shift (t0 .5) leaves too
        little of a run of 1000 updates at this learning rate: CoLA is not learned at all, as it is
        not at a fifth of the rate."""
    )


def say_vision(results: Results) -> str:
    found, others = of_vision(results, "mobilenet-v2"), of_vision(results, "efficientnet-lite0")
    kept = {
        name: number(found.point(name)["imagenet"], 1)
        for name in ("standard", "flow", "flow-adamw", "standard-adamw")
    }
    ours, plain = others.point("recadam-50-15"), others.point("standard")
    frozen = others.point("recadam-50-15-frozen-bn")
    return "\n\n".join(
        [
            prose(
                f"""The shape of FLOW's result is here with SGD: plain fine-tuning collapses on
                ImageNet ({kept["standard"]} %), FLOW keeps a good part ({kept["flow"]} %) and pays
                with the target. But at equal target WiSE-FT on the plain run keeps as much or more,
                and with Adam it keeps next to
                nothing ({kept["flow-adamw"]} % beside {kept["standard-adamw"]} %): Adam's steps do
                not shrink with the weights of the samples, which may be a good part of what FLOW
                does under SGD."""
            ),
            prose(
                f"""Much of what is lost is in BatchNorm, and what is "kept" depends on whose
                statistics are taken. With the models' own, plain SGD keeps
                {number(found.point("standard")["imagenet_tuned_bn"], 1)} % on MobileNetV2, and on
                EfficientNet more than RecAdam ({number(plain["imagenet_tuned_bn"], 1)} % against
                {number(ours["imagenet_tuned_bn"], 1)} %): a pull on the weights does not hold the
                statistics, which move to the flowers whatever the weights do. Put the pretrained
                ones back for the old task, or train with them frozen: on EfficientNet RecAdam then
                keeps {number(frozen["imagenet_tuned_bn"], 1)} % as it is, at
                {number(frozen["target"], 1)} % of Flowers102, the best pair of the table. The
                statistics cost target too: there FLOW
                ({number(others.point("flow")["target"], 1)} %) and RecAdam's wide shift
                ({number(ours["target"], 1)} %) end below the linear probe
                ({number(others.point("probe")["target"], 1)} %), as weights that are held do not
                follow them. Plain fine-tuning with frozen statistics keeps no more than without,
                and at these rates, with no warm-up, it diverged on MobileNetV2 (RecAdam, whose λ
                begins near 0, did not)."""
            ),
        ]
    )


def say_language(results: Results) -> str:
    found = of_language(results)
    token = found.point("flow-token")

    def span(recipe: str) -> str:
        losses = [r["points"]["1"]["wikitext_nll"] for r in found.runs if r["recipe"] == recipe]
        return f"{number(min(losses), 3)} to {number(max(losses), 3)}"

    def six(recipe: str) -> str:
        tests = [100 * found.point(recipe)[test] for test in TESTS if test != "boolq"]
        return number(sum(tests) / len(tests), 1)

    return "\n\n".join(
        [
            prose(
                f"""Forgetting shows in the losses of WikiText-2 and MBPP. The seeds differ by less
                than the recipes: WikiText-2 goes from {span("standard")} by plain fine-tuning,
                {span("flow")} with FLOW, {span("recadam-0.3-0.1")} with RecAdam's default and
                {span("recadam-0.5-0.15")} with its wide shift. The accuracies of so small a model
                are near chance in some of the seven tests (BoolQ, WinoGrande, MMLU, ARC-c), and
                LAMBADA *gains* from fine-tuning; they tell recipes apart only at the ends of the
                table. LoRA's lead in the seven is BoolQ's alone: without it, it has {six("lora")} %
                and a fifth of the rate {six("standard-0.2lr")} %."""
            ),
            prose(
                f"""By token, FLOW does not learn the target ({number(token["gsm8k_nll"], 2)} nats)
                and forgets the most ({number(token["wikitext_nll"], 2)}): the hard tokens of an
                answer are what there is to learn, and they weigh next to nothing."""
            ),
        ]
    )


ADDS = """
As it is, FLOW keeps something on top of most methods. At equal target little of that is left:
WiSE-FT buys the same.
"""


def say_predictors(of_images: Results, of_lm: Results) -> str:
    found = correlations(of_images, of_lm)
    texts = next(row for name, row in found.items() if "WikiText-2" in name)
    images = {
        kind: " and ".join(
            number(row[kind], 2) for name, row in found.items() if "ImageNet accuracy" in name
        )
        for kind in ("kl", "distance")
    }
    return prose(
        f"""Context-free KL, which needs no data at all, orders the language runs almost perfectly
        (ρ = {number(texts["context-free"], 2)} with WikiText-2; both are likelihoods of running
        text, so it should), and better than KL on the target's inputs
        ({number(texts["kl"], 2)}): what has learned the target must differ on it. The distance of
        the weights misleads across kinds of methods ({number(texts["distance"], 2)}): LoRA goes far
        and forgets little. For images KL on the target's inputs ({images["kl"]}) is no worse than
        the distance ({images["distance"]}), and neither tells what is lost through BatchNorm on
        EfficientNet."""
    )
