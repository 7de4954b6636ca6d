"""A small language model and its data, for a comparison without downloads.

The model is a Llama of two million parameters, pretrained on prose, verse and code. The data are
math problems to fine-tune it on, and unseen text of the three kinds. README.md names the sources.
"""

from pathlib import Path

_HERE = Path(__file__).parent

#: The folder of the model and its tokenizer.
MODEL = _HERE / "model"

#: Problems to learn and problems for the test, with ``question`` and ``answer``.
TRAIN, DEV = _HERE / "gsm8k-train.jsonl.gz", _HERE / "gsm8k-dev.jsonl.gz"

#: Text of each kind that the model was pretrained on, by name.
RETAINED = {kind: _HERE / f"{kind}.txt.gz" for kind in ("prose", "verse", "code")}
