"""The terms of the tables, each defined once: for `gcbench list words`, and for the report."""

from __future__ import annotations

LONG = 12
"""Rows of a terminal table above which a footnote points to this glossary."""
POINTER = "Definitions of all terms: `gcbench list words --details`."

WORDS: dict[str, str] = {
    "accuracy": "Share of test examples that the trained model classifies correctly, in percent. "
    "Tasks without one, such as a language model, are compared by their test loss.",
    "adversary": "A worker that sends an attack instead of its gradient (`gcbench run --attack`).",
    "all-gather": "A collective after which every worker has the payloads of all workers. Each "
    "decodes and averages them, so the bytes received grow with the number of workers.",
    "all-reduce": "A collective after which every worker has the sum of all workers' tensors. It "
    "needs payloads that can be summed without decoding.",
    "band": "The range of the uncompressed runs' results over their seeds.",
    "bias": "The mean error of a method over its random numbers. A biased method usually needs "
    "error feedback.",
    "bits": "Measured bits per element of the gradient: 8 times the bytes sent, divided by the "
    "number of elements. fp32 has 32.",
    "bucket": "Parameters whose gradients are concatenated and exchanged together, as in "
    "DistributedDataParallel.",
    "busbw": "Bus bandwidth as nccl-tests define it: bytes per second on the busiest link if the "
    "collective moved no more than it must.",
    "codec": "The pair of `encode`, from a gradient to a payload, and `decode`, back again.",
    "collective": "A communication among all workers, such as all-reduce, all-gather or "
    "reduce-scatter.",
    "compressor": "A method with its settings: how a gradient is encoded.",
    "contraction": "The error of a method is smaller than the gradient by a fixed factor. Error "
    "feedback provably converges for such methods.",
    "down": "What a worker receives per step. `ratio down` is fp32 bytes divided by these bytes.",
    "error feedback": "Each worker adds the error of its last payload, the residual, to its next "
    "gradient. Also called memory.",
    "fragment": "A part of the model that is exchanged on its own, in turn with the others, during "
    "a round of local steps (`--fragments`, Streaming DiLoCo).",
    "front": "The rows that no row of equal budget beats with as few bytes, by the interval of the "
    "paired difference (the Pareto front).",
    "hybrid sharding": "Each node holds the whole model, sharded over its ranks. Gradients are "
    "exchanged within a node, then between the nodes' replicas of a shard.",
    "interval": "The 95 % confidence interval of a mean over seeds, by Student's t. If it contains "
    "zero, these runs do not distinguish the two methods.",
    "link": "The network between two machines: its bandwidth in Gbit/s and its latency in µs.",
    "local steps": "Optimizer steps of each worker between two exchanges of parameter differences "
    "(`--local-steps`); 0 exchanges every gradient.",
    "loopback": "The network of a machine with itself: memory copies, no cable. Its times do not "
    "predict a cluster.",
    "memory": "A worker's state across steps besides the model: a residual, a momentum, or both.",
    "modelled": "Computed from a link and from bytes, not measured; marked by ~.",
    "nominal": "Bits per element as the paper counts them; `payload` is what is sent here.",
    "none": "The uncompressed exchange of fp32 gradients: the baseline of every comparison.",
    "payload": "The encoded bytes that a worker sends (up) and receives (down), counted from the "
    "tensors handed to collectives.",
    "points": "Percentage points: 91 % is 2 points above 89 %.",
    "published": "The paper's result of the same run. With another number of steps, the difference "
    "reflects the budget.",
    "quantization": "Representing each element by one of a few levels.",
    "rank": "The number of a worker, from 0. In a table of results: a method's possible places in "
    "its tier; indistinguishable methods have overlapping places.",
    "reduce-scatter": "A collective after which every worker has the sum of one part of the "
    "gradient.",
    "residual": "The part of a gradient that the payload did not carry; see error feedback.",
    "ring": "An exchange in which a partial sum travels from worker to worker and is encoded again "
    "at each hop. Its error grows with the number of workers; that of two-shot does not.",
    "seed": "The number from which all random numbers of a run follow: weights, batches, "
    "rounding. Rows are means over seeds.",
    "segment": "A part of the gradient with its own scale: a tensor, the whole model, or a fixed "
    "number of elements.",
    "sparse": "A sparse all-reduce: owners add the entries of their regions, and the largest sums "
    "are all-gathered. For k entries a worker sends about 4 k words, for any number of workers.",
    "sparsification": "Sending few elements of the gradient and their positions.",
    "statistic": "A number on which the workers agree before they encode, such as a common scale.",
    "step": "One update of the model: gradients, exchange, optimizer.",
    "tier": "A range of measured bits whose methods are ranked among themselves.",
    "trimmed mean": "The mean without the largest and smallest values of each element (`--trim`).",
    "two-shot": "An exchange in two rounds: each worker averages one part of the gradient and "
    "sends the average, encoded again. A sharded parameter server.",
    "up": "What a worker sends per step. `ratio up` is fp32 bytes divided by these bytes.",
    "wire": "The bytes on the network: the payload times the collective's own factor. A ring "
    "all-reduce sends most of it twice.",
    "worker": "A process with its share of the batch, usually one GPU.",
}
"""Term -> definition, in alphabetical order."""


def rows() -> list[dict[str, str]]:
    """Return one row per term: `name` and `what`."""
    return [{"name": word, "what": meaning} for word, meaning in WORDS.items()]
