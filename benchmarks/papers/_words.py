"""What docs/results.md says about its tables. Figures are taken from the results."""

from __future__ import annotations

from _page_tables import correlations, of_language, of_vision
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
- **No settings chosen on a test set** beyond the first table of GLUE, which follows the paper and
  says so: in vision and language all settings that were run are in the tables.
- The median over the seeds is shown; where there are fewer seeds, the table says how many.
"""

GLUE = """
MiniLM-L6 fine-tuned on CoLA (Matthews correlation), STS-B (Pearson), MRPC, RTE and SST-2
(accuracy): 1000 updates of 32, lr 5e-5 linearly to 0, float32 weights under bfloat16 autocast. A
number in brackets is how many seeds there are, where they are not five.
"""

FIGURE_2 = """
Seed 0, t0 = 300. While λ is near 0 the weights stay where they were, and only the head learns; then
they go, less far the smaller k is, since the pull lasts on. At the end RecAdam's training loss is
that of plain Adam or a little above it.
"""

FIGURE_1 = """
λ weighs learning, 1 − λ recalling. k → ∞ is plain fine-tuning from t0 on, k = 0 is both in equal
parts throughout. In `RecAdamUpdate`, `t0` and `width` = 1/k are shares of the run.
"""

VISION = """
A new head is fitted on the frozen features first, in all rows; then head and body are tuned for 20
epochs on Flowers102: SGD with momentum .9, lr .01 and weight decay 5e-4 as in the paper, or Adam
with lr 1e-3; batches of 120, cosine to 0. ImageNet is tested with the pretrained head and the
pretrained BatchNorm statistics. The last columns are WiSE-FT's halfway point of the same runs; thin
lines in the picture are its way from the tuned model to the start.
"""

LANGUAGE = """
SmolLM2-135M-Instruct on GSM8K, one epoch in batches of 32, at a learning rate where plain
fine-tuning truly forgets, 1e-3 (3 % warm-up, linearly to 0; LoRA 3e-3). Losses are nats a token,
of the reference answers or the text; MBPP's is that of the reference solution. "Seven tests" is the
mean accuracy below. The last column compares at equal target: WikiText-2's loss where the recipe,
or WiSE-FT on its way back, has GSM8K's loss at 0.64, between the two measured points around it.
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
    plain, ours = images.point("standard-adamw"), images.point("recadam-50-06")
    lm = {name: texts.point(name) for name in ("pretrained", "standard", "standard-0.2lr", "lora")}
    slow = texts.point("recadam-0.5-0.15")
    rise = {
        name: number(point["wikitext_nll"] - lm["pretrained"]["wikitext_nll"], 2)
        for name, point in {**lm, "recadam": slow}.items()
    }
    return "\n".join(
        [
            "- **Lower the learning rate first.** On GSM8K a fifth of it learned as much "
            f"({number(lm['standard-0.2lr']['gsm8k_nll'], 3)} against "
            f"{number(lm['standard']['gsm8k_nll'], 3)} nats) and lost "
            f"{rise['standard-0.2lr']} instead of {rise['standard']} nats of WikiText-2.",
            "- **Where the rate must be high, or you do not know, RecAdam with a wide shift** "
            "(`RecAdamUpdate(t0=0.5, width=0.15)`): at the rate where plain fine-tuning lost "
            f"{rise['standard']} nats it lost {rise['recadam']}, for "
            f"{number(slow['gsm8k_nll'] - lm['standard']['gsm8k_nll'], 3)} nats of the target; "
            f"on flowers it kept {number(ours['imagenet'], 1)} % on ImageNet of "
            f"{number(images.point('probe')['imagenet'], 1)} %, where AdamW kept "
            f"{number(plain['imagenet'], 1)} %, for "
            f"{number(plain['target'] - ours['target'], 1)} points of the target.",
            "- **LoRA** is the other safe choice for a language model: it lost "
            f"{rise['lora']} nats at its own learning rate.",
            "- **WiSE-FT on top, always**: it costs no training, and every path in the two "
            "pictures below runs through better places than its end.",
            "- **A short shift is not enough where the rate is high**: t0 .25 with width .02 kept "
            f"{number(images.point('recadam-25-02')['imagenet'], 1)} % on ImageNet. On GLUE, where "
            "the rate is low and runs are short, it is the wide one that costs: see below.",
        ]
    )


def say_glue() -> str:
    return prose(
        """RecAdam is not better than plain Adam here by more than the seeds differ; it is as good,
        and ends nearer to the pretrained weights. From random weights (RI) it recovers what the
        pretrained ones have, as in the paper. A wide shift (t0 .5) leaves too little of a run of
        1000 updates at this learning rate: CoLA is not learned at all."""
    )


def say_vision(results: Results) -> str:
    found = of_vision(results, "mobilenet-v2")
    kept = {
        name: number(found.point(name)["imagenet"], 1)
        for name in ("standard", "flow", "flow-adamw", "standard-adamw", "recadam+flow-50-15")
    }
    tuned = found.point("standard")["imagenet_tuned_bn"]
    return prose(
        f"""The shape of FLOW's result is here: plain fine-tuning collapses on ImageNet
        ({kept["standard"]} %), FLOW keeps most of it ({kept["flow"]} %) and pays with some of the
        target. With Adam it does not ({kept["flow-adamw"]} % beside {kept["standard-adamw"]} %):
        Adam's steps do not shrink with the weights of the samples, and smaller steps may be a good
        part of what FLOW does under SGD. Together with RecAdam it keeps
        {kept["recadam+flow-50-15"]} %. Much of what plain fine-tuning loses is in BatchNorm: with
        the tuned statistics, which the JSON has too, it keeps {number(tuned, 1)} %."""
    )


def say_language(results: Results) -> str:
    found = of_language(results)
    token = found.point("flow-token")
    return "\n\n".join(
        [
            prose(
                """Forgetting shows in the losses of WikiText-2 and MBPP. The accuracies of so
                small a model are near chance in some of the seven tests (BoolQ, WinoGrande, MMLU,
                ARC-c), have a standard error of about 2 points each, and LAMBADA *gains* from
                fine-tuning; they tell recipes apart only at the ends of the table."""
            ),
            prose(
                f"""By token, FLOW does not learn the target ({number(token["gsm8k_nll"], 2)} nats):
                the hard tokens of an answer are what there is to learn, and they weigh nothing."""
            ),
        ]
    )


def say_predictors(of_images: Results, of_lm: Results) -> str:
    found = correlations(of_images, of_lm)
    texts = found["SmolLM2: WikiText-2 loss"]
    images = found["mobilenet-v2: ImageNet accuracy"]
    return prose(
        f"""Context-free KL, which needs no data at all, orders the language runs almost
        perfectly (ρ = {number(texts["context-free"], 2)} with WikiText-2); KL on the target's
        inputs does less well there ({number(texts["kl"], 2)}): what has learned the target must
        differ on it. For images KL on the target's inputs is the better of the two
        ({number(images["kl"], 2)}, distance {number(images["distance"], 2)}). The distance of the
        weights alone misleads across kinds of methods: LoRA goes far and forgets little."""
    )
