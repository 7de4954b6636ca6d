"""What docs/performance.md says around its tables."""

from __future__ import annotations

from _pages import table

ABOUT = """
A step of an optimizer does so little arithmetic that moving its tensors bounds it. The limit is the
bytes of one pass over them (RecAdam reads θ, g, m, v and θ* and writes θ, m and v; AdamW has no θ*)
over the speed of a large copy on the same device, measured in the same rounds. × limit is a time
over that; × AdamW is a time over that of torch's fused AdamW in the same rounds. Both are ratios,
and say more about other machines than milliseconds do. Host ms is the time until `step()` returns:
what a loop pays that cannot launch its work ahead; it varies more than the rest. AdamW is measured
again beside every three implementations, and its row shows the first of these times: where the
machine's pace has changed meanwhile, ratios of milliseconds are not the ratios that are shown. A
step can be a little below the limit, probably because a copy writes as much as it reads, and a step
less.
"""

OF_EIGHT_BIT = """
Moments of 8 bits have a kernel of their own because torchao's optimizer, which also keeps them in
blocks of 256 (in another code) and has no pull, takes longer than the target allows:
"""

OF_MOFO = """
All momenta must be known before it is known which of them are the largest: the limit counts two
passes, the moments and the move. Finding the threshold reads m again. `small-2000` are matrices
here, as vectors are not filtered.
"""

OF_PENALTIES = """
Timed is what a penalty does in an optimizer's step, without the step: × AdamW is what it adds to a
step of torch's fused AdamW, as a share of that.
"""

OF_PLACES = """
Anchors that are kept in the host's memory, page-locked, come over in chunks while the backward pass
runs; a chunk is let go when its weights are updated.
"""

OF_RUNS = """
A whole update as `finetune_loop` makes it, from data to step, timed one by one. FLOW scores the
data once, before training: that is the last column. Earlier protocols timed whole runs in turn;
they varied too much from run to run to tell, missed the target as well, and were given up for this
one, while the loop and the step were made to wait less.
"""

OF_DISK = """
Two checkpoints on disk, a process for each line, until what it wrote is on disk. The limit of the
drift is the time to read both; that of the merge, to read both and write one. Files that fit into
the machine's memory are read from there.
"""

CHOSEN = table(
    ["", "where", "what runs"],
    [
        ["`RecAdam`", "a GPU, Triton installed", "one kernel, by default and with `fused=True`"],
        [
            "",
            "– nothing is pulled (λ is 1), `fused=True`",
            "torch's fused AdamW, the same to the last bit",
        ],
        ["", "– `foreach=True`, `fused=False`, or `torch.compile`", "torch's operations"],
        [
            "",
            "a GPU without Triton",
            "torch's operations; `fused=True`: its fused AdamW, then the pull in a pass of its own",
        ],
        [
            "",
            "a CPU",
            "torch's choice for AdamW, which is a loop over the tensors; `fused=True`: torch's "
            "fused AdamW part by part, with the pull on each part while it is in a cache",
        ],
        ["`MoFO`", "a GPU, Triton installed", "kernels, by default and with `fused=True`"],
        ["", "elsewhere; sharded tensors", "torch's AdamW; what was not selected is put back"],
        [
            "`L2SP`, `EWC`, `MAS`, `PeriodicAverage`",
            "a GPU, Triton installed",
            "one kernel a penalty; several penalties on half precision: torch's operations",
        ],
        ["`L1SP`; all on a CPU", "", "torch's operations"],
    ],
)

CHOICE = """
After annealing, the default on a GPU is the kernel without anchors. A short shift (`t0=0.25,
width=0.02`) is over at two thirds of a run; the default one (0.3, 0.1) still pulls by 1e-4 at its
end, and keeps its anchors. Moments of 8 bits and random
rounding are done by the kernel on a GPU; elsewhere by torch's operations around the step, many
times as slow. What a kernel does not take (tensors with gaps, other dtypes) torch's operations do.
`fused` of RecAdam and MoFO is None in recipes.
"""

NOT_SAID = """\
- One machine of each kind, one run: another GPU has another ratio of arithmetic to memory, and
  figures of another day differ a little.
- Steps are measured on the shapes of models, with random weights and gradients. No model runs but
  in the sections on anchors, whole updates and scoring, and there too the weights are random.
- Nothing here is on several GPUs, nor sharded.
- A limit by memory says nothing on steps so small that launching them takes longer than they do:
  see the growth with size, and host ms.
- Speed says nothing on what a method learns or retains: [Results](results.md) has that."""
