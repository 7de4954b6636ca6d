"""What docs/results.md says about its tables. Figures are taken from the results."""

from __future__ import annotations

from _page_tables import correlations, matched, of_language, of_vision
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
with lr 1e-3 and no decay; batches of 120, cosine to 0. ImageNet is tested with the pretrained head
and, with the pretrained BatchNorm statistics put back; beside it
with the model's own, which no method here holds on to. "ImageNet at Flowers102 …" compares at equal
target: the most that is kept anywhere on WiSE-FT's way from the tuned model to the start (weights,
statistics and head; thin lines in the picture) where the target is at least that good.
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
texts.
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


def start(of_images: Results, of_lm: Results) -> str:
    """The advice, with the figures it rests on."""
    images, texts = of_vision(of_images, "mobilenet-v2"), of_language(of_lm)
    others = of_vision(of_images, "efficientnet-lite0")
    base = texts.point("pretrained")["wikitext_nll"]
    names = ("standard", "standard-0.2lr", "lora", "l2-sp", "recadam-0.5-0.15")
    gone = {name: number(texts.point(name)["wikitext_nll"] - base, 2) for name in names}
    learned = {name: number(texts.point(name)["gsm8k_nll"], 3) for name in names}
    equal = {name: number(matched(texts, name, "language"), 3) for name in names}
    even = {
        name: number(matched(images, name, "mobilenet-v2"), 1)
        for name in ("recadam-50-15", "mofo", "standard-adamw")
    }
    kept, costs = [], []
    for found in (images, others):
        plain, ours = found.point("standard-adamw"), found.point("recadam-50-15")
        kept.append(
            f"{number(ours['imagenet'], 1)} % where AdamW kept {number(plain['imagenet'], 1)} %"
        )
        costs.append(number(plain["target"] - ours["target"], 1))
    lines = [
        f"""- **Lower the learning rate first.** On GSM8K a fifth of it learned as much
        ({learned["standard-0.2lr"]} against {learned["standard"]} nats) and lost
        {gone["standard-0.2lr"]} instead of {gone["standard"]} nats of WikiText-2.""",
        """- **Then sweep WiSE-FT.** It costs no training. For full fine-tuning at a high rate the
        first steps back often cost nothing of the target; otherwise it is a trade, and a cheap
        one to look at.""",
        f"""- **LoRA for a language model**: at equal target it kept the most here (WikiText-2 at
        {equal["lora"]}; a fifth of the rate {equal["standard-0.2lr"]}, RecAdam
        {equal["recadam-0.5-0.15"]}, plain fine-tuning {equal["standard"]}).""",
        f"""- **RecAdam with a wide shift where the rate is high** (`RecAdamUpdate(t0=0.5,
        width=0.15)`): no other way of training at that rate kept as much, without any sweep. It
        lost {gone["recadam-0.5-0.15"]} nats of WikiText-2, and on ImageNet it kept {kept[0]}
        (MobileNetV2) and {kept[1]} (EfficientNet-Lite0). It costs target: {costs[0]} and
        {costs[1]} points of Flowers102. At equal target, with WiSE-FT for all, it is on images
        where MoFO is ({even["recadam-50-15"]} and {even["mofo"]} % on MobileNetV2, plain AdamW
        {even["standard-adamw"]} %), and on text where a lower rate is. At the low rate of GLUE it
        leaves too little to learn: take a short shift there.""",
        f"""- **L2-SP at its default strength** had the best target loss on GSM8K
        ({learned["l2-sp"]}) and lost {gone["l2-sp"]}.""",
    ]
    return "\n".join(prose(line) for line in lines)


def say_glue() -> str:
    return prose(
        """RecAdam is not better than plain Adam here by more than the seeds differ, and on CoLA the
        layout of t0 .25 and width .02 is worse with four seeds of five; it ends nearer to the
        pretrained weights. From random weights (RI) it comes to about where it comes from the
        pretrained ones, as in the paper, by the few seeds there are. A wide shift (t0 .5) leaves
        too little of a run of 1000 updates at this learning rate: CoLA is not learned at all."""
    )


def say_vision(results: Results) -> str:
    found, others = of_vision(results, "mobilenet-v2"), of_vision(results, "efficientnet-lite0")
    kept = {
        name: number(found.point(name)["imagenet"], 1)
        for name in ("standard", "flow", "flow-adamw", "standard-adamw")
    }
    ours, plain = others.point("recadam-50-15"), others.point("standard")
    return "\n\n".join(
        [
            prose(
                f"""The shape of FLOW's result is here with SGD: plain fine-tuning collapses on
                ImageNet ({kept["standard"]} %), FLOW keeps a good part ({kept["flow"]} %) and pays
                with the target. But at equal target WiSE-FT on the plain run keeps as much or more,
                on EfficientNet FLOW ends below the linear probe, and with Adam it keeps next to
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
                ones back for the old task, or train with BatchNorm frozen."""
            ),
        ]
    )


def say_language(results: Results) -> str:
    found = of_language(results)
    token = found.point("flow-token")
    return "\n\n".join(
        [
            prose(
                """Forgetting shows in the losses of WikiText-2 and MBPP. The accuracies of so
                small a model are near chance in some of the seven tests (BoolQ, WinoGrande, MMLU,
                ARC-c), and LAMBADA *gains* from fine-tuning; they tell recipes apart only at the
                ends of the table."""
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
    return prose(
        f"""Context-free KL, which needs no data at all, orders the language runs almost perfectly
        (ρ = {number(texts["context-free"], 2)} with WikiText-2; both are likelihoods of running
        text, so it should), and better than KL on the target's inputs
        ({number(texts["kl"], 2)}): what has learned the target must differ on it. The distance of
        the weights misleads across kinds of methods ({number(texts["distance"], 2)}): LoRA goes far
        and forgets little. For images distance and KL do as well as each other, and neither tells
        what is lost through BatchNorm on EfficientNet."""
    )
