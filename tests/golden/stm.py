"""STM, literally: a target counts if the pretrained model's perplexity of it is at most τ."""

from golden.dft import log, number, targets


def loss(task, outputs, base, labels, tau=2.5):
    total, n = 0.0, 0
    now, before = targets(task, outputs, labels), targets(task, base, labels)
    for sample, of_base in zip(now, before, strict=True):
        for (p, wanted), (p_base, _) in zip(sample, of_base, strict=True):
            perplexity = 1 / number(p_base[wanted])
            total, n = total + (0.0 if perplexity > tau else -log(p[wanted])), n + 1
    return total / n
